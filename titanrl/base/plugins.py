"""Plugins: user-defined objects that replace built-in ones, given by import path or as Python objects; and slow imports.

A `Plugin` can be sent to other processes. An import path is imported where it is used. A Python object is pickled by value,
unless its module belongs to an installed package, so functions defined in a script or a notebook cell also work.
"""

import ast
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

OBJECT = "object"
"""Placeholder for the module in the recorded import path of a Python object, as in `object:clipped`."""


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection while the body imports packages, then freeze the imported objects.

    Importing torch and vLLM would otherwise trigger a dozen full collections, which take seconds. Use this for imports only: an
    engine built inside the context decoded 5 % slower.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def import_object(path: str, *, key: str) -> Any:
    """Import the object at `package.module:name` or `file.py:name`; messages name the configuration key.

    A file is executed once per process, and can import modules in its folder, as a script can. Raise `ValueError` if the module
    cannot be imported, or has no such attribute.
    """
    module, _, name = path.rpartition(":")
    if not (module and name):
        raise ValueError(f"{key}: not an import path (got {path!r}). Write it as `package.module:name` or `file.py:name`.")
    is_file = module.endswith(".py")
    if is_file and not os.path.isfile(module):
        places = "the current directory or the configuration file"
        raise ValueError(f"{key}: no such file (got {path!r}). Correct its path, which is relative to {places}.")
    try:
        imported = _import_file(Path(module)) if is_file else importlib.import_module(module)
    except Exception as error:  # user code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: importing {module} raised {cause} (got {path!r}). Correct the path or the module.") from error
    if name not in vars(imported):
        raise ValueError(f"{key}: module {module} has no attribute {name!r} (got {path!r}). Correct the name after the colon.")
    return vars(imported)[name]


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module whose name is unique to its path."""
    file = file.resolve()
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during execution
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        _check_helpers(file)
        spec.loader.exec_module(module)
    except BaseException:  # the next import must not find a partially executed module
        del sys.modules[name]
        raise
    return module


def _check_helpers(file: Path) -> None:
    """Raise `ImportError` if a file would import another module than the one of this name in its folder.

    A process has one module of a name, so a second plugin with a `utils.py` beside it would silently use that of the first.
    """
    helpers = [file]
    for source in helpers:  # grows by the helpers that each of them imports
        for node in ast.walk(ast.parse(source.read_bytes(), source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in {name.partition(".")[0] for name in names} - {"titanrl", *sys.stdlib_module_names}:
                places = [file.parent / name / "__init__.py", file.parent / f"{name}.py"]
                for own in [place.resolve() for place in places if place.is_file()][:1]:
                    found = None if own in helpers else importlib.util.find_spec(name)
                    origin = own if found is None else Path(str(found.origin)).resolve()
                    is_copy = own.name != "__init__.py" and origin.is_file() and origin.read_bytes() == own.read_bytes()
                    if origin != own and not is_copy:
                        raise ImportError(f"`import {name}` finds {origin} instead of {own}; rename one of the two")
                    helpers += [] if found is None else [own]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A user-defined object that replaces a built-in one.

    Example: `Plugin(key="algorithm.loss", name="my_losses.py:clipped")`
    """

    key: str
    """Configuration key of the object, for error messages."""
    name: str
    """Import path, or the name of a Python object."""
    pickled: bytes | None = None
    """The pickled object; None if `name` is an import path, or if `value` is set."""
    value: Any = None
    """The object itself, if only this process uses it; it is not pickled."""

    def load(self) -> Any:
        """Import or unpickle the object; raise `ValueError` if it cannot be imported."""
        if self.value is not None:
            return self.value
        if self.pickled is None and self.name.startswith(f"{OBJECT}:"):
            what = "a Python object, which a configuration cannot hold"
            raise ValueError(f"{self.key}: {what} (got {self.name!r}). Start the run from Python, and pass the object again.")
        return import_object(self.name, key=self.key) if self.pickled is None else pickle.loads(self.pickled)

    @property
    def is_object(self) -> bool:
        """True for a Python object, False for an import path."""
        return self.pickled is not None or self.value is not None

    @property
    def path(self) -> str:
        """Text that represents the object in a configuration: its import path, or `object:NAME`."""
        return object_path(self.name) if self.is_object else self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plugin without `value`."""
        return partial(Plugin, key=self.key, name=self.name, pickled=self.pickled), ()


Plugins = Mapping[str, Plugin]
"""The plugins of a run, by configuration key."""


def plugin_of(key: str, value: object, *, is_local: bool = False) -> Plugin | None:
    """Return the plugin for a configuration value or a Python object; None for a built-in.

    Args:
        key: Configuration key, such as `algorithm.loss`.
        value: Name of a built-in, import path (contains a colon), None, or the object itself.
        is_local: True to keep the object unpickled, because only this process uses it.

    Raises:
        ValueError: The object cannot be pickled.
    """
    if value is None or (isinstance(value, str) and ":" not in value):
        return None
    if isinstance(value, str):
        file, _, name = value.rpartition(":")
        return Plugin(key=key, name=f"{Path(file).absolute()}:{name}" if file.endswith(".py") else value)
    name = name_of(value)
    if is_local:
        return Plugin(key=key, name=name, value=value)
    try:
        return Plugin(key=key, name=name, pickled=_pickle_by_value(value))
    except Exception as error:  # pickling runs code of user classes
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{key}: cannot be sent to other processes: {cause} (got {name}). Make the object picklable."
        ) from error


def loaded(plugins: Plugins, key: str) -> Any:
    """Load the plugin of a key; None if it has none."""
    plugin = plugins.get(key)
    return None if plugin is None else plugin.load()


def plugins_within(plugins: Plugins, section: str) -> dict[str, Plugin]:
    """Return the plugins of a section by key relative to the section; `Plugin.key` stays the full key."""
    return {key.removeprefix(f"{section}."): plugin for key, plugin in plugins.items() if key.startswith(f"{section}.")}


def plugins_of_data(plugins: Plugins, section: str) -> dict[str, Plugin]:
    """Return the plugins of a section laid out like `data`, such as `data.mixture.sums`, under the keys of `data`."""
    return {f"data.{key}": plugin for key, plugin in plugins_within(plugins, section).items()}


def object_path(name: str) -> str:
    """Return the import path that represents a Python object in a run's recorded configuration, as in `object:clipped`."""
    return f"{OBJECT}:" + re.sub(r"\W+", "_", name).strip("_")


