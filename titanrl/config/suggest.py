"""Suggestions for unknown names: a suggested name was probably meant, and is not merely spelled in a similar way."""

import re
from collections.abc import Iterable, Sequence

MAX_NAME = 100
"""Maximum length of a name for which suggestions are searched. The time of a comparison grows with its square."""
MAX_SUGGESTIONS = 3
"""Maximum number of suggestions. If more names are equally likely, none is suggested."""
SYNONYMS = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "gpu": "cuda",
    "k8s": "kubernetes",
    "mpirun": "launcher",
    "srun": "launcher",
    "torchrun": "launcher",
}
"""Other names of values."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question such as `did you mean exact?`, or an empty string if no name was probably meant."""
    return question(suggestions(name, names))


def question(found: Sequence[str]) -> str:
    """Return the question that suggests names; an empty string for none."""
    listed = " or ".join(filter(None, [", ".join(found[:-1]), *found[-1:]]))
    return f"did you mean {listed}?" if found else ""


def suggestions(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that were probably meant: synonyms, other spellings, typos, and names with more or fewer words."""
    names = list(names)
    if len(name) > MAX_NAME:
        return []
    if (synonym := SYNONYMS.get(name.lower())) in names:
        return [synonym]
    asked = words(name)
    ways = (
        [other for other in names if "".join(words(other)) == "".join(asked)],
        [other for other in names if is_misspelled("".join(asked), "".join(words(other)))],
        [other for other in names if _begins(asked, words(other)) or _begins(words(other), asked)],
    )
    found = next(filter(None, ways), [])
    return found if len(found) <= MAX_SUGGESTIONS else []


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: `maxSteps`, `max-steps` and `max_steps` have the same, and `++` reads `pp`."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("+", "p"))


def is_misspelled(one: str, other: str) -> bool:
    """Return True if two names are equal, or one is probably a typo of the other.

    A typo keeps the first letter and all digits, because `float16` is not `bfloat16`. In a short name, it only adds, drops or
    swaps a letter, because `grpo` is not `gspo`.
    """
    short, long = sorted((one, other), key=len)
    if one == other or not short:
        return one == other
    if short[0] != long[0] or re.sub(r"\D", "", short) != re.sub(r"\D", "", long):
        return False
    if len(long) < 5:
        return len(long) == 4 and (len(short) == 3 or sorted(short) == sorted(long)) and _distance(one, other) == 1
    return _distance(one, other) <= (2 if len(short) >= 8 else 1)


def is_same_word(one: str, other: str) -> bool:
    """Return True if two words of names mean the same: equal, misspelled, or a word and a slightly longer form of it."""
    short, long = sorted((one, other), key=len)
    return is_misspelled(one, other) or (len(short) >= 3 and long.startswith(short) and len(long) - len(short) <= 3)


def _begins(start: Sequence[str], name: Sequence[str]) -> bool:
    """Return True if a name begins with the words of another, as in `cuda:0` and `tensorboardx`."""
    return bool(start) and len(start) <= len(name) and all(map(is_same_word, start, name))


def _distance(one: str, other: str) -> int:
    """Return the number of inserted, removed, replaced and swapped letters."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        earlier, before, row = before, row, [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
