"""Rules that hold over all source files: who imports whom, and what never appears."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from datasets_kit import Make
from source_kit import MODULES, ROOT, facts, imports_in

import dataflow

MAY_IMPORT = {
    "sharding": set[str](),
    "prefetch": {"sharding"},
    "dataflow": {"sharding", "prefetch"},
}
NEVER_IN_SHARDING = {
    "torch",
    "threading",
    "time",
    "queue",
    "concurrent",
    "multiprocessing",
    "asyncio",
    "random",
}


def imported_modules(module: Path) -> tuple[str, ...]:
    return facts(module).imported


def imported_packages(module: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_modules(module)}


def modules_of(*packages: str) -> list[Path]:
    return [module for module in MODULES if module.parts[0] in packages]


def every(modules: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test over many modules: a test each would be thousands."""

    def wrapped(test: Callable[[Path], None]) -> Callable[[], None]:
        def run() -> None:
            for module in modules:
                try:
                    test(module)
                except AssertionError as error:
                    error.add_note(str(module))
                    raise

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return wrapped


def test_all_three_packages_are_looked_at() -> None:
    assert {module.parts[0] for module in MODULES} == MAY_IMPORT.keys()
    assert len(MODULES) > 30


@every(MODULES)
def test_imports_point_one_way(module: Path) -> None:
    package = module.parts[0]
    ours = imported_packages(module) & MAY_IMPORT.keys() - {package}
    assert ours <= MAY_IMPORT[package]


@every(MODULES)
def test_no_package_imports_tests_or_benchmarks(module: Path) -> None:
    assert not imported_packages(module) & {"tests", "benchmarks", "conftest"}


@every(modules_of("sharding"))
def test_sharding_knows_no_torch_threads_or_clocks(module: Path) -> None:
    allowed = {"threading"} if module == Path("sharding/cached_property.py") else set()  # used by threads
    assert not (imported_packages(module) & NEVER_IN_SHARDING) - allowed


TORCH_IN_PREFETCH = {
    "prefetch/memory/device.py",
    *(f"prefetch/ipc/{name}.py" for name in ("batch_writer", "generators", "payload", "pipe", "server")),
}
"""Where batches are copied to a device, and where tensors get from one process to another."""


@every(modules_of("prefetch"))
def test_prefetch_imports_torch_only_where_tensors_leave_this_process(module: Path) -> None:
    assert ("torch" in imported_packages(module)) == (str(module) in TORCH_IN_PREFETCH)


@every(modules_of("dataflow"))
def test_dataflow_has_no_threads_but_executors_owned_by_a_with_block(module: Path) -> None:
    assert not facts(module).called & {"Thread", "Timer", "start_new_thread"}
    made, owned = facts(module).executors
    assert made == owned


@every(MODULES)
def test_every_module_says_what_it_is_about(module: Path) -> None:
    text = facts(module).docstring
    assert text
    assert text[0].isupper() or text[0] == "`"
    assert len(text) > 20


@every(MODULES)
def test_nothing_sleeps(module: Path) -> None:
    assert "sleep" not in facts(module).called


@every(MODULES)
def test_nothing_relies_on_del(module: Path) -> None:
    """Finalisers are `weakref.finalize` with an owner; `__del__` runs when it pleases."""
    assert "__del__" not in facts(module).functions


@every(MODULES)
def test_no_python_code_runs_where_a_member_of_a_set_dies(module: Path) -> None:
    """As in `weakref.WeakSet`, which swallows a Ctrl-C there: `prefetch.weak_registry` has none."""
    assert "WeakSet" not in facts(module).names


@every(MODULES)
def test_no_python_code_runs_where_the_object_of_a_thread_dies(module: Path) -> None:
    """As it does for those of `threading.Thread` itself: `HiddenThread` has none."""
    assert "Thread" not in facts(module).called


@every(MODULES)
def test_no_value_is_cached_under_a_lock_for_all_objects(module: Path) -> None:
    """As by `functools.cached_property` up to Python 3.11: `sharding.cached_property` has none."""
    assert "functools.cached_property" not in set(imported_modules(module))


@every(MODULES)
def test_no_module_is_a_drawer_for_leftovers(module: Path) -> None:
    assert not set(module.with_suffix("").parts) & {"utils", "util", "common", "helpers", "misc", "base"}


@every(MODULES)
def test_no_import_of_a_module_takes_all_its_names(module: Path) -> None:
    assert not [name for name in imported_modules(module) if name.endswith(".*")]


def test_the_front_door_is_small_and_sorted() -> None:
    names = dataflow.__all__
    assert names == sorted(names)
    assert len(names) <= 15
    assert len(set(names)) == len(names)
    assert all(hasattr(dataflow, name) for name in names)


@pytest.mark.parametrize("package", ["prefetch", "sharding"])
def test_the_inner_packages_have_no_front_door(package: str) -> None:
    """Their modules are imported one by one, so that what is not used is not loaded."""
    assert imported_modules(Path(package) / "__init__.py") == ()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from torch import nn", {"torch", "torch.nn"}),
        ("def f():\n    import time", {"time"}),
        ("from . import blocks", {"sharding.formats", "sharding.formats.blocks"}),
        ("from ..urls import x", {"sharding.urls", "sharding.urls.x"}),
        ("from a import *", {"a", "a.*"}),
    ],
)
def test_imports_are_found_in_any_form(source: str, expected: set[str]) -> None:
    assert set(imports_in(ast.walk(ast.parse(source)), ("sharding", "formats"))) == expected


def test_the_front_door_has_all_its_names_and_imports_them_when_they_are_used() -> None:
    names = {name for name in dir(dataflow) if name[0].isupper()} - {"Any", "TYPE_CHECKING"}
    assert set(dataflow.__all__) < names
    assert len(dataflow.__all__) <= 16
    for name in names:
        assert getattr(dataflow, name).__name__ == name
    assert "__version__" in dir(dataflow)
    assert dataflow.__version__ == version("dataflow-loader")
    with pytest.raises(AttributeError, match="no_such_name"):
        dataflow.no_such_name  # noqa: B018


def test_another_system_than_linux_is_refused_when_the_library_is_imported() -> None:
    script = "import sys; sys.platform = 'darwin'; import dataflow"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.stderr.endswith("ImportError: dataflow runs on Linux only, and this is darwin\n")


def test_nobody_asks_for_what_is_slow_to_import_up_to_the_first_batch(made: Make) -> None:
    """pyarrow imports pandas, where it is installed, in `pyarrow.dataset`, `pa.array` and `to_numpy`: 0.3 s;
    numpy its `ma` in `unique` of values alone: 8 ms. What only shards need takes 0.3 s, too."""
    catalogs = []
    for name in ("tar", "parquet", "tokens.bin", "jsonl"):
        made(name).open()  # makes the catalog
        catalogs.append(made(name).kwargs["catalog"])
    script = """
import sys
class Asked:
    def find_spec(self, name, *_):
        if name in ("pandas", "numpy.ma"):
            raise SystemExit(f"{name} was asked for")
sys.meta_path.insert(0, Asked())
import dataflow.workers.process_main
from dataflow import DataLoader
DataLoader([1])
assert not {"pyarrow", "fsspec"} & {*sys.modules}
from dataflow import ShardedDataset
for catalog in sys.argv[1:]:
    print(catalog, flush=True)
    with DataLoader(ShardedDataset(catalog), 3, shuffle=True) as loader:
        next(iter(loader))
"""
    asked = [sys.executable, "-c", script, *catalogs]
    done = subprocess.run(asked, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
