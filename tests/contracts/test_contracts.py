"""What every loader over shards keeps, row by row of one table: states, ranks, builders, ends, copies."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import contract_rows
import pytest
import torch.distributed as dist
from chunks_kit import HandDrivenEpoch
from contract_rows import GLOBAL_ROWS, ROWS, Row, through_json
from forked_kit import fast_ranks
from local_ray_kit import ray_is_local
from parameters_kit import in_pairs, others_in_full
from threads_kit import threads_left
from worker_kit import nothing_left, workers_of_this_process

Batches = list[list[Any]]
OTHERS: dict[str, Any] = {"shuffle": True, "seed": 0, "memory_limit": "4MB", "depth": 1}
"""What a state brings along, or does not depend on, whatever the loader that it is loaded into has."""


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


PLANS = [
    *("in file order", "blocks", "lanes of nodes", "full shuffle", "view", "joined"),
    *("mixture, all", "mixture, in file order", "mixture, weights set", "packed", "budget", "buckets"),
    "balanced",
    *("packed mixture", "packed mixture, tokens", "measured packed", "measured packed mixture, tokens"),
]
"""A row of each kind of plan, for what no format and no function of the user's changes."""
FORMATS = ["tar", "parquet", "files"]
"""A block that is a shard's part, a row group, and one over files: no other format changes a state."""
OF_THEIR_OWN = [
    *("draws", "random crops", "left out", "alternatives", "companion columns", "mixture, schedule"),
    *("mixture, nested", "buckets mixture, tokens", "packed mixture, weights set", "measured split"),
    *("lanes of nodes, passed over", "mixture, passed over", "packed, passed over"),
]
"""Rows with state that no plan has, or functions of the user's."""


@pytest.mark.filterwarnings("ignore:this loader was given:UserWarning")
@pytest.mark.parametrize("name", others_in_full(ROWS, *PLANS, *FORMATS, *OF_THEIR_OWN))
def test_a_state_resumes_after_any_batch(
    name: str, data: tuple[Path, Whole], request: pytest.FixtureRequest
) -> None:
    """In a loader that has run, its next batches; in a new one the rest (from each with --full)."""
    row, (folder, whole) = ROWS[name], data
    last, every = len(whole.batches), 1 if request.config.getoption("--full") else 2
    with row.loader(folder, **OTHERS) as used:
        for cut in range(len(name) % every, last, every):
            used.load_state_dict(whole.states[cut])
            assert through_json(used.state_dict()) == whole.states[cut]
            assert row.run(used, done=cut, steps=2) == whole.batches[cut : cut + 2], f"resumed after {cut}"
    for cut in range(last + 1) if every == 1 else (last // 2, last):
        with row.loader(folder, **OTHERS) as resumed:
            resumed.load_state_dict(whole.states[cut])
            assert row.run(resumed, done=cut) == whole.batches[cut:], f"resumed after {cut}"
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


@functools.cache
def of_one_rank(name: str, folder: Path) -> Batches:
    """What ranks share out."""
    return of_world(name, folder, 1)[0]


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
        # A step of four ranks is four buckets: the steps that are passed over are others of one rank.
        [name for name in SHARED if name != "buckets, passed over"],
        *PLANS,  # which format it is, ranks do not see
        *OF_THEIR_OWN,
        "measured packed mixture, weights set",
    ),
)
def test_any_number_of_ranks_goes_on_with_the_same_samples(name: str, data: tuple[Path, Whole]) -> None:
    row, (folder, _) = ROWS[name], data
    whole = of_one_rank(name, folder)
    got: Batches = []
    state = None
    worlds: Any = ((3, 1), (2, None)) if row.is_measured else ((4, 1), (2, 1), (3, None))  # of processes
    for world_size, steps in worlds:
        batches, state = of_world(name, folder, world_size, steps, done=len(got), state=state)
        got += batches
    if row.has_rows:
        assert got == whole
    else:
        assert Counter(map(repr, chain(*got))) == Counter(map(repr, chain(*whole)))


