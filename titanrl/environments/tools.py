"""Tool use: an environment in which the policy calls functions until it answers; and the calculator, a built-in tool.

A *malformed call* is an entry of `tool_calls` whose `function.arguments` is a string: the text that the policy wrote, which
could not be parsed as a JSON object. The reply to such a call describes the problem, as does the reply to a call of an unknown
tool or with invalid arguments.
"""

import ast
import asyncio
import inspect
import json
import math
import operator
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from titanrl.environments.interface import (
    Done,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    Limit,
    Message,
    Observation,
    Tool,
    ToolError,
    opening,
    parse_object,
    shown,
)

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|Warning|See Also):(\s|$)"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_MAX_SHOWN_CHARS = 60


class Toolset:
    """Base class for stateful tools. All public methods of a subclass are tools, except `start`, `rewards` and `close`.

    Stateless tools need no base class: the public methods of any object are tools.

    Example:
        class Notes(Toolset):
            async def start(self, episode: Episode) -> None:
                self._pages = episode.entry["metadata"]["pages"]

            def read(self, number: int) -> str:
                '''Return a page.

                Args:
                    number: Number of the page, from 0.
                '''
                if not 0 <= number < len(self._pages):
                    raise ToolError(f"There are {len(self._pages)} pages.")
                return self._pages[number]
    """

    async def start(self, episode: Episode) -> None:
        """Set up the state for an episode."""

    def rewards(self) -> Mapping[str, float]:
        """Return the rewards of the episode by name. This is called when the episode ends."""
        return {}

    async def close(self) -> None:
        """Release the resources of the episode."""


class ListedTools(Toolset):
    """Base class of tools that another program describes and runs. Nothing but `call` is called by the policy."""

    tools: Sequence[Tool] = ()
    """The tools, after `start`."""

    async def prepare(self) -> None:
        """List the tools, before any episode; raise `EnvironmentFailure` if that fails."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; raise `ToolError` if the policy got the call wrong."""
        raise NotImplementedError

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the episode so far, in addition to the numbers of calls."""
        return {}


@dataclass(slots=True)
class CallCounts:
    """Numbers of tool calls in an episode."""

    succeeded: int = 0
    """Calls with a result."""
    malformed: int = 0
    """Calls whose arguments were not a JSON object."""
    unknown: int = 0
    """Calls of a nonexistent tool."""
    wrong: int = 0
    """Calls with invalid arguments, and calls for which the tool raised `ToolError`."""
    refused: int = 0
    """Calls over the limit, which were not executed."""

    @property
    def run(self) -> int:
        """Calls that count towards the limit."""
        return self.succeeded + self.failed

    @property
    def failed(self) -> int:
        """Calls without a result."""
        return self.malformed + self.unknown + self.wrong

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the episode: all calls, calls without a result, and malformed calls."""
        num_calls, num_failed = self.run + self.refused, self.failed + self.refused
        return {"tool_calls": float(num_calls), "failed_calls": float(num_failed), "malformed_calls": float(self.malformed)}


