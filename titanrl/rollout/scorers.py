"""Factories of the built-in rewards, after the notations of short answers that they read.

Numbers, lists, choices, dates and words are read without executing anything, and compared exactly. Expressions such as
`2\\sqrt{2}` are left to a computer algebra system.

Each factory returns a function of the text of a completion and the entry of its prompt; that of `overlong` also takes the
number of tokens. If the function raises, the rollout has no reward: it is left out of its group and counted in
`reward/error_frac`.
"""

import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from titanrl.data.gym import create_dataset

MAX_CHARS = 2000
"""Longest text that is read as a short answer."""
MAX_EXPONENT = 1000
"""Largest exponent of ten that is read as a number."""
MAX_ITEMS = 16
"""Largest number of items of a list that is read as one."""
MAX_DEPTH = 4
"""Deepest nesting of lists that is read."""
MIN_DIGITS = 6
"""Number of decimals and of significant digits from which a rounded number equals the exact one, as 0.333333 equals 1/3."""

THOUGHTS_END = "</think>"
"""Tag between the thoughts of a reasoning model and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number with its unit.

    Example: `Number(value=Fraction(18), latex="18.00", decimals=2, num_digits=4, unit="dollar")` for `$18.00`
    """

    value: Fraction
    """Value, not divided by 100 for a percentage."""
    latex: str
    """Number in LaTeX, without its unit and without separators of thousands."""
    decimals: int | None = None
    """Number of decimals as written, less the exponent; None without a decimal point."""
    num_digits: int = 0
    """Number of significant digits as written."""
    unit: str = ""
    """Unit, or the noun after the number; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list, tuple, set or interval."""

    brackets: str
    """Opening and closing bracket; empty without brackets."""
    items: "tuple[Answer, ...]"
    """Items in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class Words:
    """A text without mathematical meaning, such as `New York`, a date, a time or a ratio."""

    text: str
    """Words in lower case, separated by one space; a date in ISO format."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The letter of a choice."""

    letter: str
    """Letter in upper case."""
    is_marked: bool
    """True for `(B)`, `b)` and `B. Paris`, False for `B`, which may also be the name of a variable."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A short answer.

    Example: `Answer("18 dollars", Number(value=Fraction(18), latex="18", num_digits=2, unit="dollar"))`
    """

    text: str
    """Answer without marks of Markdown and LaTeX around it, in ASCII and LaTeX as far as these have an equivalent."""
    value: Number | Items | Words | Choice | None
    """Value; None for an expression that this module cannot read."""
    name: str = ""
    """Name on the left of an equals sign; empty if there is none."""
    european: Number | None = None
    """Second value of a list such as `3,14`, which may be a decimal number; None for an expected answer."""

    @property
    def latex(self) -> str:
        """Answer for a parser of LaTeX."""
        return self.value.latex if isinstance(self.value, Number) and self.value.unit != "%" else self.text


# Reading


def after_thoughts(text: str) -> str:
    """Return the part of a completion after the thoughts of a reasoning model; the whole text if nothing follows them."""
    _, tag, rest = text.rpartition(THOUGHTS_END)
    return rest if tag and rest.strip() else text


def plain(text: str) -> str:
    """Return a text with ASCII in place of other digits, signs and spaces, and LaTeX in place of mathematical symbols."""
    return text if text.isascii() else "".join(map(_plain_char, text))


def number(text: str) -> Fraction | None:
    """Return the value of a number without a unit, such as `-1,234.50`, `1e3` or `18.`; None for any other text."""
    bare = bare_number(text)
    return None if bare is None else Fraction(bare)


def bare_number(text: str) -> str | None:
    """Return a number without a unit as Python writes it, such as `1234.50` for `+1.234,50`; None for any other text."""
    if len(text) > MAX_CHARS:
        return None
    found = _DECIMAL.fullmatch(plain(text).strip().removesuffix("."))
    if found is None or _decimal(found["mantissa"], found["power"]) is None:
        return None
    power = re.sub(r"\s", "", found["power"] or "")
    return _digits(found["mantissa"]).removeprefix("+") + (power and f"e{power}")


def read(text: str, *, is_reference: bool = False) -> Answer:
    """Read a short answer. In the expected one (`is_reference`), `3,14` is a list; else it may be a decimal number."""
    if len(text) > MAX_CHARS:
        return Answer(text, None)
    return _read(unwrapped(_PREFIX.sub("", unwrapped(plain(text)), count=1)), is_reference=is_reference)