@pytest.mark.parametrize("tail", ["drop", "pad", "even"])
@pytest.mark.parametrize(
    "name",
    others_in_full(
        [
            name
            for name in SHARED
            if not (ROWS[name].is_measured or ROWS[name].weights or "passed over" in name)
        ],
        *PLANS,
    ),
)
@pytest.mark.one_in(2)
def test_ranks_step_together_and_share_out_the_last_batch_by_its_rule(
    name: str, tail: str, data: tuple[Path, Whole]
) -> None:
    row, (folder, _) = ROWS[name], data
    whole = list(chain(*of_one_rank(name, folder)))
    for world_size in (2, 3):
        ranks = []
        for r in range(world_size):
            with row.loader(folder, r, world_size, GLOBAL_ROWS, tail=tail) as loader:
                steps = len(loader)
                ranks.append(row.run(loader))
            assert len(ranks[-1]) == steps == len(ranks[0])
        got = list(chain(*chain(*zip(*ranks, strict=True))))
        whole_batches = len(whole) - len(whole) % GLOBAL_ROWS * row.has_rows
        assert all(one in whole for one in got)
        assert got[:whole_batches] == whole[:whole_batches][: len(got)]
        if tail != "drop":
            assert not Counter(map(repr, whole)) - Counter(map(repr, got))
        if row.has_rows:
            left = len(whole) % GLOBAL_ROWS
            assert (
                len(got) - len(whole)
                == {
                    "drop": -left,
                    "pad": -left % GLOBAL_ROWS,
                    "even": -left % world_size,
                }[tail]
            )


IN_PROCESSES = [
    *("tar", "parquet", "draws", "random crops", "joined", "missing values", "absent members"),
    *("mixture, all", "measured packed"),
]


@pytest.mark.parametrize("name", others_in_full(ROWS, *IN_PROCESSES, *PLANS))
def test_threads_build_what_the_consumer_does_and_leave_nothing(name: str, data: tuple[Path, Whole]) -> None:
    built_by(name, data, num_workers=2, workers="thread")
    assert threads_left() == []


@pytest.mark.parametrize("name", others_in_full(ROWS, *IN_PROCESSES))
def test_processes_build_what_the_consumer_does_and_leave_nothing(
    name: str, data: tuple[Path, Whole]
) -> None:
    built_by(name, data, num_workers=1, workers="process", timeout=60)
    assert threads_left() == []
    assert workers_of_this_process() == []


IN_ACTORS = ["tar", "parquet", "full shuffle", "draws", "mixture, all", "split"]


def built_by_actors(name: str, data: tuple[Path, Whole], *, ship_blocks: bool) -> None:
    with ray_is_local():
        built_by(name, data, num_workers=2, builders="ray", ship_blocks=ship_blocks, timeout=60)


@pytest.mark.parametrize("name", others_in_full([name for name in ROWS if name != "joined"], *IN_ACTORS))
def test_actors_that_read_build_what_the_consumer_does(name: str, data: tuple[Path, Whole]) -> None:
    built_by_actors(name, data, ship_blocks=False)


@pytest.mark.parametrize("name", others_in_full(ROWS, *IN_ACTORS, "joined"))
def test_actors_that_are_sent_blocks_build_what_the_consumer_does(
    name: str, data: tuple[Path, Whole]
) -> None:
    built_by_actors(name, data, ship_blocks=True)


def built_by(name: str, data: tuple[Path, Whole], **builders: Any) -> None:
    """The same batches, and states that go on with any other builders."""
    row, (folder, whole) = ROWS[name], data
    with row.loader(folder, **builders) as loader:
        loader.load_state_dict(whole.states[0])
        states: list[dict[str, Any]] = []
        assert row.run(loader, states=states) == whole.batches
        assert states == whole.states[1:]


