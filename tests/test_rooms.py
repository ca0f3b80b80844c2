"""The rooms of the house: who may call on whom, and that nobody walks in a circle.

A room is a folder; at the front door (`dataflow/*.py`) each module is one. Everybody may use the values in
`sharding/*.py`, and within `prefetch` and `dataflow` those in `prefetch/*.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_architecture import MODULES, ROOT, imported_modules

LEAVES = {"dataflow.limits", "dataflow.ragged", "dataflow.stats", "dataflow.torch_threads"}
"""Of the front door: values that rooms behind it share."""
DATASETS = {"dataflow.dataset", "dataflow.mixture"}
ORDERS = {"sharding.order", "sharding.plan", "sharding.mixture", "sharding.lengths", "sharding.topology"}
MAY_USE: dict[str, set[str]] = {
    # sharding: values
    "sharding": set(),
    "sharding.formats": {"sharding.formats.arrow", "sharding.formats.tar"},
    "sharding.formats.arrow": set(),
    "sharding.formats.tar": set(),
    "sharding.hub": {"sharding.formats", "sharding.write"},
    "sharding.catalog": {"sharding.formats", "sharding.formats.arrow", "sharding.hub", "sharding.write"},
    "sharding.order": set(),
    "sharding.plan": {"sharding.order", "sharding.catalog", "sharding.topology"},
    "sharding.mixture": {"sharding.order", "sharding.plan"},
    "sharding.lengths": {"sharding.order", "sharding.plan", "sharding.catalog", "sharding.write"},
    "sharding.topology": set(),
    "sharding.write": {"sharding.formats", "sharding.formats.tar"},
    # prefetch: bytes in motion
    "prefetch": set(),
    "prefetch.core": set(),
    "prefetch.memory": {"prefetch.core", "sharding.catalog"},
    "prefetch.control": {"prefetch.memory"},
    "prefetch.engine": {"prefetch.control", "prefetch.memory"},
    "prefetch.store": {
        "prefetch.control",
        "prefetch.memory",
        "sharding.catalog",
        "sharding.hub",
        "sharding.write",
    },
    "prefetch.cache": {"prefetch.store", "prefetch.memory", "sharding.hub", "sharding.write"},
    "prefetch.workers": {"prefetch.engine", "prefetch.memory"},
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
        "sharding.order",
        *LEAVES,
    },
    "dataflow.sources": {
        "dataflow.decode",
        "dataflow.outputs",
        "dataflow.staging",
        "prefetch.cache",
        "prefetch.memory",
        "prefetch.store",
        "sharding.catalog",
        "sharding.formats",
        "sharding.formats.arrow",
        "sharding.hub",
        "sharding.write",
        *ORDERS - {"sharding.topology", "sharding.mixture", "sharding.lengths"},
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
    "dataflow.stream": {
        "dataflow.actors",
        "dataflow.batch",
        "dataflow.outputs",
        "dataflow.sources",
        "dataflow.staging",
        "dataflow.decode",
        "dataflow.processes",
        "dataflow.topology_exchange",
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
        "dataflow.outputs",
        "dataflow.processes",
        "dataflow.staging",
        "prefetch.engine",
        "prefetch.ipc",
        "prefetch.memory",
        "prefetch.store",
        *DATASETS,
    },
    "dataflow.workers": {"prefetch.ipc", "prefetch.memory", "prefetch.workers", *LEAVES},
    "dataflow.text": {"dataflow.batch"},
    "dataflow.integrations": {"dataflow.loader", "dataflow.shard_order"},
    "dataflow.timing": {"sharding.topology", *LEAVES},
    "dataflow.grad.strategies": {"prefetch.workers", "sharding.topology"},
    "dataflow.grad.adapt": {"dataflow.grad.strategies"},
    "dataflow.grad": {
        "dataflow.grad.adapt",
        "dataflow.grad.strategies",
        "dataflow.timing",
        "dataflow.topology_exchange",
        "prefetch.control",
        "sharding.topology",
        *LEAVES,
    },
    "dataflow.testing": set(),
}
TOOLS = "dataflow.tools"


def name_of(module: Path) -> str:
    parts = module.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(module): module for module in MODULES}


def room_of(name: str) -> str:
    """The room of a module; at the front door, the module itself."""
    if NAMES[name].name == "__init__.py" or (name.startswith("dataflow.") and name.count(".") == 1):
        return name
    return name.rpartition(".")[0]


def imported(name: str) -> set[str]:
    """Modules of the product that a module imports, also in functions and for the type checker."""
    found = {other for other in imported_modules(NAMES[name]) if other in NAMES and other != name}
    return {other for other in found if not any(deeper.startswith(f"{other}.") for deeper in found)}


IMPORTS = {name: imported(name) for name in NAMES}
ROOMS: dict[str, set[str]] = {}
for _name, _others in IMPORTS.items():
    ROOMS.setdefault(room_of(_name), set()).update({room_of(other) for other in _others} - {room_of(_name)})


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
    assert circle_in(IMPORTS) == []


def test_no_rooms_call_on_each_other_in_a_circle() -> None:
    assert circle_in(ROOMS) == []


def test_circles_are_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("room", sorted(MAY_USE))
def test_a_room_calls_on_those_it_may(room: str) -> None:
    values = {"sharding"} if room.startswith("sharding") else {"sharding", "prefetch"}
    assert ROOMS.get(room, set()) <= MAY_USE[room] | values


def test_every_room_has_its_line() -> None:
    rooms = {
        room_of(name) for name in NAMES if room_of(name).count(".") > 0 or name in ("sharding", "prefetch")
    }
    front = {name for name in rooms if NAMES[name].name != "__init__.py"}
    assert {room for room in rooms - front if not room.startswith(TOOLS)} == MAY_USE.keys()


@pytest.mark.parametrize("room", sorted(room for room in ROOMS if not room.startswith(TOOLS)))
def test_nobody_calls_on_the_tools(room: str) -> None:
    assert not [other for other in ROOMS[room] if other.startswith(TOOLS)]


@pytest.mark.parametrize("room", sorted(room for room in ROOMS if room.startswith(f"{TOOLS}.")))
def test_tools_share_only_the_terminal(room: str) -> None:
    assert {other for other in ROOMS[room] if other.startswith(TOOLS)} <= {f"{TOOLS}.terminal"}


@pytest.mark.parametrize("room", sorted({room_of(name) for name in NAMES} - {"dataflow"}))
def test_a_room_says_what_comes_in_what_goes_out_and_where_to_begin(room: str) -> None:
    if NAMES[room].name != "__init__.py" or room in ("sharding.formats", "dataflow.grad.strategies"):
        return  # a module of the front door, or a room whose first file is its front
    text = ast.get_docstring(ast.parse((ROOT / NAMES[room]).read_text())) or ""
    assert "Read `" in text
    assert len(text.splitlines()) <= 7


@pytest.mark.parametrize("room", sorted({room_of(name) for name in NAMES}))
def test_a_room_has_few_files(room: str) -> None:
    files = [name for name in NAMES if name.rpartition(".")[0] == room and NAMES[name].name != "__init__.py"]
    assert len(files) <= 16
