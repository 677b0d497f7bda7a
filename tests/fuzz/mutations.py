"""Generate hostile values, strings and bytes."""

import json
from collections.abc import Callable
from random import Random

NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "7",
        "1.5",
        "-0.0",
        "1e-300",
        "1e308",
        "1e999",
        ".inf",
        "-.inf",
        ".nan",
        "0x10",
        "010",
        "1_000",
    ),
    *(
        "12:00:00",
        "2001-01-01",
        "4294967295",
        "4294967296",
        "-9223372036854775809",
        "10000",
        "1000000",
        "100000000",
        "9" * 5000,
    ),
)
WORDS = (
    *(
        "true",
        "false",
        "null",
        "~",
        "yes",
        "off",
        "''",
        "auto",
        "cpu",
        "cuda",
        "none",
        "ppo",
        "ppo ",
        "Ppo",
        "..",
        "/",
        ".",
        "~/x",
    ),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "/nowhere/at/all", "a" * 300, "/" + "a/" * 3000, "x" * 100_000),
    *(
        "module:name",
        "file.py:f",
        "os:system",
        ":",
        "a:b:c",
        "no_such_module_at_all:f",
        "a" * 300 + ":f",
        "\u00b2",
        "\u0661",
        "\u2028",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        '"\\x1b[2J"',
        '"a\\nb"',
        "!!python/name:os.system x",
        "&a 1",
        "*a",
        "? x",
        "- 1",
        "#",
        "'",
        '"',
        "%",
        "@",
        "`",
    ),
    *(
        "[1, 2]",
        "[]",
        "{}",
        "{a: 1}",
        "{1: 2}",
        "{? [1] : 2}",
        "[[[]]]",
        "{a: {b: {c: 1}}}",
        "[true, null]",
        "{a: 1, a: 2}",
        "<<: 1",
    ),
)


def scalar(rng: Random) -> str:
    """Return a hostile YAML value."""
    match rng.randrange(7):
        case 0 | 1:
            return rng.choice(NUMBERS)
        case 6:
            return f"'{rng.choice(NUMBERS)}{rng.choice(('', '', 'k', 'm'))}'"
        case 2 | 3:
            return rng.choice(WORDS)
        case 4:
            depth = rng.choice((3, 49, 50, 51, 99, 101, 1000, 5000))
            return rng.choice(("[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth, "[" * depth))
        case _:
            return "".join(
                chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xA0, 0x3000)))) for _ in range(rng.randrange(30))
            )


def changed_bytes(rng: Random, data: bytes) -> bytes:
    """Return the data with one mutation, such as a truncation, a flipped bit, an insertion or another encoding."""
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[: rng.randrange(len(data) + 1)],
        lambda: b"",
        lambda: bytes(len(data)),
        lambda: flipped(rng, data),
        lambda: data + flipped(rng, data[-50:]),
        lambda: data + data,
        lambda: spliced(
            rng, data, rng.choice((b"\0", b"\xff", b"\n", b"\r", b"{", b"[", b'"', b"\\u0000", b"\\ud800", b": ", b"-"))
        ),
        lambda: spliced(rng, data, rng.choice((b"[", b'{"a":', b"9")) * rng.choice((10, 200, 5000))),
        lambda: spliced(rng, data, scalar(rng).encode("utf-8", "surrogatepass")),
        lambda: b"".join(rng.sample(lines := data.splitlines(keepends=True), len(lines))),
        lambda: data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1")), "replace"),
    )
    return rng.choice(changes)()


def flipped(rng: Random, data: bytes) -> bytes:
    """Return the data with one flipped bit."""
    if not data:
        return b"x"
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spliced(rng: Random, data: bytes, piece: bytes) -> bytes:
    """Return the data with a few bytes replaced by `piece`."""
    start = rng.randrange(len(data) + 1)
    return data[:start] + piece + data[start + rng.randrange(10) :]


def json_value(rng: Random, depth: int = 0) -> str:
    """Return a JSON value as text; Python cannot parse some of them."""
    match rng.randrange(9 if depth < 4 else 7):
        case 0:
            return rng.choice(("null", "true", "false", "NaN", "-Infinity", "1e999", "-0", "9" * 5000, "1.5", "3"))
        case 1 | 2:
            return json.dumps(
                rng.choice(("", " ", "1 + 2 =", "3", "\0", "\ud800", "a" * 70_000, "\u2028", "<answer>3</answer>"))
            )
        case 3:
            levels = rng.choice((90, 101, 3000))
            return "[" * levels + "]" * levels
        case 4:
            return json.dumps(
                [{"role": rng.choice(("user", "assistant", "x")), "content": rng.choice(("1 + 2 =", "3", None, ""))}] * 2
            )
        case 5 | 6:
            return json.dumps("".join(chr(rng.randrange(32, 0x2000)) for _ in range(rng.randrange(20))))
        case 7:
            return f"[{', '.join(json_value(rng, depth + 1) for _ in range(rng.randrange(4)))}]"
        case _:
            return f"{{{', '.join(f'{json.dumps(str(i))}: {json_value(rng, depth + 1)}' for i in range(rng.randrange(4)))}}}"
