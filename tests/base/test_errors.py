"""Messages of exceptions of user code."""

import json
from pathlib import Path

import titanrl
from titanrl.base.errors import describe_user_error


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raised_in(file: Path, code: str) -> str:
    """Return what is said of an exception of code that was compiled as a file."""
    try:
        exec(compile(f"\n\n{code}", str(file), "exec"), {"json": json, "Hostile": Hostile})
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file
        return describe_user_error(error)
    raise AssertionError("nothing was raised")


def test_line_of_user_code_is_named() -> None:
    package = Path(titanrl.__file__).parent
    assert raised_in(Path("/home/me/agent.py"), "{}['choices']") == "KeyError: 'choices' (agent.py:3)"
    assert raised_in(Path("/home/me/agent.py"), "json.loads('{')").endswith("(agent.py:3)"), "and not that of the library"
    assert raised_in(Path("/home/me/agent.py"), "raise Hostile") == "Hostile (agent.py:3)"
    assert raised_in(Path(f"{package}_agents/agent.py"), "1 / 0") == "ZeroDivisionError: division by zero (agent.py:3)"
    assert raised_in(package / "environments/tools.py", "1 / 0") == "ZeroDivisionError: division by zero"