def unwrapped(text: str) -> str:
    """Return an answer without the white space, LaTeX commands and delimiters, Markdown, quotes and period around it."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(";,").rstrip()
        text = text[:-1] if text.endswith(".") and not text.endswith("..") else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text == f"{opening}{inner}{closing}" and _belong_together(inner, opening, closing):
                text = inner
    return text


def _read(text: str, *, is_reference: bool, depth: int = 0) -> Answer:
    """Read an answer, or an item of a list, which may be named as in `x = 3`."""
    named = _NAMED.fullmatch(text)
    if named is None or "=" in named["value"]:
        return _read_value(text, is_reference=is_reference, depth=depth)
    return replace(_read_value(unwrapped(named["value"]), is_reference=is_reference, depth=depth), name=named["name"])


def _read_value(text: str, *, is_reference: bool, depth: int) -> Answer:
    # Plain notation in place of the spaces, text commands, fractions and signs of LaTeX
    cleaned = _SPACE.sub(" ", _NO_WIDTH.sub("", text).replace("{,}", ","))
    cleaned = _FRACTION.sub(r"\1 \2\3/\4\5", _TEXT.sub(r" \1 ", cleaned))
    cleaned = _DEGREE.sub(" degree ", cleaned)
    for command, sign in _SIGNS.items():
        cleaned = cleaned.replace(command, sign)
    cleaned = unwrapped(" ".join(cleaned.split()).replace(" ^", "^"))
    if (found := _CHOICE.fullmatch(cleaned)) is not None:
        return Answer(text, Choice((found[1] or found[2] or found[3]).upper(), is_marked=len(cleaned) > 1))
    if (moment := _moment(cleaned)) is not None:
        return Answer(text, Words(moment))
    if (value := _number(cleaned)) is not None:
        return Answer(text, value)
    if depth < MAX_DEPTH and not _SET_OPERATION.search(cleaned):
        brackets, inner = _bracketed(cleaned)
        parts = _split(inner)
        if brackets == "()" and len(parts) == 1:
            return replace(_read_value(unwrapped(inner), is_reference=is_reference, depth=depth + 1), text=text)
        if 1 < len(parts) <= MAX_ITEMS or (brackets and len(parts) == 1):
            items = [_read(unwrapped(part), is_reference=is_reference, depth=depth + 1) for part in parts]
            if all(item.text for item in items) and (brackets or not any(isinstance(item.value, Words) for item in items)):
                european = None if is_reference or not _EUROPEAN.fullmatch(cleaned) else _number(cleaned.replace(",", "."))
                return Answer(text, Items(brackets, tuple(items)), european=european)
    words = cleaned.lower().replace("-", " ").split()
    num_letters = sum(map(str.isalpha, cleaned))
    is_text = num_letters > 1 and _TEXT_ONLY.fullmatch(cleaned) is not None and _FUNCTIONS.isdisjoint(words)
    return Answer(text, Words(" ".join(words)) if is_text else None)


def _number(text: str) -> Number | None:
    """Read a number with a currency or a unit."""
    found = _WITH_UNIT.fullmatch(text)
    if found is None or (found["sign"] and found["inner_sign"]):
        return None
    written = _decimal(found["mantissa"], found["power"]) if found["mantissa"] else _fraction(found["fraction"])
    words = [word if len(word) <= 2 else word.lower() for word in (found["unit"] or "").split()]
    unit = found["unit"] or ""
    first = re.split(r"[\s/*^-]", unit.strip(), maxsplit=1)[0]
    is_unit = not first or first in _SYMBOLS_OF_UNITS or (unit[0] == " " and (len(first) > 1 or first in _SHORT_UNITS))
    if written is None or not _NO_UNITS.isdisjoint(words) or not is_unit:  # it may be a variable, as in `5x`
        return None
    value = -written.value if "-" in f"{found['sign']}{found['inner_sign']}" else written.value
    if words and words[0] in _MULTIPLES:
        value, words = value * _MULTIPLES[words[0]], words[1:]
        written = Number(value=value, latex=str(value))
    sign = "-" if value < 0 and not written.latex.startswith("-") else ""
    units = {_unit(part) for part in (found["currency"] or "", found["later"] or "", " ".join(words)) if part}
    return replace(written, value=value, latex=f"{sign}{written.latex}", unit=" ".join(sorted(units)))


def _decimal(mantissa: str, power: str | None) -> Number | None:
    """Read a decimal number, possibly with separators of thousands and with an exponent of ten."""
    digits = _digits(mantissa)
    exponent = re.sub(r"\s", "", power or "0")
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    _, _, part = digits.partition(".")
    return Number(
        value=Fraction(digits) * Fraction(10) ** int(exponent),
        latex=digits if not int(exponent) else f"{digits} \\times 10^{{{int(exponent)}}}",
        decimals=len(part) - int(exponent) if part else None,
        num_digits=len(digits.replace(".", "").lstrip("+-0")),
    )


def _digits(mantissa: str) -> str:
    """Return a decimal number without separators of thousands, and with a decimal point if it has decimals."""
    digits = re.sub(r"[\s'_]", "", mantissa)
    if digits.rfind(",") > digits.rfind(".") and ("." in digits or re.search(r"\d\s\d", mantissa)):  # 1.234,56 or 1 234,56
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.count(".") > 1:  # 1.234.567
        digits = digits.replace(".", "")
    return digits.replace(",", "").removesuffix(".")


def _fraction(text: str) -> Number | None:
    """Read a fraction or a mixed number."""
    *whole, top, bottom = map(int, re.findall(r"\d+", text))
    if bottom == 0 or (whole and top >= bottom):
        return None
    value = Fraction(top, bottom) + sum(whole)
    return Number(value=value, latex=str(value))


def _unit(text: str) -> str:
    """Return one name for all notations of a unit."""
    text = text.replace("{", "").replace("}", "")
    words = [_UNITS[text]] if text in _UNITS else [_UNITS.get(word, word) for word in text.split()]
    return " ".join(word.removesuffix("s") if len(word) > 3 else word for word in words)


def _moment(text: str) -> str | None:
    """Return a date in ISO format, or a time or ratio without white space; None for any other text."""
    if (found := _DATE.fullmatch(text)) is not None:
        month = found["month"] or found["month_2"]
        return f"{found['year']}-{_MONTHS.index(month[:3].lower()) + 1:02}-{int(found['day'] or found['day_2']):02}"
    if (found := _ISO_DATE.fullmatch(text)) is not None:
        return f"{found[1]}-{int(found[2]):02}-{int(found[3]):02}"
    return re.sub(r"\s", "", text).lower() if _TIME_OR_RATIO.fullmatch(text) else None


def _bracketed(text: str) -> tuple[str, str]:
    """Return the brackets around the whole answer and the text between them; no brackets if there are none."""
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("(", "]"), ("[", ")")):
        inner = text[len(opening) : len(text) - len(closing)]
        if text == f"{opening}{inner}{closing}" and _belong_together(inner, opening, closing):
            return f"{opening[-1]}{closing[-1]}", inner
    return "", text


def _split(text: str) -> list[str]:
    """Return the items of a list; one item if the text has no separator outside of brackets."""
    separator = _WIDE_SEPARATOR if _WIDE_SEPARATOR.search(text) else _SEPARATOR
    parts, start, depth, end = list[str](), 0, 0, 0
    for found in separator.finditer(text):
        depth += sum((char in "([{") - (char in ")]}") for char in text[end : found.start()])
        end = found.start()
        if depth == 0:
            parts.append(text[start:end])
            start = found.end()
    return [*parts, text[start:]]


def _belong_together(inner: str, opening: str, closing: str) -> bool:
    """Return True if two marks or brackets enclose a text together, so that neither belongs to a part of it."""
    if opening[-1] not in "([{":
        return not closing or closing not in inner
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _plain_char(char: str) -> str:
    if char.isascii():
        return char
    if char in _PLAIN:
        return _PLAIN[char]
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.digit(char))
    if "\uff01" <= char <= "\uff5e":  # full-width forms of ASCII
        return chr(ord(char) - 0xFEE0)
    return " " if category == "Zs" else "" if category == "Cf" else char


# Comparing


def equal(right: Answer, other: Answer, is_equal: Callable[[str, str], bool]) -> bool:
    """Return True if another answer equals the right one. `is_equal` compares two expressions in LaTeX."""
    if right.name and other.name and right.name != other.name:
        return False
    match right.value, other.value:
        case Number() as one, Number() as two:
            return _same_number(one, two)
        case Number() as one, Items() if other.european is not None:
            return _same_number(one, other.european)
        case Items() as one, Items() as two:
            return _same_items(one, two, is_equal)
        case Items(brackets="{}", items=(item,)), _:
            return equal(item, other, is_equal)
        case _, Items(brackets="{}", items=(item,)):
            return equal(right, item, is_equal)
        case (Words(), Words()) | (Choice(), Choice()):
            return _letters(right.value) == _letters(other.value)
        case (Choice(), None) | (None, Choice()):
            choice, text = (right.value, other.text) if isinstance(right.value, Choice) else (other.value, right.text)
            assert isinstance(choice, Choice)
            return choice.is_marked and text.upper() == choice.letter
        case (None, None | Number() | Items()) | (Number() | Items(), None):
            return right.text == other.text or is_equal(right.latex, other.latex)
    return False


def _letters(value: object) -> str:
    assert isinstance(value, Words | Choice)
    return value.text if isinstance(value, Words) else value.letter


def _same_number(one: Number, two: Number) -> bool:
    if (one.unit == "%") != (two.unit == "%"):
        share, whole = (one, two) if one.unit == "%" else (two, one)
        if whole.unit:
            return False
        # "50" may mean 50 %, but "0.5" is more likely to be half of the whole than 0.5 %.
        return share.value / 100 == whole.value or (abs(whole.value) > 1 and share.value == whole.value)
    if one.unit and two.unit and one.unit != two.unit:
        return False
    return one.value == two.value or _is_rounded(one, two) or _is_rounded(two, one)


def _is_rounded(one: Number, exact: Number) -> bool:
    """Return True if a number with enough decimals equals the exact one rounded to them."""
    if one.decimals is None or min(one.decimals, one.num_digits) < MIN_DIGITS:
        return False
    is_finer = exact.decimals is None or exact.decimals > one.decimals
    return is_finer and abs(one.value - exact.value) * 2 * Fraction(10) ** one.decimals <= 1


def _same_items(right: Items, other: Items, is_equal: Callable[[str, str], bool]) -> bool:
    kinds = {right.brackets, other.brackets}
    if len(right.items) != len(other.items) or (len(kinds) == 2 and kinds not in ({"", "()"}, {"", "{}"})):
        return False
    if not kinds <= {"", "{}"}:
        return all(equal(one, two, is_equal) for one, two in zip(right.items, other.items, strict=True))
    others = [*other.items]  # in any order
    for item in right.items:
        found = next((index for index, one in enumerate(others) if equal(item, one, is_equal)), None)
        if found is None:
            return False
        del others[found]
    return True


# Notations

_PLAIN: dict[str, str] = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
    **{char: f"^{{{digit}}}" for digit, char in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")},
    **{char: f" {unicodedata.normalize('NFKC', char).replace(chr(0x2044), '/')} " for char in "\u00bd\u00bc\u00be\u2153\u2154"
       "\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c\u215d\u215e\u2150\u2151\u2152"},
    "\u2044": "/", "\u00f7": "/", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u221a": r"\sqrt ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2229": r"\cap ",
    "\u00b1": r"\pm ", "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"',
    "\u3001": ",", "\u3002": ".",
}  # fmt: skip
_WRAPPERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("```", "```"),
    ("`", "`"), (r"\boxed{", "}"), (r"\fbox{", "}"), (r"\text{", "}"), (r"\textbf{", "}"), (r"\mathrm{", "}"),
    (r"\mathbf{", "}"), (r"\mbox{", "}"), (r"\displaystyle", ""), ("<b>", "</b>"), ("<strong>", "</strong>"), ("{", "}"),
    ('"', '"'), ("'", "'"),
)  # fmt: skip
_SIGNS = {r"\$": "$", r"\%": "%", r"\times": "*", r"\cdot": "*", r"\lbrace": r"\{", r"\rbrace": r"\}"}
_NO_WIDTH = re.compile(r"\\(?:left|right)(?![a-z])|\\!|\\displaystyle")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"(?:(?<![\d.,])(\d+)\s*)?\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_DEGREE = re.compile(r"\^?\{?\\circ\}?|\\degree")
_PREFIX = re.compile(r"(?i)\A(?:[*_]*(?:the\s+)?(?:final\s+|correct\s+)?answer[*_]*\s*(?:is\b|:|=)[:*_\s]*|=\s*)")
_NAMED = re.compile(r"(?s)(?P<name>[A-Za-z](?:\w{0,19}|_\{\w{1,9}\}))\s*=\s*(?P<value>.+)")
_GROUPED = (
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:[.,]\d+)?|\d{1,3}(?:'\d{3})+(?:\.\d+)?|\d{1,3}(?:_\d{3})+(?:\.\d+)?"
    r"|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d+(?:\.\d*)?|\.\d+"
)
_POWER = r"(?:\s*[*x]\s*10\s*\^\s*\{?\s*|[eE])(?P<power>[+-]?\s*\d+)(?:\s*\})?"
_DECIMAL = re.compile(rf"(?P<mantissa>[+-]?\s*(?:{_GROUPED}))(?:{_POWER})?")
_WITH_UNIT = re.compile(
    rf"(?P<sign>[+-]\s*)?(?P<currency>(?:[A-Z]{{1,3}})?[$€£¥₹]|(?:USD|EUR|GBP|JPY|INR|CNY)(?= ))?\s*(?P<inner_sign>[+-])?\s*"
    rf"(?:(?P<fraction>(?:\d+ )?\d+\s*/\s*\d+)|(?P<mantissa>{_GROUPED})(?:{_POWER})?)"
    r"(?:\s*(?P<later>[$€£¥₹¢%]))?(?P<unit>\s*[A-Za-z]+(?:\^\{?-?\d\}?)?(?:[ /*-]+[A-Za-z]+(?:\^\{?-?\d\}?)?){0,3})?"
)
_EUROPEAN = re.compile(r"[+-]?\d+,\d+")
_SEPARATOR = re.compile(r"[,;]|\s+(?:and|or)\s+")
_WIDE_SEPARATOR = re.compile(r"[,;]\s+(?:(?:and|or)\s+)?|;|\s+(?:and|or)\s+")
_SET_OPERATION = re.compile(r"\\c[ua]p(?![a-z])|\\setminus")
_CHOICE = re.compile(r"(?s)\(\s*([A-Ja-j])\s*\)(?:\s+\w.*)?|([A-J])(?:[.):](?:\s.*)?)?|([a-j])\)(?:\s+\w.*)?")
_TEXT_ONLY = re.compile(r"[^\d\\+*/^=<>_{}|$%#\[\]]+")
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "pi", "sqrt", "inf", "infinity", "max", "min", "lim", "mod",
    "e", "i", "arcsin", "arccos", "arctan",
})  # fmt: skip
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    "|dec(?:ember)?"
)
_DATE = re.compile(
    rf"(?i)(?:(?P<month>{_MONTH})\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?"
    rf"|(?P<day_2>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?(?P<month_2>{_MONTH})\.?),? (?P<year>\d{{4}})"
)
_ISO_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
_TIME_OR_RATIO = re.compile(
    r"(?i)\d{1,2}([/.-])\d{1,2}\1\d{2,4}|\d{4}([/.])\d{1,2}\2\d{1,2}|\d+(?:\s*:\s*\d+)+(?:\s*[ap]\.?m\.?)?|\d{1,2}\s*[ap]\.?m\.?"
)
_MULTIPLES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_UNITS = _FUNCTIONS | {
    "or", "and", "not", "no", "is", "are", "was", "to", "minus", "plus", "times", "over", "by", "than", "but", "if", "wrong",
    "incorrect", "half", "halves", "quarter", "quarters", "third", "thirds", "fourth", "fourths", "fifth", "fifths", "tenth",
    "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "choose", "x",
}  # fmt: skip
_SHORT_UNITS = frozenset("mgshlLCFKVWNJ")
_SYMBOLS_OF_UNITS = frozenset({
    "mm", "cm", "km", "kg", "mg", "ml", "mL", "kW", "kWh", "Hz", "kHz", "MHz", "GHz", "kB", "MB", "GB", "TB", "min", "hr",
    "hrs", "sec", "ms", "ft", "lb", "lbs", "oz", "mph", "kph", "in",
})  # fmt: skip
_UNITS = {
    **dict.fromkeys(("$", "us$", "US$", "usd", "USD", "dollar", "dollars"), "dollar"),
    **dict.fromkeys(("\u20ac", "eur", "EUR", "euro", "euros"), "euro"),
    **dict.fromkeys(("\u00a3", "gbp", "GBP", "pound", "pounds"), "pound"),
    **dict.fromkeys(("\u00a2", "cent", "cents"), "cent"),
    **dict.fromkeys(("%", "percent", "per cent", "pct", "percentage"), "%"),
    **dict.fromkeys(("mm", "millimeter", "millimeters", "millimetre", "millimetres"), "mm"),
    **dict.fromkeys(("cm", "centimeter", "centimeters", "centimetre", "centimetres"), "cm"),
    **dict.fromkeys(("m", "meter", "meters", "metre", "metres"), "m"),
    **dict.fromkeys(("km", "kilometer", "kilometers", "kilometre", "kilometres"), "km"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("in", "inch", "inches"), "inch"),
    **dict.fromkeys(("mg", "milligram", "milligrams"), "mg"),
    **dict.fromkeys(("g", "gram", "grams"), "g"),
    **dict.fromkeys(("kg", "kilogram", "kilograms"), "kg"),
    **dict.fromkeys(("lb", "lbs"), "lb"),
    **dict.fromkeys(("ml", "mL", "milliliter", "milliliters", "millilitre", "millilitres"), "ml"),
    **dict.fromkeys(("l", "L", "liter", "liters", "litre", "litres"), "l"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "second"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "minute"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "hour"),
    **dict.fromkeys(("degree", "degrees"), "degree"),
    **dict.fromkeys(("mph", "miles per hour", "miles/hour"), "mph"),
    **dict.fromkeys(("km/h", "kph", "kilometers per hour"), "km/h"),
    **dict.fromkeys(("m/s", "meters per second"), "m/s"),
    **dict.fromkeys(("people", "persons", "person"), "person"),
    **dict.fromkeys(("children", "child"), "child"),
}  # fmt: skip


# Rewards

Scorer = Callable[[str, Mapping[str, Any]], float]
"""Function from the text of a completion and the entry of its prompt to a reward."""

MAX_PROSE_CHARS = 20_000
"""Length of the end of a text in which `math_verify` searches for an answer that is not marked."""

_TAG = re.compile("</?answer>")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_JOINTS = {",", "and", "or", ",and", ",or"}
_STATED = re.compile(r"(?i)\b(?:answer|option|choice)\b[*_\s]*(?:is\b|are\b|=|:)[:*_ \t]*|####")
_NUMBER = re.compile(r"\d[\d.,]*(?<=\d)")
_UNSURE = re.compile(  # "3 or 4" or "not 3" at the end
    r"(?i)\d[^\s\d]*(?:\s+[^\s\d]+)?\s+or\s+[^\s\d]*+\d[\d.,]*+[^\d]*+$"
    r"|\b(?:not|never|isn't|wrong|incorrect)\b[^\d]{0,20}\d[\d.,]*+[^\d]*+$"
)
_WORD = re.compile(r"(?<![\\a-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min|lim|mod|inf|arc\w+)\b)[a-z]{3,}")


def reasoning_gym(task: str, config: Mapping[str, Any], levels: Sequence[Mapping[str, Any]] = ()) -> Scorer:
    """Return the reward that a reasoning-gym task defines, limited to 0 to 1, for the text in the last `<answer>` tags.

    Without tags, the reward is 0. If the expected answer is a number, an answer such as `1,234`, `1.234,5` or `**18**` is also
    scored as a plain number, because several tasks compare texts. The options are `config`, or those of the `level` in the
    entry, because several tasks score with their options.

    Raises:
        Exception: The task is unknown, or rejects its options.
    """
    datasets = [create_dataset(task, options, seed=0, size=1) for options in (*levels, config)]

    def score(text: str, entry: Mapping[str, Any]) -> float:
        dataset = datasets[entry.get("level", -1)]
        answer = last_answer(text)
        if answer is None:
            return 0.0
        rewards, notations = [0.0], [answer]
        bare = bare_number(unwrapped(plain(answer))) if len(answer) <= MAX_CHARS else None
        if bare is not None and number(str(entry["answer"])) is not None:
            notations.append(bare)
        for notation in dict.fromkeys(notations):
            try:
                rewards.append(float(dataset.score_answer(notation, entry)))
            except Exception:  # several tasks raise on a malformed answer, which counts as a wrong one
                dataset.score_answer(entry["answer"], entry)  # raises if the task's scorer itself is broken
        return min(max(rewards), 1.0)

    return score


def exact() -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, else 0.

    The answer is the text in the last `<answer>` tags, or the whole text if there are none; `</think>` and all text before it
    are left out, unless nothing follows it. Runs of white space are treated as one space. Numbers are compared by value:
    1,234.50 equals 1234.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        text = after_thoughts(text)
        tagged = last_answer(text)
        answer, expected = (" ".join(part.split()) for part in (text if tagged is None else tagged, str(entry["answer"])))
        if answer == expected:
            return 1.0
        value = number(answer)
        return float(value is not None and value == number(expected))

    return score


def math_verify(timeout_s: int) -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, as a number, list, text or mathematical expression.

    The answer is the text in the last `<answer>` tags, or after the last `<answer>` if no tags are closed, and in it the last
    `\\boxed` if there is one. Without tags, it is the last `\\boxed`, the text after the last "answer is", or else what the
    package math-verify finds in the text: LaTeX first, then numbers. `</think>` and all text before it are left out, unless
    nothing follows it. A text without an answer gets the reward 0. If `answer` is a solution with a `\\boxed`, that counts.
    `titanrl.rollout.scorers` compares the notations that it can read, math-verify all others. The reward raises if expressions
    cannot be compared within `timeout_s`, or if the expected answer is empty or cannot be parsed.

    Raises:
        ImportError: The package is not installed.
        RuntimeError: This is not the main thread, in which alone math-verify's time limits (SIGALRM) work.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
    from sympy import Basic, Float, UnevaluatedExpr

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def expressions(text: str, limit_s: int = timeout_s) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "math_verify compares expressions only in the main thread, because it limits their time by SIGALRM"
            )
        try:
            return list(parse(text, parsing_timeout=limit_s, raise_on_error=True))
        except TimeoutException:
            raise TimeoutError(f"parsing an expression took longer than {timeout_s} s") from None
        except MemoryError:
            raise
        except Exception:  # the package raises on some malformed expressions, which count as wrong answers
            return []

    @lru_cache(maxsize=64)
    def expected(latex: str) -> list[Any]:
        if not (found := expressions(_boxed(latex))):
            raise ValueError(f"math-verify cannot parse the expected answer {latex!a:.60}")
        return found

    def are_close(one: Any, other: Any) -> bool:
        """Check the relative error of numbers with decimals, because math-verify only compares six decimals."""
        pair = (one, other)
        if not all(isinstance(value, Basic) and value.is_number and not value.has(UnevaluatedExpr) for value in pair):
            return True
        first, second = (complex(value.evalf(20)) for value in pair)
        return not (one.has(Float) or other.has(Float)) or abs(first - second) <= 2e-6 * max(abs(first), abs(second))

    def any_equal(right: Sequence[Any], found: Sequence[Any], limit_s: int = timeout_s) -> bool:
        failures: list[BaseException] = []
        for one, other in product(right, found):
            try:
                is_equal = verify([one], [other], timeout_seconds=limit_s, raise_on_error=True)
                if is_equal and timeout(timeout_seconds=limit_s)(are_close)(one, other):
                    return True
            except TimeoutException:
                failures.append(TimeoutError(f"comparing two expressions took longer than {timeout_s} s"))
            except Exception as error:  # undecided, unless another pair is equal
                failures.append(error)
        if failures:
            raise failures[0]
        return False

    def are_equal(right: str, other: str) -> bool:
        first, second = (set(_WORD.findall(text.lower())) for text in (right, other))
        if first and second and first != second:  # math-verify would read the letters of a word as factors
            return False
        return any_equal(expected(right), expressions(_boxed(other)))

    def is_right_in_prose(right: Answer, text: str) -> bool:
        """Search a text for the answer, unless it states several or denies one."""
        if isinstance(right.value, Words | Choice) or _UNSURE.search(text[-MAX_PROSE_CHARS:]):
            return False
        found = expressions(plain(text[-MAX_PROSE_CHARS:]))
        texts = [value for value in found if isinstance(value, str)]
        is_share = any(isinstance(value, Basic) and value.has(UnevaluatedExpr) for value in found)  # a percentage
        shown = [] if is_share else [answer for answer in map(read, texts) if answer.value is not None]
        if shown:
            return equal(right, shown[0], are_equal)
        return any_equal(expected(right.latex), found)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        given = str(entry["answer"])
        right = read(last_boxed(given) or given, is_reference=True)
        if not right.text:
            raise ValueError(f"the expected answer must not be empty (got {entry['answer']!a:.60})")
        text = after_thoughts(text)
        tagged = last_answer(text)
        if tagged is None and "<answer>" in text:  # a tag that is not closed
            tagged = text.rpartition("<answer>")[2].partition("</")[0].strip()
        boxed = last_boxed(text if tagged is None else tagged)
        if boxed is not None or tagged is not None:
            marked = tagged or "" if boxed is None else boxed
            if len(marked) > MAX_CHARS:
                return 0.0
            answer = read(marked)
            is_right = equal(right, answer, are_equal)
            is_prose = answer.value is None and boxed is None and " " in answer.text
            if is_prose and len(set(_NUMBER.findall(answer.text))) == 1:
                is_right = is_right or is_right_in_prose(right, answer.text)
            return float(is_right)
        for stated in stated_answers(text):
            answer = read(stated)
            if answer.value is not None:
                return float(equal(right, answer, are_equal))
            if is_short(stated) and equal(right, answer, are_equal):
                return 1.0
        return float(is_right_in_prose(right, text))

    # Load lazy imports, without a time limit (0): a busy machine may need longer for them than a comparison may take.
    any_equal(expressions(r"\boxed{\frac{1}{2}}, $x = 1,000.5$ or 3%", 0), expressions(r"$\sqrt{2}$", 0), 0)
    return score


def regex(pattern: str, match: Literal["full", "anywhere"]) -> Scorer:
    """Return a reward that is 1 if a regular expression matches the whole completion or any part of it, else 0."""
    compiled = re.compile(pattern)
    matches = compiled.fullmatch if match == "full" else compiled.search
    return lambda text, entry: float(matches(text) is not None)


def overlong(cache_tokens: int, max_tokens: int) -> Callable[..., float]:
    """Return DAPO's soft penalty for overlong completions (arXiv:2503.14476, equation 13).

    The penalty is 0 up to `max_tokens - cache_tokens` tokens, -1 from `max_tokens` on, and linear in between.
    """
    free_tokens = max_tokens - cache_tokens

    def score(text: str, entry: Mapping[str, Any], num_tokens: int) -> float:
        return -min(max(num_tokens - free_tokens, 0), cache_tokens) / cache_tokens

    return score


def repetition(ngram_size: int, unit: Literal["word", "character"]) -> Scorer:
    """Return a penalty for repetition: minus the fraction of n-grams that occurred before.

    A text of at most one n-gram has the penalty 0. This is the penalty of TRL and open-r1 with `max_penalty: -1`, after
    arXiv:2502.03373.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        lower = text.lower()
        units = lower.split() if unit == "word" else lower
        total = len(units) - ngram_size + 1
        if total <= 1:
            return 0.0
        distinct = {tuple(units[i : i + ngram_size]) for i in range(total)}
        return len(distinct) / total - 1.0

    return score


