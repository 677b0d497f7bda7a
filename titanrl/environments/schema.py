"""Derives the JSON Schema of a tool from its signature and docstring, and validates the arguments of calls."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from titanrl.environments.errors import ToolError
from titanrl.environments.interface import Tool

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|Warning|See Also):(\s|$)"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_MAX_SHOWN_CHARS = 60


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

    def arguments(self, given: object) -> dict[str, Any]:
        """Validate the arguments of a call, and convert them to the types of the parameters.

        Raises:
            ToolError: The arguments are not a mapping, or one is missing, unknown or of the wrong type.
        """
        if not isinstance(given, Mapping):
            raise ToolError(self._explain([f"the arguments must be a JSON object, not {type(given).__name__}"]))
        problems = [f"{name} is missing" for name in self.types if name in self.required and name not in given]
        problems += [f"unknown argument {name!s:.{_MAX_SHOWN_CHARS}}" for name in given if name not in self.types]
        arguments: dict[str, Any] = {}
        for name, adapter in self.types.items():
            try:
                arguments |= {name: adapter.validate_python(given[name])} if name in given else {}
            except ValidationError as error:
                problems += [_explained(name, details) for details in error.errors(include_url=False, include_context=False)]
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
    """Return the text of a docstring before its first section, and the entries of its `Args` section by name."""
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
        schema = _plain(whole := adapter.json_schema(), whole.get("$defs", {}), frozenset())
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


def _plain(schema: Any, definitions: Mapping[str, Any], inside: frozenset[str]) -> Any:
    """Return a schema without titles, with references replaced by their definitions."""
    if isinstance(schema, list):
        return [_plain(item, definitions, inside) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            raise RecursionError(name)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain({**definitions[name], **rest}, definitions, inside | {name})
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(kind, definitions, inside) for name, kind in value.items()}
        elif key in ("default", "enum", "const", "examples", "required"):
            plain[key] = value
        elif key not in ("title", "$defs"):
            plain[key] = _plain(value, definitions, inside)
    return plain


def _explained(name: str, details: Any) -> str:
    path = "".join(f"[{part!r}]" for part in details["loc"] if isinstance(part, int | str))
    text = details["msg"].removeprefix("Value error, ")
    return f"{name}{path}: {text[:1].lower()}{text[1:]} (got {details['input']!a:.{_MAX_SHOWN_CHARS}})"


def _broken(name: str, rule: str, fix: str) -> ValueError:
    return ValueError(f"tool {name}: {rule}. To use it as a tool, {fix}.")