class ToolEnvironment:
    """Asks the question, executes the tool calls of each message in order, and ends at a message without calls.

    A synchronous tool runs in the event loop and should return within milliseconds. Write slower ones as `async` functions, or
    run the environment in a separate process.

    Example: `ToolEnvironment(Calculator(), max_calls=4)`
    """

    def __init__(
        self,
        tools: object | Sequence[object],
        *,
        max_calls: int = 16,
        call_timeout_s: float = 60.0,
        max_result_chars: int = 4000,
        failed_call_reward: float = 0.0,
        system_prompt: str | None = None,
    ) -> None:
        """Read the signatures of the tools.

        Args:
            tools: A function, an object whose public methods are tools, or a list of these.
            max_calls: Maximum number of calls per episode. Calls over the limit are refused; the message after a refused call
                ends the episode.
            call_timeout_s: Time limit of an `async` call, in seconds. If a call exceeds it, the episode fails.
            max_result_chars: Maximum number of characters of a result that the policy sees.
            failed_call_reward: Reward added to the turn for each failed call, usually negative.
            system_prompt: System message before the question.

        Raises:
            ValueError: A tool lacks a docstring or type hints, or two tools have the same name.
        """
        if max_calls < 1:
            raise ValueError(f"max_calls: must be at least 1 (got {max_calls}). Raise it, or use single_turn without tools.")
        self._sources = tuple(tools) if isinstance(tools, list | tuple) else (tools,)
        self._functions: dict[str, tuple[Callable[..., Any], ToolSignature]] = {}
        for source in self._sources:
            for function in () if isinstance(source, ListedTools) else functions_of(source):
                signature = signature_of(function)
                if signature.tool.name in self._functions:
                    raise ValueError(f"tool {signature.tool.name}: two tools have this name. Rename one of them.")
                self._functions[signature.tool.name] = (function, signature)
        if not self._sources:
            raise ValueError("tools: at least one tool is required (got an empty list). Add one, or use single_turn.")
        self._max_calls = max_calls
        self._call_timeout_s = call_timeout_s
        self._max_result_chars = max_result_chars
        self._failed_call_reward = failed_call_reward
        self._system_prompt = system_prompt
        self.counts = CallCounts()
        """Numbers of calls so far."""

    async def prepare(self) -> None:
        """List the tools of servers once; raise `EnvironmentFailure` if one fails, or two tools have the same name."""
        for source in self._sources:
            if isinstance(source, ListedTools):
                await source.prepare()
                self._add(source)

    async def reset(self, episode: Episode) -> Observation:
        """Return the question and the tools."""
        for source in self._sources:
            if isinstance(source, Toolset):
                await source.start(episode)
            if isinstance(source, ListedTools):
                self._add(source)
        messages = opening(episode, self._system_prompt)
        return Observation(messages=messages, tools=[signature.tool for _, signature in self._functions.values()])

    def _add(self, source: ListedTools) -> None:
        for tool in source.tools:
            if tool.name in self._functions:
                raise EnvironmentFailure(f"tool {tool.name:.60}: two tools have this name. Leave one of them out.")
            properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
            signature = ToolSignature(
                tool=tool,
                types=dict.fromkeys(properties if isinstance(properties, Mapping) else (), TypeAdapter(Any)),
                required=frozenset(map(str, required if isinstance(required, list) else ())),
                is_checked=False,
            )
            self._functions[tool.name] = (partial(_call_listed, source, tool.name), signature)

    async def step(self, message: Message) -> Observation | Done:
        """Execute the calls of a message; end the episode at a message without calls, or after a refused call."""
        calls = message.get("tool_calls") or ()
        if not calls or self.counts.refused:
            return self._done()
        num_failed = self.counts.failed
        replies = [await self._reply(call, index) for index, call in enumerate(calls)]
        reward = self._failed_call_reward * (self.counts.failed - num_failed)
        return Observation(messages=replies, reward=reward, metrics=self._metrics)

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Return the rewards of the tools so far. Calls in a message that was cut off are not executed."""
        return self._done()

    def _done(self) -> Done:
        sources = [source for source in self._sources if isinstance(source, Toolset)]
        rewards = {name: value for source in sources for name, value in source.rewards().items()}
        return Done(rewards=rewards, metrics=self._metrics)

    @property
    def _metrics(self) -> dict[str, float]:
        listed = [source.metrics for source in self._sources if isinstance(source, ListedTools)]
        return self.counts.metrics | {name: value for metrics in listed for name, value in metrics.items()}

    async def close(self) -> None:
        """Close the stateful tools."""
        for source in self._sources:
            if isinstance(source, Toolset):
                await source.close()

    async def _reply(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the message with the result of a call, or with the reason why there is none."""
        function = call.get("function") or {}
        name = function.get("name") or ""
        if self.counts.run >= self._max_calls:
            self.counts.refused += 1
            text = f"Not run: all {self._max_calls} calls have been used. Answer without further calls."
        else:
            text = await self._result(str(name), function.get("arguments"))
        limit = self._max_result_chars
        if len(text) > limit:
            text = f"{text[:limit]}... ({len(text) - limit} more characters)"
        reply = {"role": "tool", "tool_call_id": call.get("id") or f"call_{index}", "content": text}
        return {**reply, "name": name} if name else reply

    async def _result(self, name: str, arguments: object) -> str:
        if isinstance(arguments, str) and (name in self._functions or not name):
            self.counts.malformed += 1
            which, form = "The call", self._names
            if name:
                example = ", ".join(f'"{argument}": ...' for argument in self._functions[name][1].types)
                which, form = f"The call to {name}", f"Write the arguments as one JSON object: {{{example}}}"
            problem = "the call is incomplete"
            try:
                parse_object(arguments)
            except ValueError as error:
                problem = f"its arguments {error}"
            return f"{which} is malformed: {problem}. {form}"
        if name not in self._functions:
            self.counts.unknown += 1
            which = f"There is no tool {name:.60}." if name else "The call does not name a tool."
            return f"{which} {self._names}"
        function, signature = self._functions[name]
        try:
            result = await self._run(name, function, signature.arguments({} if arguments is None else arguments))
        except ToolError as error:
            self.counts.wrong += 1
            return str(error)
        try:
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_as_text)
        except (TypeError, ValueError, RecursionError) as error:
            rule = f"its result cannot be written as JSON: {error} (got {shown(result)})"
            raise EnvironmentFailure(f"tool {name}: {rule}") from error
        self.counts.succeeded += 1
        return text

    async def _run(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a tool; raise `ToolError` if it rejected the call, `EnvironmentFailure` if it failed or took too long."""
        limit = asyncio.timeout(self._call_timeout_s)
        try:
            result = function(**arguments)
            if not isinstance(result, Awaitable):
                return result
            async with limit:
                return await result
        except (ToolError, EnvironmentFailure):
            raise
        except Exception as error:  # user code may raise anything
            if limit.expired():
                raise EnvironmentTimeout(f"tool {name}: took longer than {self._call_timeout_s:g} s") from None
            raise EnvironmentFailure(f"tool {name}: raised {type(error).__name__}: {error}") from error

    @property
    def _names(self) -> str:
        return f"The tools are {', '.join(self._functions)}."


def functions_of(source: object) -> list[Callable[..., Any]]:
    """Return the tools of an object: the function itself, or the public methods in the order of their definition."""
    if inspect.isroutine(source):
        return [source]
    if isinstance(source, type):
        raise ValueError(f"tools: expected an object (got the class {source.__name__}). Write {source.__name__}().")
    reserved = vars(Toolset) if isinstance(source, Toolset) else {}
    names = dict.fromkeys(
        name
        for base in reversed(type(source).__mro__)
        if base is not object
        for name, value in vars(base).items()
        if not name.startswith("_") and name not in reserved and isinstance(value, FunctionType | staticmethod | classmethod)
    )
    functions = [method for name in names if callable(method := getattr(source, name))]
    if not functions:
        raise ValueError(f"tools: {type(source).__name__} has no public method to use as a tool. Add one.")
    return functions


def _call_listed(source: ListedTools, name: str, /, **arguments: Any) -> Awaitable[str]:
    return source.call(name, arguments)


def _as_text(value: object) -> str:
    """Convert a part of a result that is no JSON value."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are not text; decode them")
    return str(value)


