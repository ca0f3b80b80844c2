"""What every loader over shards keeps, row by row of one table: states, ranks, builders, ends, copies."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import contract_rows
import pytest
import torch.distributed as dist
from contract_rows import GLOBAL_ROWS, ROWS, Row, through_json
from parameters_kit import others_in_full
from ranks_kit import fast_ranks
from threads_kit import threads_left
from worker_kit import nothing_left, workers_of_this_process

Batches = list[list[Any]]
OTHERS: dict[str, Any] = {"shuffle": True, "seed": 0}
"""What a state brings along, whatever the loader that it is loaded into was made with."""


@dataclass
class Whole:
    """What a loader delivers that nothing interrupts."""

    batches: Batches
    """Of the second epoch: what the first has left over is in it."""
    states: list[dict[str, Any]]
    """Before the epoch, and after each batch."""
    following: Batches
    """Of the third epoch."""


_known: dict[str, tuple[Path, Whole]] = {}


@pytest.fixture
def data(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Whole]:
    """A row's data, written and read through once."""
    if name not in _known:
        folder, row = tmp_path_factory.mktemp("row"), ROWS[name]
        row.write(folder)
        with row.loader(folder) as loader:
            row.run(loader)
            states = [through_json(loader.state_dict())]
            _known[name] = folder, Whole(row.run(loader, states=states), states, row.run(loader))
    return _known[name]


every_row = pytest.mark.parametrize("name", ROWS)


@every_row
def test_a_state_resumes_after_any_batch(name: str, data: tuple[Path, Whole]) -> None:
    row, (folder, whole) = ROWS[name], data
    last = len(whole.batches)
    for cut in range(last + 1):
        with row.loader(folder, **OTHERS) as resumed:
            resumed.load_state_dict(whole.states[cut])
            assert row.run(resumed, done=cut) == whole.batches[cut:], f"differs when resumed after {cut}"
            if cut == last:
                assert row.run(resumed) == whole.following


def of_rank(name: str, folder: Path, steps: int | None, done: int, state: Any) -> tuple[Batches, Any]:
    """One rank in a process group."""
    return of_place(ROWS[name], folder, dist.get_rank(), dist.get_world_size(), steps, done, state)


def of_place(
    row: Row, folder: Path, r: int, world_size: int, steps: int | None, done: int, state: Any
) -> tuple[Batches, Any]:
    with row.loader(folder, r, world_size, GLOBAL_ROWS) as loader:
        if state:
            loader.load_state_dict(state)
        return row.run(loader, steps=steps, done=done), through_json(loader.state_dict())


def of_world(
    name: str, folder: Path, world_size: int, steps: int | None = None, *, done: int = 0, state: Any = None
) -> tuple[Batches, Any]:
    """What all ranks deliver step by step, and the state that each of them has."""
    row = ROWS[name]
    if row.is_measured and world_size > 1:
        ranks = fast_ranks(of_rank, world_size, args=(name, folder, steps, done, state), timeout_s=90)
    else:
        ranks = [of_place(row, folder, r, world_size, steps, done, state) for r in range(world_size)]
    assert all(after == ranks[0][1] for _, after in ranks)
    most = max(len(batches) for batches, _ in ranks)
    joint = [list(chain(*(batches[b] for batches, _ in ranks if b < len(batches)))) for b in range(most)]
    return joint, ranks[0][1]


SHARED = [
    name
    for name, row in ROWS.items()
    if row.is_whole
    and (row.has_rows or not row.weights)  # "after so many batches" is another place
    and name != "left out"  # each rank counts what it left out itself
]


@pytest.mark.parametrize(
    "name",
    others_in_full(
        SHARED,
        *[name for name in SHARED if not ROWS[name].is_measured],
        *("measured packed", "measured packed mixture, tokens", "measured packed mixture, weights set"),
    ),
)
def test_any_number_of_ranks_goes_on_with_the_same_samples(name: str, data: tuple[Path, Whole]) -> None:
    row, (folder, _) = ROWS[name], data
    whole, _ = of_world(name, folder, 1)
    got: Batches = []
    state = None
    for world_size, steps in ((4, 1), (2, 1), (3, None)):
        batches, state = of_world(name, folder, world_size, steps, done=len(got), state=state)
        got += batches
    if row.has_rows:
        assert got == whole
    else:
        assert Counter(map(repr, chain(*got))) == Counter(map(repr, chain(*whole)))


@every_row
def test_threads_build_what_the_consumer_does_and_leave_nothing(name: str, data: tuple[Path, Whole]) -> None:
    built_by(name, data, num_workers=2, workers="thread")


@pytest.mark.parametrize("name", others_in_full(ROWS, "tar", "draws", "joined", "measured packed"))
def test_processes_build_what_the_consumer_does_and_leave_nothing(
    name: str, data: tuple[Path, Whole]
) -> None:
    built_by(name, data, num_workers=1, workers="process", timeout=60)


def built_by(name: str, data: tuple[Path, Whole], **builders: Any) -> None:
    """The same batches, and states that go on with any other builders."""
    row, (folder, whole) = ROWS[name], data
    with row.loader(folder, **builders) as loader:
        loader.load_state_dict(whole.states[0])
        states: list[dict[str, Any]] = []
        assert row.run(loader, states=states) == whole.batches
        assert states == whole.states[1:]
    assert threads_left() == []
    assert workers_of_this_process() == []


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]


@every_row
def test_a_copy_stands_where_the_loader_stands_and_runs_by_itself(
    name: str, data: tuple[Path, Whole]
) -> None:
    row, (folder, whole) = ROWS[name], data
    with row.loader(folder) as loader:
        loader.load_state_dict(whole.states[0])
        loop = iter(loader)
        assert row.samples(next(loop)) == whole.batches[0]
        for copied in COPIES:
            with copied(loader) as other:
                assert through_json(other.state_dict()) == through_json(loader.state_dict())
                if not row.weights:  # they are set in the loop
                    assert row.run(other, steps=2) == whole.following[:2]
        if not row.weights:
            assert [row.samples(batch) for batch in loop] == whole.batches[1:]


@every_row
def test_behind_a_loop_that_is_left_or_closed_the_next_epoch_comes_and_nothing_stays(
    name: str, data: tuple[Path, Whole]
) -> None:
    row, (folder, whole) = ROWS[name], data
    for how in ("left", "closed"):
        with row.loader(folder, num_workers=2, workers="thread") as loader:
            loader.load_state_dict(whole.states[0])
            assert row.run(loader, steps=2) == whole.batches[:2]
            if how == "closed":
                loader.close()
                assert threads_left() == []
            if not row.weights:
                assert row.run(loader, steps=2) == whole.following[:2]
        assert threads_left() == []


@pytest.mark.here
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.transforms])
def test_a_ctrl_c_while_a_sample_is_made_loses_none(name: str, data: tuple[Path, Whole]) -> None:
    row, (folder, whole) = ROWS[name], data
    with nothing_left(), row.loader(folder) as loader:
        loader.load_state_dict(whole.states[0])
        contract_rows.ctrl_c_at.append(5)
        with pytest.raises(KeyboardInterrupt):
            row.run(loader)
        assert contract_rows.ctrl_c_at == []
        assert threads_left() == []
        state = through_json(loader.state_dict())
        done = whole.states.index(state)
        loader.load_state_dict(state)
        assert row.run(loader, done=done) == whole.batches[done:]
