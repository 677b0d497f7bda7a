"""Measure the size and the shape of the package: `python -m tests.size` prints the figures that `test_structure.py` limits."""

import ast
from collections import Counter
from pathlib import Path

import grimp

PACKAGE = Path(__file__).parents[1] / "titanrl"
SMALL_LINES = 60
"""A module of at most this many lines is small."""


def figures() -> dict[str, float]:
    """Return the figures by name.

    - `lines`: all lines of all modules.
    - `modules`, and the small ones among them without `__init__.py`.
    - `modules with a shared name`: modules whose file name another module has, too.
    - `rooms`: folders of the package and modules in its root; `arrows`: pairs of rooms of which one imports the other;
      `floors`: rooms in the longest chain of arrows. Imports inside functions and for type checking count.
    - `modules reached by the loop`: modules that `titanrl.grpo` imports, directly or not, when it is imported.
    - `functions with one mention`: share of the functions with a unique name whose name occurs once outside the definition.
    """
    paths = sorted(PACKAGE.rglob("*.py"))
    sizes = {path: len(path.read_text().splitlines()) for path in paths}
    named = [path for path in paths if not path.stem.startswith("__")]
    stems = Counter(path.stem for path in named)
    arrows = _arrows()
    return {
        "lines": sum(sizes.values()),
        "modules": len(paths),
        "small modules": sum(sizes[path] <= SMALL_LINES for path in paths if path.stem != "__init__"),
        "modules with a shared name": sum(count for count in stems.values() if count > 1),
        "rooms": len({room for arrow in arrows for room in arrow}),
        "arrows": len(arrows),
        "floors": _longest_chain(arrows),
        "modules reached by the loop": _num_reached(),
        "functions with one mention": round(_share_with_one_mention(paths), 3),
    }


def _arrows() -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    graph = grimp.build_graph("titanrl", cache_dir=None)
    pairs = {(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)}
    rooms = {(_room(module), _room(other)) for module, other in pairs}
    return {(room, other) for room, other in rooms if room != other}


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _longest_chain(arrows: set[tuple[str, str]]) -> int:
    below = {room: {other for importing, other in arrows if importing == room} for arrow in arrows for room in arrow}
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max(map(height, below[room]), default=0)
        return heights[room]

    return max(map(height, below))


def _num_reached() -> int:
    graph = grimp.build_graph("titanrl", cache_dir=None, exclude_type_checking_imports=True)
    for module in graph.modules:  # imports inside functions do not happen when the loop is imported
        at_top = _imported_at_top(PACKAGE.parent / Path(*module.split(".")))
        for other in graph.find_modules_directly_imported_by(module) - at_top:
            graph.remove_import(importer=module, imported=other)
    return len(graph.find_upstream_modules("titanrl.grpo")) + 1


def _imported_at_top(base: Path) -> set[str]:
    path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _share_with_one_mention(paths: list[Path]) -> float:
    defined: Counter[str] = Counter()
    mentioned: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                defined[node.name] += 1
            elif isinstance(node, ast.Name):
                mentioned[node.id] += 1
            elif isinstance(node, ast.Attribute):
                mentioned[node.attr] += 1
    unique = [name for name, count in defined.items() if count == 1 and mentioned[name]]
    return sum(mentioned[name] == 1 for name in unique) / len(unique)


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:30} {value:>8,}")