# Signatures: the JSON Schema of a tool from its signature and docstring, and validation of the arguments of calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSignature:
    """The description of a tool for the policy, and the types of its arguments.

    Example: `signature_of(add).arguments({"a": 1, "b": "2"}) == {"a": 1, "b": 2}` for `def add(a: int, b: int)`
    """

    tool: Tool
    """Name, description and JSON Schema of the tool."""
    types: Mapping[str, TypeAdapter[Any]]
    """Type of each argument."""
    required: frozenset[str]
    """Arguments without a default."""
    is_checked: bool = True
    """False if another program runs the tool, and checks the arguments itself."""

    def arguments(self, given: object) -> dict[str, Any]:
        """Return the arguments of a call in the types of the parameters; raise `ToolError` if they do not fit."""
        if not isinstance(given, Mapping):
            raise ToolError(self._explain([f"the arguments must be a JSON object, not {type(given).__name__}"]))
        if not self.is_checked:
            return dict(given)
        problems = [f"{name} is missing" for name in self.types if name in self.required and name not in given]
        problems += [f"unknown argument {name!s:.{_MAX_SHOWN_CHARS}}" for name in given if name not in self.types]
        arguments: dict[str, Any] = {}
        for name, adapter in self.types.items():
            try:
                arguments |= {name: adapter.validate_python(given[name])} if name in given else {}
            except ValidationError as error:
                for details in error.errors(include_url=False, include_context=False):
                    path = "".join(f"[{part!r}]" for part in details["loc"])
                    text = details["msg"].removeprefix("Value error, ")
                    got = f"(got {details['input']!a:.{_MAX_SHOWN_CHARS}})"
                    problems.append(f"{name}{path}: {text[:1].lower()}{text[1:]} {got}")
        if problems:
            raise ToolError(self._explain(problems))
        return arguments

    def _explain(self, problems: list[str]) -> str:
        names = [name if name in self.required else f"{name} (optional)" for name in self.types]
        takes = f"takes {', '.join(names)}" if names else "takes no arguments"
        return f"Invalid call to {self.tool.name}: {'; '.join(problems)}. {self.tool.name} {takes}."


