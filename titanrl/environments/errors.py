"""Exceptions of environments. A failed episode is retried or dropped; it does not get a reward of 0."""

from titanrl.base.errors import TitanRLError


class EnvironmentFailure(TitanRLError):
    """Raised if an environment fails: it raised an exception, returned an invalid value, or its process died."""


class EnvironmentTimeout(EnvironmentFailure):
    """Raised if a call of an environment exceeds its time limit."""


class InvalidReward(EnvironmentFailure):
    """Raised if a reward of an environment is not a finite number."""


class EnvironmentDied(EnvironmentFailure):
    """Raised if the process of an environment died."""


class ToolError(TitanRLError):
    """Raised by a tool to reject a call that the policy got wrong. The policy sees the message, and the episode continues.

    Any other exception that a tool raises fails the episode.

    Example: `raise ToolError(f"There is no article {number}. The numbers are 1 to {len(self._articles)}.")`
    """
