"""Names and constructors: a class name stands for one thing, and long argument lists are read by name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from source_kit import MODULES, classes_in, docstrings, facts

MOST_POSITIONAL = 4
AS_TORCH_HAS_THEM = {"dataflow/loader.py:DataLoader"}
"""Constructors whose arguments may come in the order that PyTorch's users know."""
NO_SUBJECTS = {
    *("As", "From", "How", "Of", "So", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who"),
}
ERRORS = {"Exception", "ValueError", "RuntimeError", "OSError", "TypeError", "NamedTuple"}


def test_no_two_classes_have_one_name() -> None:
    names = Counter(each.name for module in MODULES for each in facts(module).classes)
    assert [name for name, count in names.items() if count > 1] == []


def test_constructors_of_more_than_four_arguments_take_them_by_keyword() -> None:
    assert [
        f"{module}:{each.name}"
        for module in MODULES
        for each in facts(module).classes
        if each.num_positional > MOST_POSITIONAL
        and not any(base in ERRORS or base.endswith("Error") for base in each.bases)
        and f"{module}:{each.name}" not in AS_TORCH_HAS_THEM
    ] == []


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
    assert [each.num_positional for each in classes_in(ast.parse(source).body)] == [2, 1, 0, 1]


def test_no_folder_of_tests_has_more_than_twenty_files() -> None:
    counted = Counter(path.parent for path in Path(__file__).parent.rglob("*.py"))
    assert {str(folder): count for folder, count in counted.items() if count > 20} == {}


def test_docstrings_are_no_fragments() -> None:
    """They say "Return whether ...", "The number of ...": nobody has to guess what "Of both." is about."""
    texts = [(module, *each) for module in MODULES for each in facts(module).docstrings]
    assert len(texts) > 4000
    fragments = [f"{m}:{line}" for m, line, text in texts if {text.split()[0].rstrip(",.:")} & NO_SUBJECTS]
    assert fragments == []


def test_docstrings_of_all_kinds_are_found() -> None:
    source = (
        '"""M."""\nx = 1\n"""A."""\nclass C:\n    """C."""\n    y: int\n    """B."""\n    def f(self): "F."\n'
    )
    assert [text for _, text in docstrings(ast.walk(ast.parse(source)))] == ["M.", "A.", "C.", "B.", "F."]


def test_fixtures_hold_no_path_of_the_machine_that_wrote_them() -> None:
    """A temporary folder tells of nobody: tables of Iceberg name the one that they were made in."""
    here = Path(__file__).parent
    sign = re.compile(rb"/(?:home|root|Users|work)/\w|" + re.escape(str(here.parent)).encode())
    files = [path for path in (here / "fixtures").rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) > 50
    assert [str(path) for path in files if sign.search(path.read_bytes())] == []


def test_no_test_lies_beside_a_folder_that_is_called_as_a_package_of_others() -> None:
    """Its folder would be searched for modules: `import datasets` would find `tests/dataflow/datasets`."""
    assert [*(Path(__file__).parent / "dataflow").glob("*.py")] == []