@pytest.mark.parametrize("name", [name for name in SHARED if ROWS[name].has_plan_by_length])
@pytest.mark.one_in(2)
def test_credits_bound_what_a_chunk_takes_and_windows_are_staged_once(
    name: str, data: tuple[Path, Whole]
) -> None:
    """Nothing but the count of segments tells that a window is done with: one too few and it comes twice."""
    row, (folder, _) = ROWS[name], data
    with row.loader(folder) as loader, HandDrivenEpoch(loader) as epoch:
        built = list(epoch.build())
    assert built
    assert all(0 < chunk.leased_bytes <= chunk.nbytes for chunk in built)
    with row.loader(folder) as loader, HandDrivenEpoch(loader, batches_per_chunk=1) as epoch:
        chunks = [chunk for window in epoch.windows() for chunk in window.chunks()]
        closed = [chunk.plan.first_batch for chunk in chunks for _ in chunk.closes]
        assert len(epoch.staged_windows) == len({*epoch.staged_windows}) == len(closed)
        assert closed[0] < closed[-1] or len(closed) == 1


@pytest.mark.parametrize("name", [name for name in SHARED if ROWS[name].has_plan_by_length])
@pytest.mark.one_in(2)
def test_halves_of_a_chunk_have_its_batches_and_the_last_that_needs_a_window_closes_it(
    name: str, data: tuple[Path, Whole]
) -> None:
    with ROWS[name].loader(data[0]) as loader, HandDrivenEpoch(loader) as epoch:
        chunks = [chunk for window in epoch.windows() for chunk in window.chunks() if chunk.num_batches > 1]
        for chunk in chunks:
            first, last = chunk.halves()
            sizes = [*first.plan.sizes.tolist(), *last.plan.sizes.tolist()]
            assert sizes == chunk.plan.sizes.tolist()
            assert last.plan.first_batch == chunk.plan.first_batch + first.num_batches
            assert {*first.needs, *last.needs} == {*chunk.needs}
            assert sorted(map(id, [*first.closes, *last.closes])) == sorted(map(id, chunk.closes))
            assert {*first.closes} <= {*first.needs} - {*last.needs}
            assert {*last.closes} <= {*last.needs}
    assert chunks


WEIGHTED = [name for name, row in ROWS.items() if row.weights]


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_epoch_in_which_weights_were_set_begins_anew(name: str, data: tuple[Path, Whole]) -> None:
    """With the same weights after the same batches, also in another loader; and the next has the last."""
    row, (folder, whole) = ROWS[name], data
    state = whole.states[0]
    for is_first in (True, False):
        with row.loader(folder) as loader:
            loader.load_state_dict(state)
            if is_first:
                row.run(loader)
                state = through_json(loader.state_dict())
            loader.set_epoch(1)
            assert unchanged(row).run(loader) == whole.batches
            assert unchanged(row).run(loader, steps=1) == whole.following[:1]


def unchanged(row: Row) -> Row:
    """No weights are set."""
    return replace(row, weights={})


@pytest.mark.parametrize(("name", "tail"), in_pairs(WEIGHTED, ["drop", "pad", "uneven"]))
def test_weights_set_at_the_last_batch_of_an_epoch_are_in_its_state(
    name: str, tail: str, data: tuple[Path, Whole]
) -> None:
    row, folder = ROWS[name], data[0]
    with row.loader(folder, tail=tail) as loader:
        last, plain = len(unchanged(row).run(loader)), unchanged(row).run(loader)
    with row.loader(folder, tail=tail) as loader:
        states: list[dict[str, Any]] = []
        replace(row, weights={last: [1, 0, 3]}).run(loader, states=states)
        following = [unchanged(row).run(loader) for _ in range(2)]
    assert following[0] != plain
    with row.loader(folder, tail=tail) as loader:
        loader.load_state_dict(states[-1])
        assert [unchanged(row).run(loader) for _ in range(3)] == [[], *following]


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda loader: pickle.loads(pickle.dumps(loader)),
]


@pytest.mark.parametrize("name", others_in_full(ROWS, *PLANS))
@pytest.mark.one_in(2)
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


@pytest.mark.parametrize("name", others_in_full(ROWS, *PLANS))
@pytest.mark.one_in(2)
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
@pytest.mark.one_in(2)
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
