"""A mkdocstrings extension that renders the code below `Example:` in a docstring as a code block."""

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


class Examples(griffe.Extension):
    """Extension that turns the indented lines below `Example:` into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fence, obj.docstring.value)


def fence(match: re.Match[str]) -> str:
    """Return the example as a fenced block."""
    return f"**Example**\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n"
