"""How easily the code reads, in figures: `make figures` prints them for this tree.

Numbers are those of src/fedsso. Code lines are lines with a token that is neither a comment nor a
docstring; a syntax node is a node of Python's own syntax tree, without docstrings.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedsso"
WIDTH = 100
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
USERS = (  # the modules of what users call
    "algorithm/contract.py",
    "algorithm/schedule.py",
    "data/catalogue.py",
    "data/federation.py",
    "experiment/calls.py",
    "experiment/grids.py",
    "experiment/results.py",
    "experiment/run.py",
    "experiment/stepper.py",
)


class Module(NamedTuple):
    """A file, read once."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> list[Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [Module(path, path.read_text(), ast.parse(path.read_text())) for path in files]


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Texts that stand as statements, which is what docstrings are."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def documentation(module: Module) -> set[int]:
    """The lines of docstrings and comments."""
    lines: set[int] = set()
    for node in docstrings(module.tree):
        lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            lines.add(token.start[0])
    return lines


def code(module: Module) -> set[int]:
    """The lines that hold code."""
    text: set[int] = set()
    for node in docstrings(module.tree):
        text.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in LAYOUT and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - text


def nodes(module: Module) -> int:
    inside = sum(len(list(ast.walk(node))) for node in docstrings(module.tree))
    return len(list(ast.walk(module.tree))) - inside


def packed(module: Module) -> int:
    """Assignments of several values at once: `a, b = x, y`."""
    count = 0
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            count += any(isinstance(target, ast.Tuple) for target in node.targets)
    return count


def nested(module: Module) -> int:
    """Comprehensions with a second loop, or with another comprehension inside."""
    count = 0
    for node in ast.walk(module.tree):
        if isinstance(node, COMPREHENSION):
            inner = [one for one in ast.walk(node) if isinstance(one, COMPREHENSION)]
            count += len(inner) > 1 or len(node.generators) > 1
    return count


def functions(module: Module) -> dict[str, int]:
    """Lines of code of every function, without its docstring, by where it stands."""
    held = code(module)
    found = {}
    for node in ast.walk(module.tree):
        if isinstance(node, FUNCTION):
            lines = sum(node.lineno <= line <= (node.end_lineno or 0) for line in held)
            found[f"{module.path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    return found


def _at_import(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """Import statements that run with the module: at its top, or in a `try` there."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from _at_import(node.body)


def imports(module: Module, known: set[str]) -> set[str]:
    """The modules of the package that a module loads when it is imported."""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in _at_import(module.tree.body):
        if not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
        parent = ".".join(part for part in base if part)
        for alias in node.names:
            inner = f"{parent}.{alias.name}"
            found.add(inner if inner in known else parent)
    return found - {module.name}


def chain(all_modules: list[Module]) -> list[str]:
    """The longest chain of modules of which each imports the next."""
    known = {module.name for module in all_modules}
    below = {module.name: imports(module, known) for module in all_modules}

    @cache
    def longest(name: str) -> tuple[str, ...]:
        return (name, *max(map(longest, below[name]), key=len, default=()))

    return list(max(map(longest, below), key=len))


def share(some: list[Module]) -> float:
    """Lines that hold documentation alone, to a line of code."""
    return sum(len(documentation(m) - code(m)) for m in some) / sum(len(code(m)) for m in some)


def figures() -> dict[str, str]:
    every = modules()
    lines = sum(len(code(module)) for module in every)
    lengths = [length for module in every for length in functions(module).values()]
    folders = Counter(module.path.parent for module in every)
    called = [m for m in every if str(m.path.relative_to(PACKAGE)).startswith(USERS)]
    long = sum(len(line) > WIDTH for module in every for line in module.text.splitlines())
    return {
        "most files in one folder": f"{max(folders.values())}",
        "longest chain of imports": f"{len(chain(every))}",
        "documentation ÷ code": f"{share(every):.2f}, on what users call {share(called):.2f}",
        "syntax nodes per line of code": f"{sum(map(nodes, every)) / lines:.1f}",
        "several assignments in one, per 1000": f"{1000 * sum(map(packed, every)) / lines:.1f}",
        "nested comprehensions, per 1000": f"{1000 * sum(map(nested, every)) / lines:.1f}",
        "lines beyond 100 columns": f"{long}",
        "median / longest function": f"{statistics.median(lengths):g} / {max(lengths)}",
        "words in the README": f"{len((ROOT / 'README.md').read_text().split())}",
        "lines of code": f"{lines}",
    }


def rooms() -> dict[str, str]:
    """The densest files, for who wants to know where to begin."""
    found = {}
    for module in modules():
        lines = len(code(module)) or 1
        told = f"{nodes(module) / lines:5.1f} nodes a line, {packed(module):2} packed"
        told += f", {nested(module):2} nested, {len(documentation(module)) / lines:.2f} documented"
        found[str(module.path.relative_to(PACKAGE))] = told
    return found


if __name__ == "__main__":
    table = rooms() if "--rooms" in sys.argv else figures()
    for name, value in table.items():
        print(f"{name:38} {value}")
