"""Check the language of docstrings, comments, messages and documentation pages. `make lint` runs it.

Three rules that a program can check:

1. The docstring of a function or method starts with a verb in the imperative, on the first line.
2. No docstring, and no attribute docstring, is a noun clause ("What ...", "Whether ...", "How many ...").
3. No file uses the phrases in `BANNED`, which read as if translated. Use the field's own words instead.

Properties, fixtures and tests are exempt from rule 1: properties and fixtures read like fields, and a test's name describes it.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

VERBS = frozenset(
    """
    abort accept accumulate acquire act add adjust admit advance agree align allocate allow alternate announce answer append
    apply ask assemble assert assign attach average await balance bind block bound bring broadcast buffer build bundle cache
    calculate call cancel cast change charge check choose clamp clean clear clip clone close collate collect combine commit
    compare compile complete compute confine connect consume continue convert copy count cover create cut deal decide
    declare decode decorate decrease delete deliver derive describe detach detect determine discard dispatch display
    distribute divide do download drain draw drive drop dump emit enable encode end enforce ensure enter enumerate escape
    estimate evaluate evict examine execute exit expand expect explain export express extend extract fail feed fetch fill
    filter find finish fit flatten flush follow force forget fork format forward free freeze gather generate get give go
    group guard halve handle hash hide hold identify ignore implement import include increase infer initialize insert
    inspect install interrupt intersect invalidate invert iterate join judge keep kill label launch lay lead learn lease
    leave let limit link list listen load locate lock log look lower make map mark mask match materialize measure merge
    mirror mix mock move multiply name narrow normalize note notify offer open order overwrite pack pad pair parse partition
    pass patch pause pick pickle pin place plan play plot point poll pop prefer prepare prepend present preserve prevent
    print process produce profile project prove provide publish pull push put quantize query queue quote raise rank read
    reap rebuild receive recompute reconnect record recover redirect reduce refill refresh refuse register reject relay
    release reload remember remove rename render reopen reorder repeat replace reply report represent request requeue
    require reserve reset reshape reshard resolve respawn restart restore restrict resume retain retry return reuse rewrite
    rotate round route run sample save say scale schedule score search seed select send separate serialize serve set shard
    share shift show shrink shut signal simulate skip sleep slice solve sort spawn split spread stack start state step stop
    store stream strip submit subtract suggest sum summarize supervise suspend swap switch synchronize take talk terminate
    test throw tie time tokenize track train translate treat trim truncate try turn unpack unpickle unregister update upload
    use validate verify view visit wait walk warm warn watch weight widen wrap write yield
    """.split()  # noqa: SIM905
)
CLAUSES = re.compile(r"(What|Whatever|Whether|How|Where|Which|Who|Whoever|Whose|When|That which|Those of)\b")
BANNED = re.compile(
    r"\b(anew|whoever|nobody|somebody|stands?|in vain|is told|are told|what is left of|comes? together|came together"
    r"|for ever|leave to (generate|go|run)|to be had|at home in|as well as any|thrown away|throws? away|by turns"
    r"|whatever (it is|ends|goes|hangs)|at hand|under way|one's own|user's own|gives? back|given back|takes? back|goes on)\b",
    re.IGNORECASE,
)
ALLOWED = {
    "stand-in": "a noun",
    "stand-alone": "a technical term",
}
"""Allowed phrases that contain a banned word, and the reason."""


def main() -> int:
    """Print all violations; return 1 if there are any, else 0."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]  # also files not yet committed
    files = [path for name in subprocess.check_output(listing, text=True).splitlines() if (path := Path(name)).is_file()]
    found = [violation for path in files for violation in check(path)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} violations in {len(files)} files")
    return 1 if found else 0


def check(path: Path) -> Iterator[str]:
    """Yield the violations of one file, as `path:line: problem`."""
    if path.name == Path(__file__).name:
        return
    if path.suffix == ".py":
        source = path.read_text()
        yield from (f"{path}:{line}: {problem}" for line, problem in check_docstrings(path, ast.parse(source)))
        texts = comments_and_strings(source)
    elif path.suffix in {".md", ".yaml", ".j2", ".c", ".toml", ".ipynb"} or path.name == "Makefile":
        texts = enumerate(path.read_text().splitlines(), start=1)
    else:
        return
    for line, text in texts:
        for match in BANNED.finditer(re.sub("|".join(map(re.escape, ALLOWED)), "", text, flags=re.IGNORECASE)):
            yield f"{path}:{line}: the phrase {match[0]!r}"


def check_docstrings(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and problem of every docstring that violates rule 1 or 2."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is None:
                continue
            word = re.match(r"[A-Za-z]+", text)
            if CLAUSES.match(text):
                yield node.lineno, f"{node.name}: the docstring is a noun clause: {text.splitlines()[0]!r}"
            elif not is_exempt(path, node) and (word is None or word[0].lower() not in VERBS):
                yield node.lineno, f"{node.name}: the docstring does not start with a verb: {text.splitlines()[0]!r}"
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and CLAUSES.match(node.value.value.strip())
        ):
            yield node.lineno, f"the docstring is a noun clause: {node.value.value.strip().splitlines()[0]!r}"


def is_exempt(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for properties and fixtures, which read like fields, and for all functions in tests."""
    names = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property", "fixture"}) or path.parts[0] == "tests"


def comments_and_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of every comment and string literal of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


if __name__ == "__main__":
    sys.exit(main())
