"""Structure of the package: no import cycle, short files, short functions."""

import ast
import graphlib
from pathlib import Path

import grimp

PACKAGE = Path(__file__).parents[1] / "titanrl"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


def test_imports_have_no_cycle() -> None:
    # Imports inside functions and under TYPE_CHECKING count, too.
    graph = grimp.build_graph("titanrl", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the cycle


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        too_long += [str(path)] * (len(text.splitlines()) > MAX_FILE_LINES)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                too_long += [f"{path}: {node.name}"] * (node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES)
    assert too_long == []
