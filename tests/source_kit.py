"""What the rules about source files ask: every module of the packages is parsed once in a process."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("sharding", "prefetch", "dataflow")
MODULES = [path.relative_to(ROOT) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
"""Every module of the packages, as "package/.../name.py"."""
WAITS = {"wait", "join", "acquire", "result", "get", "recv", "recv_bytes", "exception", "wait_for_fork"}
"""Methods that wait without an end where they are given no time."""


class ClassFacts(NamedTuple):
    """A class of a module."""

    name: str
    bases: frozenset[str]
    """Last parts of their names."""
    num_positional: int


class Facts(NamedTuple):
    """What the rules ask about a module; its tree is let go, for all trees are 300,000 objects."""

    docstring: str
    imported: tuple[str, ...]
    """Full names, inside functions and type-checking blocks too."""
    called: frozenset[str]
    executors: tuple[list[str], list[str]]
    """Pools that are made, and those that a `with` block or an `ExitStack` owns."""
    functions: frozenset[str]
    names: frozenset[str]
    classes: list[ClassFacts]
    docstrings: list[tuple[int, str]]
    """With their lines; those below attributes too."""
    waits: list[tuple[str, int]]
    """Functions that wait without a deadline, and the lines where they do."""
    texts: list[str]
    """String constants, those inside f-strings included."""


@cache
def facts(module: Path) -> Facts:
    """Those of a module."""
    tree = ast.parse((ROOT / module).read_text("utf-8"), str(module))
    nodes = [*ast.walk(tree)]
    called = [name_of(node) for node in nodes if isinstance(node, ast.Call)]
    owned = [
        name_of(item.context_expr) for node in nodes if isinstance(node, ast.With) for item in node.items
    ]
    owned += [
        name_of(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and name_of(node) == "enter_context"
    ]
    made, in_with = ([name for name in names if name.endswith("PoolExecutor")] for names in (called, owned))
    return Facts(
        ast.get_docstring(tree) or "",
        tuple(imports_in(nodes, module.parent.parts)),
        frozenset(called),
        (made, in_with),
        frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef)),
        frozenset(getattr(node, "attr", getattr(node, "id", "")) for node in nodes),
        classes_in(nodes),
        [*docstrings(nodes)],
        [*waits_of(tree, ".".join(module.with_suffix("").parts))],
        [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)],
    )


def imports_in(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[str]:
    """Full names of what a module in a package imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*above, *filter(None, [node.module])))
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def name_of(node: ast.expr) -> str:
    """Last part of the name of what is called, else ""."""
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def classes_in(nodes: Iterable[ast.AST]) -> list[ClassFacts]:
    """The classes of a module."""
    return [
        ClassFacts(
            node.name,
            frozenset(ast.unparse(base).rpartition(".")[2] for base in node.bases),
            num_positional(node),
        )
        for node in nodes
        if isinstance(node, ast.ClassDef)
    ]


def num_positional(node: ast.ClassDef) -> int:
    """How many arguments a constructor takes by position, its own or the one that `dataclass` makes."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return len(part.args.posonlyargs) + len(part.args.args) - 1
    made = [text for text in map(ast.unparse, node.decorator_list) if text.startswith("dataclass")]
    if not made or "kw_only=True" in made[0]:
        return 0
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    marks = (at for at, field in enumerate(fields) if ast.unparse(field.annotation).endswith("KW_ONLY"))
    fields = fields[: next(marks, None)]
    return sum(not ast.unparse(f.annotation).startswith("ClassVar") and not by_name(f) for f in fields)


def by_name(field: ast.AnnAssign) -> bool:
    text = "" if field.value is None else ast.unparse(field.value)
    return "init=False" in text or "kw_only=True" in text


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring in a module, those below attributes included."""
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, part in zip([None, *node.body], node.body, strict=False):
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if is_text and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield part.lineno, str(part.value.value)


def waits_of(tree: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """The functions of a module that wait without a deadline, and the lines where they do."""
    for node in ast.iter_child_nodes(tree):
        inner = f"{name}.{node.name}" if isinstance(node, ast.ClassDef | ast.FunctionDef) else name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _waits_for_ever(node):
            yield name, node.lineno
        yield from waits_of(node, inner)


def _waits_for_ever(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_none = [isinstance(value, ast.Constant) and value.value is None for value in given]
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "waitpid":
        return isinstance(given[-1], ast.Constant) and given[-1].value == 0
    return call.func.attr in WAITS and all(is_none)
