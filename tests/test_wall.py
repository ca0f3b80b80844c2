"""The core imports nothing outside of it, has few lines, and the docs say what is where."""

from __future__ import annotations

import pytest
from source_kit import MODULES, ROOT, facts
from wall import OPENED_BY, OUTSIDE, VALUES, core_lines, core_tests, is_in, is_outside, module_of, seams

from dataflow import _MODULES as PUBLIC

MOST_CORE_LINES = 49_953
"""The lines of the core in Python, as `wc -l` counts them."""
TABLES = {
    "dataflow",  # public names
    "dataflow.dataset",  # a view without some samples
    "dataflow.loader",  # whether observers are installed
    "dataflow.planning.settings",  # steps that are passed over
    "dataflow.outputs.resolve",  # `decode="image"`
    "dataflow.progress.observer",
    "dataflow.sources.indexing",  # shards that an executor looks at
    "dataflow.sources.listing.claims",
    "dataflow.stream.decisions",
    "sharding.formats",
    "sharding.hub.names",
    "sharding.lengths.batching",
}
"""Modules of the core that have a table of entries, as docs/architecture.md lists them."""
VALUE_FOLDERS = {"sharding", "prefetch"}
NAMES = {module_of(path): path for path in MODULES}


def test_no_module_of_the_core_imports_one_outside() -> None:
    crossed = {
        (name, other)
        for name, path in NAMES.items()
        if not is_outside(name)
        for other in facts(path).imported
        if is_outside(other) and not is_in(other, OPENED_BY.get(name, ()))
    }
    assert crossed == set(), "name it in a table of entries, as those of docs/architecture.md"


def test_tables_that_name_what_is_outside_are_the_seams() -> None:
    tables = {
        name
        for name, path in NAMES.items()
        if not is_outside(name) and any(is_outside(text.partition(":")[0]) for text in facts(path).texts)
    }
    assert tables == TABLES


@pytest.mark.parametrize("opener", OPENED_BY)
def test_who_may_import_what_is_outside_does(opener: str) -> None:
    assert any(is_in(other, OPENED_BY[opener]) for other in facts(NAMES[opener]).imported)


def test_what_is_outside_is_there() -> None:
    for modules in OUTSIDE.values():
        assert set(modules) <= NAMES.keys()


def _used_by(outside: str) -> set[str]:
    """Modules of the core that a module outside imports from, but for public names and values."""
    imported = facts(NAMES[outside]).imported
    homes = {name: name if name in NAMES else name.rpartition(".")[0] for name in imported}
    names = [name for name in imported if not any(other.startswith(f"{name}.") for other in imported)]
    used = {homes[name] for name in names if PUBLIC.get(name.rpartition(".")[2]) != homes[name]}
    values = {name for name in used if name in VALUES or NAMES.get(name, ROOT).parent.name in VALUE_FOLDERS}
    return {name for name in used - values if name in NAMES and not is_outside(name)}


def test_packages_outside_use_public_names_and_seams_alone() -> None:
    of_seams = set().union(*seams().values())
    used = {name: _used_by(name) for name in NAMES if is_outside(name)}
    beyond = {name: modules - of_seams for name, modules in used.items() if modules - of_seams}
    assert beyond == {}, "take a public name, or a seam of docs/architecture.md"
    assert of_seams == set().union(*used.values()), "a module of a seam that nobody uses any more"


def test_the_core_keeps_to_its_budget_of_lines() -> None:
    assert core_lines() <= MOST_CORE_LINES, "what a new capability needs lies outside: see tests/wall.py"


def test_the_docs_have_all_that_is_outside() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("<!-- outside -->")[2]
    lines = text.partition("```text\n")[2].partition("```")[0].splitlines()
    listed = {name: modules.split() for name, _, modules in (line.partition(":") for line in lines)}
    assert listed == {
        name: [module.replace(".", "/") for module in modules] for name, modules in OUTSIDE.items()
    }


def test_tests_of_the_core_are_many() -> None:
    assert len(core_tests()) > 100
