"""What a table says was in a step, and what `batch_at` makes of it, against what real loops delivered."""

from __future__ import annotations

import copy
import json
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from contract_rows import ROWS, Row, packed_rows
from parameters_kit import others_in_full

import dataflow
from dataflow import DataLoader

SEED = 5
PLANS = [
    *("in file order", "view", "joined", "tail pad", "draws", "mixture, weights set"),
    *("split", "packed mixture, tokens"),
]
EXPLAINED = [name for name, row in ROWS.items() if not row.is_measured and name != "left out"]


class Stage(NamedTuple):
    """A part of a training between two restarts."""

    world_size: int
    rows: int
    """Of the batches of all ranks together."""
    loops: tuple[int | None, ...]
    """Steps of each loop; None: the rest of the epoch."""


STAGES = [
    Stage(1, 12, (2,)),
    Stage(2, 12, (1,)),
    Stage(3, 6, (None, 2, 3)),
    Stage(2, 8, (1, None)),
    Stage(1, 6, (None, 1)),
]


class Trained(NamedTuple):
    """What real loops delivered."""

    folder: Path
    batches: list[list[list[Any] | None]]
    """Of each step and rank; None: a rank got nothing."""
    state: dict[str, Any]
    accounts: list[dict[str, Any]]
    """Of each stage and rank."""


def passing(row: Row, loader: DataLoader[Any, Any], steps: int | None) -> list[list[Any] | None]:
    """What a loop delivers of a loader that passes over steps: None for these, as its state counts them."""
    before, got = steps_taken(loader), list[list[Any] | None]()
    loop = iter(loader)
    while steps != sum(batch is not None for batch in got) and (batch := next(loop, None)) is not None:
        got += [None] * (steps_taken(loader) - before - 1 - len(got))
        got.append(row.samples(batch))
    return got + [None] * (steps_taken(loader) - before - len(got))


def train(row: Row, folder: Path) -> Trained:
    """Run all stages, each with loaders of its own."""
    batches: list[list[list[Any] | None]] = []
    state: dict[str, Any] | None = None
    accounts = list[dict[str, Any]]()
    for stage in STAGES:
        of_ranks, before = [], state
        # Ranks set weights after the same number of batches, and a rank may get none of the last whole ones.
        world_size = 1 if row.weights and not row.has_rows else stage.world_size
        for rank in range(world_size):
            with row.loader(folder, rank, world_size, stage.rows) as loader:
                if before is not None:
                    loader.load_state_dict(before)
                run = partial(passing, row) if "skip_steps" in row.options else row.run
                of_ranks.append([run(loader, steps=steps) for steps in stage.loops])
                accounts.append(json.loads(json.dumps(loader.account())))
                if rank == 0:
                    state = json.loads(json.dumps(loader.state_dict()))
        for loops in zip(*of_ranks, strict=True):
            most = max(map(len, loops))
            batches += [[own[b] if b < len(own) else None for own in loops] for b in range(most)]
    assert state is not None
    return Trained(folder, batches, state, accounts)


def steps_taken(loader: DataLoader[Any, Any]) -> int:
    return int(json.loads(loader.state_dict()["history"])[-1])


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, row = tmp_path_factory.mktemp("row"), ROWS[request.param]
    row.write(folder)
    return train(row, folder)


def sample_of(row: Row, source: Any, told: dict[str, Any]) -> Any:
    """What a batch holds of a sample that a table names, read by itself."""
    source.seed, source.epoch = SEED, told["draw_epoch"]
    (sample,) = row.samples(source[[told["sample"]]])
    if row.transforms and "draw" in sample:
        bits = np.random.Philox(key=[SEED, told["draw_epoch"]], counter=[0, 0, 0, told["draw_number"]])
        assert sample["draw"] == np.random.Generator(bits).random()
    return sample