def signature_of(function: Callable[..., Any]) -> ToolSignature:
    """Return the tool signature of a function or method.

    The description is the part of the docstring before its first section. The section `Args:` describes the arguments.

    Raises:
        ValueError: The docstring or a type hint is missing, or JSON Schema cannot express a type.
    """
    if inspect.ismethod(function):
        return _signature_of(function.__func__, True)
    return _signature_of(function, False)


@lru_cache(maxsize=1024)  # environments, and with them their tools, are created for each episode
def _signature_of(function: Callable[..., Any], is_method: bool) -> ToolSignature:
    name = function.__name__
    description, documented = read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise _broken(name, "it has no docstring, which describes the tool to the policy", "write one")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # evaluating hints runs user code
        raise _broken(name, f"its type hints cannot be read: {type(error).__name__}: {error}", "correct them") from error
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    types, schemas, required = {}, {}, []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _broken(name, f"tools are called with keyword arguments only (got `{parameter}`)", "name each parameter")
        if parameter.name not in hints:
            fix = f"write `{parameter.name}: int` or another type"
            raise _broken(name, f"the parameter {parameter.name} has no type hint", fix)
        types[parameter.name], schema = _typed(name, parameter, hints[parameter.name])
        text = documented.pop(parameter.name, "")
        schemas[parameter.name] = {**schema, "description": text} if text else schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    if documented:
        rule = f"its docstring describes {', '.join(documented)}, which is not a parameter"
        raise _broken(name, rule, "correct the docstring")
    schema = {"type": "object", "properties": schemas, "required": required}
    tool = Tool(name=name, description=description, parameters=schema)
    return ToolSignature(tool=tool, types=types, required=frozenset(required))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring in Google's style before its first section, and the entries of its `Args` by name."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        stripped = line.strip()
        if match := _SECTION.match(line):
            section, current = match[1], ""
        elif not section:
            description.append(stripped)
        elif section in ("Args", "Arguments", "Parameters") and stripped:
            depth = len(line) - len(line.lstrip())
            entry = _ARGUMENT.fullmatch(stripped)
            if entry and (not current or depth <= indent):
                current, indent = entry[1], depth
                arguments[current] = entry[2]
            elif current:
                arguments[current] = f"{arguments[current]} {stripped}".strip()
    return " ".join(" ".join(description).split()), arguments


