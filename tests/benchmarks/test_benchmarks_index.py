"""The table in docs/notes/benchmarks.md: each script and each result is in it, and what it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "notes" / "benchmarks.md"
RUNNER = "benchmarks.runner"
"""The process of a measurement: nobody starts it by hand."""


def rows() -> list[list[str]]:
    """The cells of the table: question, script, results, pages."""
    section = PAGE.read_text().split("## Which script answers what")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


ROWS = rows()


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


SCRIPTS = {
    module(path): path
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if '\nif __name__ == "__main__":' in path.read_text() and module(path) != RUNNER
}


def test_the_table_names_each_script_and_no_other() -> None:
    named = {cells[1].strip("`") for cells in ROWS}
    assert named == SCRIPTS.keys()


def test_the_table_names_each_result_once() -> None:
    linked = [name for cells in ROWS for name in re.findall(r"benchmarks/results/([\w.-]+)", cells[2])]
    assert sorted(linked) == sorted(path.name for path in (BENCHMARKS / "results").iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_asks_its_question_and_shows_its_text_for_help(script: str) -> None:
    tree = ast.parse(SCRIPTS[script].read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert ast.get_docstring(tree)
    assert names & {"command", "ArgumentParser"}


def test_results_and_pages_exist() -> None:
    for cells in ROWS:
        for target in re.findall(r"\]\(([^)#]+)", " ".join(cells)):
            assert (PAGE.parent / target).exists(), target
