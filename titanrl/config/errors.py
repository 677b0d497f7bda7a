"""How a mistake in a configuration is told: where, which key and value, the rule, the fix."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that the values of one or several keys break.

    Example: `BrokenRule(values={"dp_shard": 3}, rule="ranks must share the hosts evenly", fix="set dp_shard to 2 or 4")`
    """

    values: Mapping[str, object]
    """The keys involved and their values, the one to change first; paths are relative to the section that checks."""
    rule: str
    """What must hold."""
    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{', '.join(f'{key}={inline(value)}' for key, value in self.values.items())}: {self.rule}; {self.fix}"


class BrokenRules(ValueError):
    """Raised by a section whose values, each valid alone, do not go together."""

    def __init__(self, *broken: BrokenRule) -> None:
        super().__init__(*broken)
        self.broken = broken

    def __str__(self) -> str:
        return "\n".join(map(str, self.broken))


class ConfigError(ValueError):
    """A configuration that cannot be used; `str()` is all the user needs to see, a traceback adds nothing."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages
        """One text per mistake."""

    def __str__(self) -> str:
        return "\n".join(self.messages)


def message(where: str, what: str, rule: str, fix: str) -> str:
    """The text of one mistake; `where` is a file and line or an override, `what` the key with its value."""
    return f"{where}: {what}\n  rule: {rule}\n  fix:  {fix}"


def inline(value: object, max_chars: int = 80) -> str:
    """A value on one line, written as YAML would accept it, cut when long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
