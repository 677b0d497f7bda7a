"""Errors of a configuration. Each names the place, the key with its value, the rule, and the fix."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that the values of one or several keys break.

    Example: `BrokenRule(values={"trainer_hosts": 3}, rule="trainer_hosts must divide the 4 trainer ranks", fix="set it to 2")`
    """

    values: Mapping[str, object]
    """Keys involved and their values; the first key is the one to change. Keys are relative to the section that checks them."""
    rule: str
    """Condition that must hold."""
    fix: str
    """Change that satisfies the rule."""

    def __str__(self) -> str:
        what = ", ".join(f"{key}={inline(value)}" for key, value in self.values.items())
        return f"{what}: {self.rule}. {self.fix[:1].upper()}{self.fix[1:]}."


class BrokenRules(ValueError):
    """Raised for values that are valid one by one but break a rule together, or with files on this machine."""

    def __init__(self, *broken: BrokenRule) -> None:
        super().__init__(*broken)
        self.broken = broken

    def __str__(self) -> str:
        return "\n".join(map(str, self.broken))


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used. `str(error)` is complete: print it without a traceback."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages
        """One message per mistake."""

    def __str__(self) -> str:
        return "\n".join(self.messages)


def message(where: str, what: str, rule: str, fix: str) -> str:
    """Format one mistake; `where` is a file and line or an override, `what` the key with its value."""
    return f"{where}: {what}\n  rule: {rule}\n  fix:  {fix}"


def inline(value: object, max_chars: int = 80) -> str:
    """Format a value as YAML on one line, truncated to `max_chars`."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
