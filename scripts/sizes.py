"""How large files, classes and functions of the product are, as a table: the tails show where it gets hard to read.

    python scripts/sizes.py          the table, with the names behind the largest figures

tests/pure/test_sizes.py holds the limits.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("raycache", "actors", "launch")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sizes:
    """What is measured of some files, by the name of what it belongs to."""

    file_lines: dict[str, int]
    function_lines: dict[str, int]
    complexity: dict[str, int]
    parameters: dict[str, int]
    methods: dict[str, int]
    comment_share: float
    docstring_share: float
    mutual_imports: list[tuple[str, str]]


def measure(root: Path = ROOT) -> Sizes:
    """Measure the product below a checkout. Names are `path` and `path::Class.function`, paths relative to `root`."""
    files: dict[str, int] = {}
    lines, complexity, parameters, methods = ({} for _ in range(4))
    num_comments = num_docstring_lines = 0
    imports: set[tuple[str, str]] = set()
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        tree = ast.parse(text)
        files[name] = len(text.splitlines())
        num_comments += sum(
            token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
        num_docstring_lines += sum(map(_docstring_lines, ast.walk(tree)))
        imports |= {(_folder(path, root), _folder(each, root)) for each in _imported(tree, root)}
        for inner, node in _definitions(tree):
            where = f"{name}::{inner}"
            if isinstance(node, ast.ClassDef):
                methods[where] = sum(isinstance(each, Function) for each in node.body)
                continue
            lines[where] = (node.end_lineno or 0) - node.lineno + 1
            complexity[where] = 1 + _num_decisions(node)
            if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                parameters[where] = _num_parameters(node)
    total = sum(files.values())
    mutual = sorted((a, b) for a, b in imports if a < b and (b, a) in imports)
    return Sizes(
        files, lines, complexity, parameters, methods, num_comments / total, num_docstring_lines / total, mutual
    )


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
            inner = f"{prefix}{node.name}."
        yield from _definitions(node, inner)


def _num_parameters(function: Function) -> int:
    """All but self and cls."""
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def _num_decisions(function: Function) -> int:
    """Ways out of straight line execution, those inside expressions among them, which ruff's C901 does not count."""
    decisions = (
        ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case | ast.IfExp | ast.comprehension
    )
    nodes = list(ast.walk(function))
    joined = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return joined + sum(isinstance(node, decisions) for node in nodes)


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | Function) or ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1


def _imported(tree: ast.AST, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [f"{module}.{alias.name}" for alias in node.names]
            case _:
                continue
        for module in modules:
            if module.partition(".")[0] in PACKAGES:
                path = root / module.replace(".", "/")
                while not path.is_dir() and not path.with_suffix(".py").is_file():
                    path = path.parent
                yield path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _folder(path: Path, root: Path) -> str:
    """Where a file lies; a file beside a package's folders stands for itself."""
    inside = path.relative_to(root)
    return str(inside if len(inside.parts) == 2 else inside.parent)


def table(sizes: Sizes) -> str:
    """Median, 95th percentile and maximum of each figure, and where the maximum is."""
    named = {
        "lines per file": sizes.file_lines,
        "lines per function": sizes.function_lines,
        "complexity": sizes.complexity,
        "parameters": sizes.parameters,
        "methods per class": sizes.methods,
    }
    rows = [f"{'':20}{'median':>8}{'p95':>6}{'max':>6}"]
    for title, figures in named.items():
        values = sorted(figures.values())
        largest = max(figures, key=lambda name: figures[name])
        p95 = values[int(0.95 * (len(values) - 1))]
        rows.append(f"{title:20}{statistics.median(values):8.0f}{p95:6}{values[-1]:6}  {largest}")
    total = sum(sizes.file_lines.values())
    rows.append(f"{total} lines, {sizes.comment_share:.1%} comments, {sizes.docstring_share:.1%} docstrings")
    pairs = "; ".join(f"{a} and {b}" for a, b in sizes.mutual_imports)
    rows.append(f"folders that import each other both ways: {len(sizes.mutual_imports)}" + (pairs and f" ({pairs})"))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(measure()))
