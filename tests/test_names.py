"""Names and constructors: a class name stands for one thing, and long argument lists are read by name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import MODULES, parsed

MOST_POSITIONAL = 4
AS_TORCH_HAS_THEM = {"dataflow/loader.py:DataLoader"}
"""Constructors whose arguments may come in the order that PyTorch's users know."""
NO_SUBJECTS = {
    *("As", "From", "How", "Of", "So", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who"),
}
ERRORS = {"Exception", "ValueError", "RuntimeError", "OSError", "TypeError", "NamedTuple"}


Classes = list[tuple[Path, ast.ClassDef]]


@pytest.fixture(scope="module")
def classes() -> Classes:
    """Every class of the product, with its module."""
    nodes = ((module, node) for module in MODULES for node in ast.walk(parsed(module)))
    return [(module, node) for module, node in nodes if isinstance(node, ast.ClassDef)]


def exempt(module: Path, node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    errors = any(base in ERRORS or base.endswith("Error") for base in bases)
    return errors or f"{module}:{node.name}" in AS_TORCH_HAS_THEM


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


def test_no_two_classes_have_one_name(classes: Classes) -> None:
    names = Counter(node.name for _, node in classes)
    places = [f"{module}: {node.name}" for module, node in classes if names[node.name] > 1]
    assert sorted(places) == []


def test_constructors_of_more_than_four_arguments_take_them_by_keyword(classes: Classes) -> None:
    long = [(module, node) for module, node in classes if num_positional(node) > MOST_POSITIONAL]
    assert [f"{module}: {node.name}" for module, node in long if not exempt(module, node)] == []


def test_positional_arguments_are_counted() -> None:
    source = """
class Own:
    def __init__(self, a, b, *, c): ...
@dataclass(frozen=True)
class Made:
    a: int
    b: int = field(init=False)
    c: ClassVar[int] = 0
@dataclass(kw_only=True)
class ByName:
    a: int
@dataclass
class FromHere:
    a: int
    _: KW_ONLY
    b: int = 0
"""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert list(map(num_positional, nodes)) == [2, 1, 0, 1]


def test_no_folder_of_tests_has_more_than_twenty_files() -> None:
    counted = Counter(path.parent for path in Path(__file__).parent.rglob("*.py"))
    assert {str(folder): count for folder, count in counted.items() if count > 20} == {}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring in a module, those below attributes included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, part in zip([None, *node.body], node.body, strict=False):
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if is_text and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield part.lineno, str(part.value.value)


def test_docstrings_are_no_fragments() -> None:
    """They say "Return whether ...", "The number of ...": nobody has to guess what "Of both." is about."""
    texts = [(module, *one) for module in MODULES for one in docstrings(parsed(module))]
    assert len(texts) > 4000
    fragments = [f"{m}:{line}" for m, line, text in texts if {text.split()[0].rstrip(",.:")} & NO_SUBJECTS]
    assert fragments == []


def test_docstrings_of_all_kinds_are_found() -> None:
    source = (
        '"""M."""\nx = 1\n"""A."""\nclass C:\n    """C."""\n    y: int\n    """B."""\n    def f(self): "F."\n'
    )
    assert [text for _, text in docstrings(ast.parse(source))] == ["M.", "A.", "C.", "B.", "F."]


def test_fixtures_hold_no_path_of_the_machine_that_wrote_them() -> None:
    """A temporary folder tells of nobody: tables of Iceberg name the one that they were made in."""
    here = Path(__file__).parent
    sign = re.compile(rb"/(?:home|root|Users|work)/\w|" + re.escape(str(here.parent)).encode())
    files = [path for path in (here / "fixtures").rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) > 50
    assert [str(path) for path in files if sign.search(path.read_bytes())] == []
