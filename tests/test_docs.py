"""The documents can be read: short pages, short sentences, and programs that are files of `examples/`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INCLUDE = runpy.run_path(str(ROOT / "docs" / "include.py"))
PAGES: list[Path] = INCLUDE["pages"]()
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
MOST_WORDS = {"README.md": 900, "CHANGELOG.md": 700, "docs/architecture.md": 2000}
MOST_IN_A_GUIDE, MOST_IN_ALL = 1500, 59_300


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose: without code blocks, tables, headings, links; code counts as a word."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "code", text))
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    found = [one for part in paragraphs for one in re.split(r"(?<=[.!?])[)*\"]*\s+", part)]
    return [one for one in found if re.search(r"\w", one)]


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


LIMITED = [page for page in PAGES if page in GUIDES or named(page) in MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_programs_on_a_page_are_those_in_examples(page: Path) -> None:
    text = page.read_text("utf-8")
    assert INCLUDE["filled"](text) == text, "run `python docs/include.py`"


@pytest.mark.parametrize("page", LIMITED, ids=named)
def test_a_page_is_no_longer_than_it_may_be(page: Path) -> None:
    assert len(page.read_text("utf-8").split()) <= MOST_WORDS.get(named(page), MOST_IN_A_GUIDE)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page.read_text("utf-8"))
    assert [one for one in found if words(one) > 40] == []
    assert sum(map(words, found)) / len(found) <= 18


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_a_guide_begins_with_a_program_of_examples(page: Path) -> None:
    first = page.read_text("utf-8").partition("```")[0]
    assert re.search(r"<!-- include examples/\w+\.py(#\w+)? -->\n$", first), (
        "a guide shows a whole program first"
    )


PUBLIC = {
    "dataflow",
    "dataflow.engines",
    "dataflow.grad.strategies",
    "dataflow.integrations.accelerate",
    "dataflow.integrations.torchtitan",
    "dataflow.integrations.opentelemetry",
    "dataflow.integrations.transformers",
    "dataflow.testing",
    "dataflow.topology_exchange",
}
"""Modules that pages and examples import; docs/reference/names.md has them."""


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=named)
def test_pages_and_examples_import_what_is_public(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    found = re.findall(r"^\s*(?:from|import) ((?:dataflow|prefetch|sharding)[\w.]*)", text, re.MULTILINE)
    assert set(found) <= PUBLIC


def test_all_documents_together_can_be_read_in_a_day() -> None:

    assert sum(len(page.read_text("utf-8").split()) for page in PAGES) <= MOST_IN_ALL
