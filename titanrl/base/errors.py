"""Base classes of TitanRL's exceptions, and the formatting of exceptions for users."""

import os
import sysconfig
import traceback
from pathlib import Path


class TitanRLError(Exception):
    """Base class of the exceptions that a run raises, such as `ConfigError`, `DeadlineError` and `ActorDiedError`."""


USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions that user code may raise in a process of a run, where no signal raises `KeyboardInterrupt`. The last two would end
the event loop."""


_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}/",
    "<",  # generated code
)


def describe_user_error(error: BaseException) -> str:
    """Return the type and message of an exception of user code, and the line that raised it.

    Example: `KeyError: 'choices' (agent.py:29)`.
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the message is made by user code
        text = type(error).__name__
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f" ({os.path.basename(file)}:{line})" for file, line in frames if not file.startswith(_LIBRARIES)]
    return text + (own[-1] if own else "")


def describe(error: BaseException) -> str:
    """Return type, text and notes of an exception as one line."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}".split())


class FaultError(TitanRLError):
    """A component of a run died, hung, or diverged from its peers. The run can continue from its last checkpoint."""

    def __init__(self, text: str, part: str = "trainer") -> None:
        """Create the error; `part` is the name of the failed component, such as `trainer` or `generator_0`."""
        super().__init__(text)
        self.part = part


class TokensLostError(TitanRLError):
    """Tokens of a batch are lost, because the rollout worker that held them died or no longer has them."""


class RankError(FaultError):
    """The trainer's ranks diverged, or a rank failed or is late; the message names the rank.

    The trainer can continue only if a rank failed before the first collective of the phase.
    """

    has_lost_tokens = False
    """True if a rank failed with a `TokensLostError`."""


class DriftError(FaultError):
    """Replicated weights or optimizer state differ between ranks; the message names the tensor and the ranks."""


# Errors of actors. A reply makes the controller import the module of its error, which must therefore not need torch.


class StoppedError(TitanRLError):
    """The request cannot complete because part of the actor stopped; the cause is reported separately."""


class PhaseError(TitanRLError):
    """Call that would mix weights or gradients of different versions. The weights were not changed."""


class StorageError(TitanRLError):
    """Files of the trainer cannot be written or read; the message names the folder and the cause."""


class SnapshotMismatchError(TitanRLError):
    """A snapshot does not match the live parameters; the message names the tensor. No weights were changed."""


class GatheredParameterError(TitanRLError):
    """A parameter managed by FSDP is unsharded; the message names it."""


class DivergedError(TitanRLError):
    """A rank's engine state differs from rank 0's; the message describes the difference."""
