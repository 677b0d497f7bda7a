"""The base classes of the exceptions that TitanRL defines, and the line in which a user reads an exception."""


class TitanRLError(Exception):
    """Base of all exceptions of TitanRL, such as `ConfigError`, `DeadlineError` and `ActorDiedError`."""


def describe(error: BaseException) -> str:
    """Return type, text and notes of an exception as one line."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}".split())


class FaultError(TitanRLError):
    """A part of a run died, hangs, or does not do the same as others. The run can continue from its last checkpoint."""

    def __init__(self, text: str, part: str = "trainer") -> None:
        """Keep the text, and the name of the part, such as `trainer` or `generator_0`."""
        super().__init__(text)
        self.part = part
