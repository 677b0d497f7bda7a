"""Exceptions of environments. A failed episode is dropped or repeated; it is not a reward of 0."""

from titanrl.errors import TitanRLError


class EnvironmentFailure(TitanRLError):
    """An environment failed: it raised, returned something else than its interface says, or its process ended."""


class EnvironmentTimeout(EnvironmentFailure):
    """A call of an environment took longer than its time limit."""


class EnvironmentDied(EnvironmentFailure):
    """The process of an environment ended."""


class ToolError(TitanRLError):
    """A call of a tool cannot be answered, by no fault of the tool. The policy reads the text, and the episode goes on.

    Any other exception of a tool fails the episode.

    Example: `raise ToolError(f"There is no article {number}. The numbers are 1 to {len(self._articles)}.")`
    """
