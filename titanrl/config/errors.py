"""Configuration errors. Each names the location, the key and its value, the violated rule, and a fix."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from titanrl.base.errors import TitanRLError

MAX_CHARS = 2000
"""Maximum length of each component of a message. Keys and overrides can be arbitrarily long."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that the values of one or more keys violate.

    Example: `BrokenRule({"trainer_hosts": 3}, "trainer_hosts must divide the 4 trainer ranks", "set it to 2")`
    """

    values: Mapping[str, object]
    """Keys involved, with their values. The first key is the one to change. Keys are relative to the section that checks
    them."""
    rule: str
    """Condition that must hold."""
    fix: str
    """Change that satisfies the rule."""

    def __str__(self) -> str:
        what = ", ".join(f"{key}={inline(value)}" for key, value in self.values.items())
        return f"{what}: {self.rule}. {self.fix[:1].upper()}{self.fix[1:]}."


class BrokenRules(TitanRLError, ValueError):
    """Raised for values that are valid individually but violate a rule together, or do not fit the files on this machine."""

    def __init__(self, *broken: BrokenRule) -> None:
        super().__init__(*broken)
        self.broken = broken

    def __str__(self) -> str:
        return "\n".join(map(str, self.broken))


def within(error: BrokenRules, section: str) -> BrokenRules:
    """Return rules about the section `data`, renamed to another section with the same keys."""

    def named(text: str) -> str:
        return re.sub(r"(?<![\w.])data\.(?=[a-z])", f"{section}.", text)

    renamed = (({named(key): value for key, value in rule.values.items()}, rule) for rule in error.broken)
    return BrokenRules(*(BrokenRule(values, named(rule.rule), named(rule.fix)) for values, rule in renamed))


class ConfigError(TitanRLError, ValueError):
    """Raised for an invalid configuration. `str(error)` is complete and can be printed without a traceback."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages
        """One message per mistake."""

    def __str__(self) -> str:
        return "\n".join(self.messages)


@contextmanager
def refusing() -> Iterator[None]:
    """Exit with code 2 and a message, without a traceback, if the body raises a `TitanRLError` or cannot read a file.

    Use this at the edge of a command, around everything that precedes its work.
    """
    try:
        yield
    except TitanRLError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        what = "" if error.filename is None else f"{_shortened(str(error.filename), 200)}: "
        print(f"{what}{error.strerror or error}. Correct the path or its permissions.", file=sys.stderr)
        sys.exit(2)


def message(where: str, what: str, rule: str, fix: str) -> str:
    """Format a mistake, without credentials in URLs.

    `where` is a file and line or an override; `what` is the key with its value.
    """
    where, what, rule, fix = (_shortened(without_credentials(text), MAX_CHARS) for text in (where, what, rule, fix))
    return f"{where}: {what}\n  rule: {rule}\n  fix:  {fix}"


def without_credentials(text: str) -> str:
    """Return a text in which URLs have `...` in place of a user and a password."""
    return re.sub(r"//[^\s\"']*@", "//...@", text)


def rule_of(text: str, values: Mapping[str, object], *, prefix: str = "") -> BrokenRule:
    """Convert a message `key: problem (got value). Fix.` to a rule. Any other message becomes the rule itself."""
    key_first = re.fullmatch(r"(?P<rule>.+) \((?P<got>got .+)\)\. (?P<fix>.+?)\.?", text, re.DOTALL)
    if key_first is None:
        return BrokenRule(values, prefix + text, "correct it")
    rule = key_first["rule"]
    for key in values:
        rule = rule.removeprefix(f"{key}: ")
    got = "" if key_first["got"].removeprefix("got ").strip("'") in map(str, values.values()) else f" ({key_first['got']})"
    fix = key_first["fix"]
    return BrokenRule(values, f"{prefix}{rule}{got}", fix[0].lower() + fix[1:])


def inline(value: object, max_chars: int = 80) -> str:
    """Format a value as YAML on one line, truncated to `max_chars`."""
    return _shortened(json.dumps(value, ensure_ascii=False, default=str), max_chars)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