def check(row: Row, dataset: Any, told: list[dict[str, Any]], batch: list[Any]) -> None:
    """Compare a rank's batch with the rows of a table."""
    sources = [copy.copy(source) for source in dataset.sources]
    for source in sources:
        source.balance = None  # samples by their indexes are those before
    if row.samples is packed_rows and row.has_rows:
        for number, (tokens, ids, _) in enumerate(batch):
            pieces = [one for one in told if one["row"] == number]
            made = []
            for segment, one in enumerate(pieces):
                own = np.asarray(sources[one["source"]][one["sample"]]["tokens"]).tolist()
                own = own[one["piece_start"] :][: one["piece_length"]]
                assert len(own) == one["piece_length"] > 0
                assert {ids[len(made) + at] for at in range(len(own))} == {1 + segment}
                made += own
            assert tokens[: len(made)] == made
    elif row.samples is packed_rows:
        made = [np.asarray(sources[one["source"]][one["sample"]]["tokens"]).tolist() for one in told]
        assert [list(row) for row in batch] == [
            own[one["piece_start"] :][: one["piece_length"]] for own, one in zip(made, told, strict=True)
        ]
    else:
        assert batch == [sample_of(row, sources[one["source"]], one) for one in told]


@pytest.mark.parametrize("trained", others_in_full(EXPLAINED, *PLANS), indirect=True)
@pytest.mark.filterwarnings("ignore:this loader was given:UserWarning")
def test_steps_held_what_the_table_says(trained: Trained, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["trained"]
    row, steps = ROWS[name], len(trained.batches)
    with row.loader(trained.folder) as loader:
        loader.load_state_dict(trained.state)
        before = loader.state_dict()
        table = loader.provenance(range(steps))
        chosen = random.Random(name).sample(range(steps), 3)
        for step, batches in enumerate(trained.batches):
            of_step = [one for one in table.drop_columns("draws").to_pylist() if one["step"] == step]
            for rank, batch in enumerate(batches):
                told = [one for one in of_step if one["rank"] == rank]
                if "batching" not in row.options or row.samples is packed_rows:
                    check(row, loader.dataset, told, batch or [])
                if step in chosen and batch is not None:
                    assert row.samples(loader.batch_at(step, rank)) == batch
            assert {one["rank"] for one in of_step} == {r for r, b in enumerate(batches) if b is not None}
        assert loader.state_dict() == before
        state, dataset = trained.state, row.open(trained.folder)
        again = dataflow.provenance(state, dataset, range(steps), batching=row.options.get("batching"))
        assert again.equals(table)


@pytest.mark.parametrize("trained", others_in_full(EXPLAINED, *PLANS), indirect=True)
@pytest.mark.filterwarnings("ignore:this loader was given:UserWarning")
def test_accounts_of_all_ranks_and_restarts_add_up_to_the_plan(
    trained: Trained, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["trained"]
    row, accounts = ROWS[name], trained.accounts
    verify = partial(
        dataflow.verify, trained.state, row.open(trained.folder), batching=row.options.get("batching")
    )
    if len({(one["first_step"], one["num_steps"]) for one in accounts}) > len(STAGES):
        # Ranks left a loop behind the last batch of some of them: these counted the epoch's other steps, too.
        assert name == "budget"
        with pytest.raises(ValueError, match="has no account that ends with step"):
            verify(accounts)
        return
    report = verify(random.Random(name).sample(accounts, len(accounts)))
    assert report.is_whole, str(report)
    assert (report.begin, report.end) == (0, len(trained.batches))
    if "batching" not in row.options:
        assert report.rows == sum(len(batch or []) for batches in trained.batches for batch in batches)
    for lacking in (at for at, one in enumerate(accounts) if one["intervals"]):  # others tell nothing
        with pytest.raises(
            ValueError, match=r"has no account that ends with step|there is no account of rank"
        ):
            verify(accounts[:lacking] + accounts[lacking + 1 :])
    changed = copy.deepcopy(accounts)
    last = changed[-1]["intervals"][-1]
    last[3] = f"{int(last[3], 16) ^ 1:032x}"
    assert [(one.end, one.planned) for one in verify(changed).departures] == [(last[1], last[2])]
