"""Custom prompt sources: a list of prompts, or a function that returns one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from titanrl.base.plugins import Plugin, Point, check_call
from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.data.entries import check_picklable, entries_of
from titanrl.data.files import BadRow, Row

EXPECTED = "def prompts(seed: int) -> Sequence[Mapping[str, Any]]"


@runtime_checkable
class Prompts(Protocol):
    """A sequence of prompts, such as a list of dicts.

    A prompt is a mapping with `prompt` or `question` (a string) or `messages` (a conversation), and usually `answer`, as a row
    of a file. Rewards receive it as `question`, `answer` (None if missing) and `metadata`, a dict of all other keys.

    Example: `[{"prompt": "What is 7 * 8?", "answer": "56", "level": 2}]`
    """

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a prompt."""
        ...


class PromptSource(Protocol):
    """A function that returns the prompts of a run. It receives `data.options` as keyword arguments.

    Every rollout worker calls it, so the same seed must give the same prompts.

    Example:
        def squares(seed: int, largest: int = 100) -> list[dict[str, str]]:
            return [{"prompt": f"{n} * {n} =", "answer": str(n * n)} for n in range(largest)]
    """

    def __call__(self, seed: int, /) -> Prompts:
        """Return the prompts."""
        ...


def check_prompt_source(source: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that an object is a list of prompts, or has the signature of `PromptSource`.

    Raises:
        ValueError: It is neither.
    """
    if not _is_list(source):
        check_call(source, PromptSource.__call__, key=key, name=name, expected=EXPECTED, options=options)
    elif options:
        raise ValueError(
            f"data.options: a list of prompts does not take options (got {dict(options)}). "
            f"Remove them, or write a function `{EXPECTED}`."
        )


POINT = Point(
    key="data.source",
    argument="prompts",
    protocol=PromptSource.__call__,
    expected=EXPECTED,
    checked=lambda source, plugin, config: check_prompt_source(
        source, key=plugin.key, name=plugin.name, options=config.data.options
    ),
)


def read_custom_prompts(plugin: Plugin, seed: int, config: DataConfig) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Yield the prompts of a custom source with their entries, as `read_entries` does for files.

    Args:
        plugin: The list, or the function that returns it.
        seed: Seed of the run.
        config: Section `data`, with the keyword arguments of the function.

    Raises:
        ValueError: The source or one of its prompts is invalid.
    """
    source = plugin.load()
    check_prompt_source(source, key=plugin.key, name=plugin.name, options=config.options)
    prompts = source if _is_list(source) else _called(source, plugin, seed, config.options)
    for row, entry in entries_of(_rows(prompts, plugin), config):
        assert entry is not None
        try:
            check_picklable(entry)
        except BadRow as error:
            raise row.broken(error) from error
        yield row, entry


def _rows(prompts: Prompts, plugin: Plugin) -> Iterator[Row]:
    for index in range(len(prompts)):
        row = Row(content=None, values={plugin.key: plugin.name}, place=f"item {index}")
        try:
            item: object = prompts[index]
            content = dict(item) if isinstance(item, Mapping) else item
        except Exception as error:  # custom code may raise anything
            raise row.broken(BadRow(f"reading it raised {type(error).__name__}: {error}", "give a list of dicts")) from error
        yield Row(content=content, values=row.values, place=row.place)


def _is_list(source: object) -> TypeGuard[Prompts]:
    return isinstance(source, Prompts) and not isinstance(source, str | Mapping | type)


def _called(source: Callable[..., Any], plugin: Plugin, seed: int, options: Mapping[str, Any]) -> Prompts:
    try:
        prompts = source(seed, **options)
    except Exception as error:  # custom code may raise anything
        raise _broken(plugin, f"the function raised {type(error).__name__}: {error}", "correct it, or data.options") from error
    if not _is_list(prompts):
        raise _broken(plugin, f"must return a list of prompts, got {type(prompts).__name__}", f"write it as `{EXPECTED}`")
    return prompts


def _broken(plugin: Plugin, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values={plugin.key: plugin.name}, rule=rule, fix=fix))