def last_answer(text: str) -> str | None:
    """Return the stripped text between the last pair of `<answer>` and `</answer>`; None if there is no pair.

    The result equals that of `reasoning_gym.utils.extract_answer`, but this function takes linear time even for a text with
    many unclosed tags.
    """
    answer, start = None, None
    for tag in _TAG.finditer(text):
        if start is None and tag[0] == "<answer>":
            start = tag.end()
        elif start is not None and tag[0] == "</answer>":
            answer, start = text[start : tag.start()].strip(), None
    return answer


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed`, or the contents of several that are joined by "and", "or" or a comma.

    Takes linear time. An unclosed `\\boxed` is ignored.
    """
    boxes: list[tuple[int, slice]] = []
    opened: list[tuple[int, int] | None] = []
    for token in _BRACE.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token.start(), token.end()) if len(token[0]) > 1 else None)
        elif token[0] == "}" and opened and (span := opened.pop()) is not None:
            while boxes and boxes[-1][0] > span[0]:  # inside of this one
                boxes.pop()
            boxes.append((span[0], slice(span[1], token.start())))
    if not boxes:
        return None
    start, content = boxes.pop()
    contents = [text[content]]
    while boxes and "".join(text[boxes[-1][1].stop + 1 : start].replace("$", " ").split()) in _JOINTS:
        start, content = boxes.pop()
        contents.append(text[content])
    return ", ".join(dict.fromkeys(reversed(contents)))


def stated_answers(text: str) -> Iterator[str]:
    """Yield what a text without tags may state as its answer, the surest first.

    This is the first line with text after the last "answer is" or `####`, the first sentence of that, and the text itself if it
    is short.
    """
    *_, last = [None, *_STATED.finditer(text)]
    if last is not None:
        line = text[last.end() :].strip().partition("\n")[0]
        yield line
        yield re.split(r"\.\s|\.$", line, maxsplit=1)[0]
    if is_short(text):
        yield text


def is_short(text: str) -> bool:
    """Return True if a text is at most one line of 6 words and 100 characters."""
    return len(text) <= 100 and "\n" not in text.strip() and len(text.split()) <= 6


def _boxed(answer: str) -> str:
    """Wrap an answer in `\\boxed`, unless it contains LaTeX delimiters, so that math-verify parses it as one expression."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