def _typed(name: str, parameter: inspect.Parameter, hint: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """Return the type adapter of a parameter, and its JSON Schema with the default."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = _inlined(whole := adapter.json_schema(), whole.get("$defs", {}), frozenset())
    except (PydanticUserError, RecursionError, NameError) as error:
        rule = f"JSON Schema cannot express the type of {parameter.name} (got {hint!r:.80})"
        raise _broken(name, rule, "use str, int, float, bool, Literal, an Enum, list, dict, or a dataclass of these") from error
    if parameter.default is None:  # the policy omits the argument instead of writing null
        kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
        return adapter, kinds[0] if len(kinds) == 1 else schema
    if parameter.default is parameter.empty:
        return adapter, schema
    try:
        return adapter, {**schema, "default": adapter.dump_python(parameter.default, mode="json", warnings=False)}
    except PydanticSerializationError:  # the default has no JSON representation
        return adapter, schema


def _inlined(schema: Any, definitions: Mapping[str, Any], inside: frozenset[str]) -> Any:
    """Return a schema without titles, with references replaced by their definitions."""
    if isinstance(schema, list):
        return [_inlined(item, definitions, inside) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            raise RecursionError(name)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**definitions[name], **rest}, definitions, inside | {name})
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _inlined(kind, definitions, inside) for name, kind in value.items()}
        elif key in ("default", "enum", "const", "examples", "required"):
            plain[key] = value
        elif key not in ("title", "$defs"):
            plain[key] = _inlined(value, definitions, inside)
    return plain


def _broken(name: str, rule: str, fix: str) -> ValueError:
    return ValueError(f"tool {name}: {rule}. To use it as a tool, {fix}.")


# The calculator: it interprets the parsed expression within limits, and never executes text that the policy wrote

MAX_EXPRESSION_CHARS = 500
"""Maximum length of an expression."""
MAX_BITS = 1024
"""Maximum size of an integer in bits; about 300 digits."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """A tool for arithmetic."""

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2
        """
        value = evaluate(expression)
        return str(value) if isinstance(value, int) else f"{value:.12g}"


def calculator(**options: Any) -> ToolEnvironment:
    """Return an environment whose only tool is the calculator. `options` are passed to `ToolEnvironment`."""
    return ToolEnvironment(Calculator(), **options)


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression.

    Raises:
        ToolError: The text is not an arithmetic expression, or its value is too large or undefined.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"The expression is longer than {MAX_EXPRESSION_CHARS} characters.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _evaluated(tree.body)
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except OverflowError:
        raise ToolError("The result is too large.") from None
    except (SyntaxError, ValueError):
        raise ToolError(f"Not an arithmetic expression: {expression:.60}") from None
    except (MemoryError, RecursionError):  # raised by the parser for deep nesting
        raise ToolError("The expression is nested too deeply.") from None


def _evaluated(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _limited(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluated(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _evaluated(left), _evaluated(right)
            is_whole_power = isinstance(op, ast.Pow) and isinstance(first, int) and isinstance(second, int)
            if is_whole_power and second > 0 and abs(first) > 1 and second * math.log2(abs(first)) > MAX_BITS:
                raise OverflowError  # computing it would take too much time or memory
            return _limited(_BINARY[type(op)](first, second))
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("Write powers as **.")
        case ast.Tuple():
            raise ToolError("Write numbers without commas.")
    raise ToolError("Only numbers, + - * / // % ** and parentheses are allowed.")


def _limited(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("The result is not a real number.")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    number: Number = value
    return number
