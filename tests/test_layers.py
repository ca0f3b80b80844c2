"""Packages and their layers: who may import whom, that nobody imports in a circle, and how large they may be.

A package is a folder; at the front door (`dataflow/*.py`) each module counts as one. Everybody may use the
values in `sharding/*.py`, and within `prefetch` and `dataflow` those in `prefetch/*.py`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from test_architecture import MODULES, ROOT, imported_modules
from wall import is_outside

LEAVES = {
    *("dataflow.limits", "dataflow.ragged", "dataflow.stats", "dataflow.tables", "dataflow.torch_threads"),
}
"""Of the front door: values that packages behind it share."""
DATASETS = {"dataflow.dataset", "dataflow.mixture"}
ORDERS = {"sharding.order", "sharding.plan", "sharding.mixture", "sharding.lengths", "sharding.topology"}
MAY_USE: dict[str, set[str]] = {
    # sharding: values
    "sharding": set(),
    "sharding.core": set(),
    "sharding.formats": {
        "sharding.formats.arrow",
        "sharding.formats.tar",
    },
    "sharding.formats.arrow": {"sharding.core"},
    "sharding.formats.records": {"sharding.core", "sharding.formats"},
    "sharding.formats.streaming": {"sharding.formats", "sharding.formats.arrow"},
    "sharding.formats.tables": {"sharding.formats.arrow"},
    "sharding.formats.tar": set(),
    "sharding.hub": {"sharding.formats", "sharding.write"},
    "sharding.catalog": {
        "sharding.formats",
        "sharding.formats.arrow",
        "sharding.hub",
        "sharding.write",
    },
    "sharding.order": set(),
    "sharding.plan": {"sharding.order", "sharding.catalog", "sharding.topology"},
    "sharding.mixture": {"sharding.order", "sharding.plan"},
    "sharding.lengths": {"sharding.order", "sharding.plan", "sharding.catalog", "sharding.write"},
    "sharding.topology": set(),
    "sharding.write": {"sharding.formats", "sharding.formats.arrow", "sharding.formats.tar"},
    # prefetch: bytes in motion
    "prefetch": set(),
    "prefetch.core": {"sharding.core"},
    "prefetch.memory": {"prefetch.core", "sharding.catalog"},
    "prefetch.control": {"prefetch.memory"},
    "prefetch.engine": {"prefetch.control", "prefetch.memory"},
    "prefetch.http": {
        "prefetch.control",
        "prefetch.memory",
        "sharding.catalog",
        "sharding.hub",
        "sharding.write",
    },
    "prefetch.store": {"prefetch.control", "prefetch.http", "prefetch.memory", "sharding.catalog"},
    "prefetch.cache": {"prefetch.store", "prefetch.memory", "sharding.hub", "sharding.write"},
    "prefetch.workers": {"prefetch.engine", "prefetch.memory", "sharding.core"},
    "prefetch.ipc": {"prefetch.memory", "prefetch.workers"},
    # dataflow: what a training loop sees
    "dataflow.decode": {"prefetch.core", "sharding.formats"},
    "dataflow.staging": {
        "dataflow.decode",
        "prefetch.core",
        "prefetch.memory",
        "prefetch.store",
        "prefetch.control",
        "sharding.catalog",
        *ORDERS - {"sharding.topology"},
    },
    "dataflow.outputs": {
        "dataflow.decode",
        "dataflow.staging",
        "prefetch.core",
        "prefetch.memory",
        "sharding.formats",
        "sharding.order",
        *LEAVES,
    },
    "dataflow.sources.energon": {
        "dataflow.joins",
        "dataflow.sources.listing",
        "prefetch.store",
        "sharding.catalog",
        "sharding.formats",
        "sharding.hub",
        "sharding.order",
    },
    "dataflow.sources.listing": {
        "prefetch.store",
        "sharding",
        "sharding.catalog",
        "sharding.formats",
        "sharding.hub",
    },
    "dataflow.sources.tables": {
        "dataflow.sources.listing",
        "prefetch.store",
        "sharding.catalog",
        "sharding.formats.arrow",
        "sharding.formats.tables",
        "sharding.hub",
    },
    "dataflow.sources": {
        "dataflow.decode",
        "dataflow.outputs",
        "dataflow.progress",
        "dataflow.ragged",
        "dataflow.sources.listing",
        "dataflow.staging",
        "prefetch.cache",
        "prefetch.memory",
        "prefetch.store",
        "sharding.catalog",
        "sharding.formats",
        "sharding.formats.tables",
        "sharding.formats.arrow",
        "sharding.hub",
        "sharding.write",
        *ORDERS - {"sharding.topology"},
    },
    "dataflow.batch": {
        "dataflow.decode",
        "dataflow.outputs",
        "dataflow.staging",
        "prefetch.core",
        "prefetch.memory",
        *LEAVES,
        *ORDERS - {"sharding.topology", "sharding.mixture"},
    },
    "dataflow.planning": {
        "dataflow.batch",
        "dataflow.decode",
        "dataflow.outputs",
        "dataflow.staging",
        "dataflow.topology_exchange",
        "prefetch.control",
        *DATASETS,
        *LEAVES,
        *ORDERS,
    },
    "dataflow.conversion": {
        "dataflow.batch",
        "dataflow.executors",
        "dataflow.progress",
        "dataflow.sources",
        "dataflow.staging",
        "dataflow.telemetry.status",
        "dataflow.text",
        "prefetch.memory",
        "prefetch.store",
        "sharding.catalog",
        "sharding.formats",
        "sharding.formats.arrow",
        "sharding.formats.streaming",
        "sharding.order",
        "sharding.write",
        "dataflow.dataset",
        *LEAVES,
    },
    "dataflow.stream": {
        "dataflow.batch",
        "dataflow.outputs",
        "dataflow.planning",
        "dataflow.progress",
        "dataflow.staging",
        "dataflow.processes",
        "prefetch.cache",
        "prefetch.control",
        "prefetch.core",
        "prefetch.engine",
        "prefetch.ipc",
        "prefetch.memory",
        "prefetch.store",
        "prefetch.workers",
        "sharding.catalog",
        *DATASETS,
        *LEAVES,
        *ORDERS,
    },
    "dataflow.processes": {
        "dataflow.batch",
        "dataflow.outputs",
        "dataflow.staging",
        "prefetch.core",
        "prefetch.engine",
        "prefetch.ipc",
        "prefetch.memory",
        "prefetch.workers",
        *LEAVES,
    },
    "dataflow.actors": {
        "dataflow.batch",
        "dataflow.executors",
        "dataflow.outputs",
        "dataflow.processes",
        "dataflow.staging",
        "prefetch.engine",
        "prefetch.ipc",
        "prefetch.memory",
        "prefetch.store",
        *DATASETS,
    },
    "dataflow.engines": {"dataflow.executors"},
    "dataflow.executors": {"prefetch.ipc", "prefetch.workers"},
    "dataflow.joins": {
        "dataflow.outputs",
        "dataflow.sources",
        "dataflow.staging",
        "prefetch.memory",
        "sharding.catalog",
        "sharding.formats.arrow",
        "sharding.order",
        "sharding.plan",
    },
    "dataflow.explain": {
        "dataflow.batch",
        "dataflow.joins",
        "dataflow.sources",
        "dataflow.topology_exchange",
        "dataflow.decode",
        "dataflow.loader",
        "dataflow.planning",
        "dataflow.staging",
        "dataflow.state_checksum",
        "dataflow.stream",
        "prefetch.core",
        "sharding.catalog",
        "sharding.core",
        *DATASETS,
        *ORDERS,
    },
    "dataflow.telemetry": {
        "dataflow.progress",
        "dataflow.shard_order",
        "dataflow.telemetry.serving",
        "dataflow.telemetry.status",
        "dataflow.telemetry.timing",
        "dataflow.topology_exchange",
        "prefetch.memory",
        *LEAVES,
    },
    "dataflow.telemetry.serving": {"dataflow.telemetry.status", "dataflow.telemetry.timing", *LEAVES},
    "dataflow.telemetry.status": {
        "dataflow.progress",
        "dataflow.shard_order",
        "prefetch.memory",
        "sharding.hub",
        "sharding.topology",
        *LEAVES,
    },
    "dataflow.telemetry.timing": {
        "dataflow.progress",
        "dataflow.telemetry.status",
        "dataflow.topology_exchange",
        "prefetch.memory",
        *LEAVES,
    },
    "dataflow.workers": {
        "dataflow.progress",
        "prefetch.ipc",
        "prefetch.memory",
        "prefetch.workers",
        *LEAVES,
    },
    "dataflow.text": {"dataflow.batch"},
    "dataflow.vision": {"dataflow.decode", "dataflow.ragged", "dataflow.text", "sharding.core"},
    "dataflow.integrations": {
        "dataflow.batch",
        "dataflow.telemetry.serving",
        "dataflow.telemetry.status",
        "dataflow.dataset",
        "dataflow.loader",
        "dataflow.mixture",
        "dataflow.ragged",
        "dataflow.shard_order",
        "dataflow.text",
        "dataflow.topology_exchange",
        "dataflow.vision",
        "sharding.lengths",
        "sharding.topology",
    },
    "dataflow.progress": {"dataflow.topology_exchange"},
    "dataflow.grad.strategies": {"prefetch.workers", "sharding.topology"},
    "dataflow.grad.adapt": {"dataflow.grad.strategies"},
    "dataflow.grad": {
        "dataflow.grad.adapt",
        "dataflow.grad.strategies",
        "dataflow.telemetry.status",
        "dataflow.telemetry.timing",
        "dataflow.topology_exchange",
        "prefetch.control",
        "sharding.topology",
        *LEAVES,
    },
    "dataflow.testing": set(),
}
TOOLS = "dataflow.tools"

MOST_LINES = {
    "sharding": 1_384,
    "sharding/catalog": 2_225,
    "sharding/core": 2_458,
    "sharding/formats": 1_165,
    "sharding/formats/arrow": 3_519,
    "sharding/formats/records": 1_350,
    "sharding/formats/streaming": 1_664,
    "sharding/formats/tables": 1_096,
    "sharding/formats/tar": 1_327,
    "sharding/hub": 1_057,
    "sharding/lengths": 2_140,
    "sharding/mixture": 1_519,
    "sharding/order": 1_617,
    "sharding/plan": 1_687,
    "sharding/topology": 835,
    "sharding/write": 1_714,
    "prefetch": 777,
    "prefetch/cache": 861,
    "prefetch/control": 1_194,
    "prefetch/core": 638,
    "prefetch/engine": 1_811,
    "prefetch/http": 1_232,
    "prefetch/ipc": 1_127,
    "prefetch/memory": 1_743,
    "prefetch/store": 1_358,
    "prefetch/workers": 1_996,
    "dataflow": 3_131,
    "dataflow/actors": 989,
    "dataflow/batch": 2_712,
    "dataflow/conversion": 2_953,
    "dataflow/decode": 2_248,
    "dataflow/engines": 12,
    "dataflow/executors": 800,
    "dataflow/explain": 2_276,
    "dataflow/grad": 2_917,
    "dataflow/grad/adapt": 504,
    "dataflow/grad/strategies": 1_529,
    "dataflow/joins": 796,
    "dataflow/integrations": 1_145,
    "dataflow/outputs": 2_556,
    "dataflow/planning": 1_443,
    "dataflow/processes": 1_810,
    "dataflow/progress": 207,
    "dataflow/sources": 2_499,
    "dataflow/sources/energon": 551,
    "dataflow/sources/listing": 828,
    "dataflow/sources/tables": 879,
    "dataflow/staging": 2_097,
    "dataflow/stream": 3_147,
    "dataflow/testing": 561,
    "dataflow/text": 1_127,
    "dataflow/telemetry": 217,
    "dataflow/telemetry/serving": 652,
    "dataflow/telemetry/status": 1_257,
    "dataflow/telemetry/timing": 2_277,
    "dataflow/tools": 569,
    "dataflow/tools/bench": 2_638,
    "dataflow/tools/convert": 180,
    "dataflow/tools/doctor": 359,
    "dataflow/tools/explain": 1_236,
    "dataflow/tools/inspect": 978,
    "dataflow/tools/estimate": 1_159,
    "dataflow/tools/top": 1_351,
    "dataflow/tools/terminal": 1_114,
    "dataflow/tools/verdicts": 684,
    "dataflow/vision": 1_628,
    "dataflow/workers": 3_154,
}
"""Lines that a folder of the packages may have, in Python and C: what it had on 27 Nov 2026, and a tenth."""
SOURCES = {".py", ".c", ".h"}
MOST_FILE_LINES = 600
MOST_MODULES = 12
AT_THE_FRONT = {"dataflow": 13}
MOST_SCRIPTS = 20
"""Files that a folder of tests or benchmarks may have."""


def name_of(module: Path) -> str:
    parts = module.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(module): module for module in MODULES}


def package_of(name: str) -> str:
    """The package of a module; at the front door, the module itself."""
    if NAMES[name].name == "__init__.py" or (name.startswith("dataflow.") and name.count(".") == 1):
        return name
    return name.rpartition(".")[0]


def imported(name: str) -> set[str]:
    """Modules of the product that a module imports, also in functions and for the type checker."""
    found = {other for other in imported_modules(NAMES[name]) if other in NAMES and other != name}
    return {other for other in found if not any(deeper.startswith(f"{other}.") for deeper in found)}


@cache
def modules_imported() -> dict[str, set[str]]:
    """By each module. Not when tests are collected: each process that runs tests would parse all modules."""
    return {name: imported(name) for name in NAMES}


@cache
def packages_imported() -> dict[str, set[str]]:
    """By each package."""
    found: dict[str, set[str]] = {}
    for name, others in modules_imported().items():
        own = package_of(name)
        found.setdefault(own, set()).update({package_of(other) for other in others} - {own})
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first; [] if there are none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for other in sorted(graph.get(path[-1], ())):
            if other in path:
                return path[path.index(other) :]
            if other not in done and (found := walk([*path, other])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(graph) if (found := walk([name]))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in(modules_imported()) == []


def test_no_packages_import_each_other_in_a_circle() -> None:
    assert circle_in(packages_imported()) == []


def test_the_picture_of_the_architecture_is_that_of_the_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text.partition("<!-- layers -->\n```text\n")[2].partition("```")[0].splitlines()
    height: dict[str, int] = {}
    top = ""
    for number, line in enumerate(lines):
        top = line[:11].strip() or top
        for name in line[11:].split(" · "):
            inside = "" if name == "(values)" else f".{name.strip().replace('/', '.')}"
            height[top + inside] = len(lines) - number
    core = {package for package in packages_imported() if not is_outside(package)}
    imports = {package: packages_imported()[package] & core - {"dataflow"} for package in core}
    assert core - {"dataflow"} == height.keys()
    upwards = {
        (package, other)
        for package, others in imports.items()
        for other in others
        if package != "dataflow" and height[other] >= height[package]
    }
    assert upwards == set()


def test_circles_are_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("package", sorted(MAY_USE))
def test_a_package_imports_those_it_may(package: str) -> None:
    values = {"sharding"} if package.startswith("sharding") else {"sharding", "prefetch"}
    assert packages_imported().get(package, set()) <= MAY_USE[package] | values


def test_every_package_has_its_line() -> None:
    packages = {
        package_of(name)
        for name in NAMES
        if package_of(name).count(".") > 0 or name in ("sharding", "prefetch")
    }
    front = {name for name in packages if NAMES[name].name != "__init__.py"}
    assert {package for package in packages - front if not package.startswith(TOOLS)} == MAY_USE.keys()


def test_nobody_imports_the_tools_and_they_share_only_the_terminal() -> None:
    for package, others in packages_imported().items():
        tools = {other for other in others if other.startswith(TOOLS)}
        allowed = {f"{TOOLS}.{shared}" for shared in ("terminal", "verdicts")}
        allowed = allowed if package.startswith(f"{TOOLS}.") else set()
        assert package == TOOLS or tools <= allowed, package


@pytest.mark.parametrize("package", sorted({package_of(name) for name in NAMES} - {"dataflow"}))
def test_a_package_says_what_comes_in_what_goes_out_and_where_to_begin(package: str) -> None:
    if NAMES[package].name != "__init__.py" or package in ("sharding.formats", "dataflow.grad.strategies"):
        return  # a module of the front door, or a package whose first file is its front
    text = ast.get_docstring(ast.parse((ROOT / NAMES[package]).read_text())) or ""
    assert "Read `" in text
    assert len(text.splitlines()) <= 7


def sources_in(*tops: str) -> dict[str, list[Path]]:
    """Files of source in each folder, `__init__.py` included, by "package/.../folder"."""
    folders: dict[str, list[Path]] = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SOURCES:
                folders.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return folders


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


FOLDERS = sources_in("sharding", "prefetch", "dataflow")
SCRIPTS = sources_in("tests", "benchmarks")


def test_every_folder_has_a_budget_of_lines() -> None:
    assert FOLDERS.keys() == MOST_LINES.keys()


@pytest.mark.parametrize("folder", MOST_LINES)
def test_a_folder_keeps_to_its_budget(folder: str) -> None:
    lines = sum(map(lines_of, FOLDERS[folder]))
    cure = "raise it in this table, and say in the commit message what it bought"
    assert lines <= MOST_LINES[folder], f"{folder} has {lines:,} lines of {MOST_LINES[folder]:,}: {cure}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_the_packages_has_few_modules(folder: str) -> None:
    modules, most = (
        [path for path in FOLDERS[folder] if path.suffix == ".py"],
        AT_THE_FRONT.get(folder, MOST_MODULES),
    )
    assert len(modules) <= most, f"{folder} has {len(modules)} modules of {most}: split it by subject"


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_of_the_packages_are_short(folder: str) -> None:
    long = {path.name: lines_of(path) for path in FOLDERS[folder] if lines_of(path) > MOST_FILE_LINES}
    assert not long, (
        f"more than {MOST_FILE_LINES} lines in {folder}: split {long} by subject, a noun for each half"
    )


@pytest.mark.parametrize("folder", SCRIPTS)
def test_a_folder_of_tests_or_benchmarks_has_few_files(folder: str) -> None:
    files = len(SCRIPTS[folder])
    assert files <= MOST_SCRIPTS, f"{folder} has {files} files of {MOST_SCRIPTS}: split it by subject"