def name_of(value: object) -> str:
    """Return the qualified name of a Python object, or of its type if the object has no name."""
    value = unwrapped(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def unwrapped(value: object) -> object:
    """Return the function inside (nested) `functools.partial` objects, which has the name, module and traits."""
    while isinstance(value, partial):
        value = value.func
    return value


def is_async(function: object) -> bool:
    """Return True for a coroutine function, a partial of one, and an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_call(
    candidate: object, protocol: Callable[..., Any], *, key: str, name: str, expected: str, options: Iterable[str] = ()
) -> None:
    """Check that a callable accepts the arguments of a protocol's `__call__`, and additional keyword arguments `options`.

    `protocol` is unbound, so its first parameter is `self`. Messages name the key and the candidate, and show the expected
    signature as code. An async function is refused, unless the protocol is async or returns an `Awaitable`. Raise `ValueError`
    if the candidate is not callable, does not accept the arguments, or is async.
    """
    if not callable(candidate):
        raise ValueError(f"{key}: not callable (got {name}, of type {type(candidate).__name__}). Write it as `{expected}`.")
    may_be_async = is_async(protocol) or "Awaitable" in str(inspect.signature(protocol).return_annotation)
    if is_async(candidate) and not may_be_async:
        raise ValueError(f"{key}: must not be async, because its result is not awaited (got {name}). Write it as `{expected}`.")
    try:
        signature = inspect.signature(candidate)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    _, *parameters = inspect.signature(protocol).parameters.values()
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    positional = [None for parameter in parameters if parameter.kind not in by_keyword]
    keywords = dict.fromkeys(options)
    keywords |= {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise ValueError(f"{key}: wrong signature: {error} (got {name}{signature}). Write it as `{expected}`.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An extension point, declared beside the Protocol of its objects. `titanrl.launch.extensions` lists all of them.

    Example: `Point(key="algorithm.loss", argument="loss", protocol=PolicyLoss.__call__, expected="def loss(...) -> Tensor")`
    """

    key: str
    """Configuration key whose value is the name of a built-in or an import path."""
    argument: str
    """Argument of `GRPO` that takes the object."""
    protocol: Callable[..., Any]
    """`__call__` of the Protocol that the object must satisfy."""
    expected: str
    """Signature of such an object, as code for the error message."""
    options: Callable[[Any, Any], Iterable[str]] = lambda candidate, config: ()
    """Names of the keyword arguments that the object is called with, given the object and the `Config`."""
    checked: Callable[[Any, Plugin, Any], object] | None = None
    """Check of the object, given its plugin and the `Config`; None compares its signature with `protocol` and `options`."""
    in_controller: bool = False
    """True if only the controller uses the object, so that it need not be pickled."""

    def check(self, plugin: Plugin, config: Any) -> None:
        """Load a plugin of this point; raise ValueError if it cannot be imported or does not satisfy the Protocol."""
        candidate = plugin.load()
        if self.checked is not None:
            self.checked(candidate, plugin, config)
        else:
            options = self.options(candidate, config) if callable(candidate) else ()
            check_call(candidate, self.protocol, key=plugin.key, name=plugin.name, expected=self.expected, options=options)


def _pickle_by_value(value: object) -> bytes:
    import cloudpickle  # imported lazily, because scoring processes only load plugins

    function = unwrapped(value)
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    if module is None or module.__name__ == "__main__" or _is_installed(module):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    """Return True for a module of Python, TitanRL or an installed package, which other processes can import."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "titanrl":
        return True
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(Path(file).is_relative_to(folder) for folder in folders)
