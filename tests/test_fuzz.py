"""The short form of the runs in tests/fuzz: damaged inputs, Ctrl-C and kills at random moments."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).parent / "fuzz"


@pytest.mark.full  # tests/sharding/formats/test_conformance.py damages each format
@pytest.mark.parametrize(
    "script",
    [
        "damage.py --mutants 12 --seed 15",
        "ctrl_c.py --rounds 12 --seed 15",
        "kills.py --rounds 12 --seed 15",
        "manifests.py --mutants 500 --seed 15",
        "workers.py --minutes 0.5 --seed 15 --start fork",
        "forks.py ours --only ours --forks 20",
    ],
)
def test_a_short_run_finds_no_defect(script: str) -> None:
    name, *options = script.split()
    command = [sys.executable, str(_FOLDER / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """The script that changes the product."""
    spec = importlib.util.spec_from_file_location("mutants", _FOLDER / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_a_seed_chooses_the_same_mutants_whatever_other_modules_have(
    mutants: ModuleType, tmp_path: Path
) -> None:
    product = _FOLDER.parent.parent
    shutil.copytree(product / "sharding" / "order", tmp_path / "sharding" / "order")
    chosen = mutants.chosen(tmp_path, 1, 10)
    assert len({(mutant.module, mutant.function) for mutant in chosen.values()}) == 10
    assert mutants.chosen(tmp_path, 2, 10) != chosen == mutants.chosen(tmp_path, 1, 10)
    for mutant in chosen.values():
        source = (product / mutant.module).read_bytes()
        assert ast.dump(ast.parse(mutant.of(source))) != ast.dump(ast.parse(source)), mutant
        assert any(mutants.tests_of(product, mutant.module)), mutant
    shutil.copytree(product / "sharding" / "topology", tmp_path / "sharding" / "topology")
    more = mutants.chosen(tmp_path, 1, 1000)
    of_order = [rank for rank, mutant in more.items() if mutant.module.startswith("sharding/order/")]
    assert of_order[:10] == [*chosen]


def test_mutants_that_another_tree_has_are_the_same_in_both(mutants: ModuleType, tmp_path: Path) -> None:
    product, other = _FOLDER.parent.parent, tmp_path / "sharding" / "order"
    shutil.copytree(product / "sharding" / "order", other)
    (other / "lanes.py").unlink()
    path = other / "order.py"
    path.write_text(f"# moved by a line\n{path.read_text('utf-8')}", "utf-8")
    here, there = mutants.chosen(product, 1, 1000, tmp_path), mutants.ranked(tmp_path, 1)
    assert {mutant.module for mutant in here.values()} == {mutant.module for mutant in there.values()}
    for rank, mutant in here.items():
        assert (mutant.module, mutant.text) == (there[rank].module, there[rank].text)


def test_results_are_of_many_modules_and_of_nothing_that_a_machine_is_called_by() -> None:
    text = (_FOLDER / "mutants.json").read_text("utf-8")
    results = json.loads(text)["mutants"]
    assert len({result["module"] for result in results}) >= 60
    assert {result["outcome"] for result in results} <= {"killed", "timeout", "survived", "not judged"}
    assert all("note" in result for result in results if result["outcome"] == "survived")
    assert not re.search(r"/(tmp|root|home|work)/", text)


def test_mutants_are_of_what_is_done_and_not_of_what_is_said(mutants: ModuleType) -> None:
    source = b"""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    x = 1
__all__ = ["a"] + []
@decorated(1)
def f(a: Literal[2], b=3, *, stacklevel=2) -> Literal[4]:
    assert a == 1
    if not a or b > 1:
        warn(f"{a + b}" + 1, stacklevel=5)
        raise ValueError("1" + str(1))
    return g(a - b, True, stacklevel=3)
class C:
    d: Literal[1] = 0
"""
    assert [(each.function, each.what) for each in mutants.candidates("m.py", source)] == [
        ("f", "3 -> 4"),
        ("f", "not a or b > 1 -> not a and b > 1"),
        ("f", "not a -> a"),
        ("f", "b > 1 -> b >= 1"),
        ("f", "1 -> 2"),
        ("f", "a - b -> a + b"),
        ("f", "True -> False"),
        ("C", "0 -> 1"),
    ]
