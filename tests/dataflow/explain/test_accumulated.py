"""Optimizer steps of a `GradSchedule` are told by their numbers, as its windows took batches."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import Made, make_ints_tar, make_tokens_bin, rank
from forked_kit import fast_ranks
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, Packed, Shuffle, provenance
from dataflow.explain.provenance import notes_of


@pytest.fixture(scope="module")
def ints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_ints_tar(tmp_path_factory.mktemp("ints"))


def loader_over(made: Made, **options: Any) -> DataLoader:
    return DataLoader(
        made.open(), **{"batch_size": 4, "shuffle": Shuffle("window", 2), "num_workers": 0, **options}
    )


def schedule_over(loader: DataLoader, accumulate: int) -> GradSchedule:
    model = torch.nn.Linear(1, 1)
    return GradSchedule(loader, model, torch.optim.SGD(model.parameters(), 0.01), accumulate)


def run(schedule: GradSchedule, most: int | None = None) -> list[list[list[int]]]:
    """The numbers of the samples of each microbatch of each window of one epoch, or of its first ones."""
    windows, own = [], list[list[int]]()
    for batch in schedule:
        own.append(batch["cls"].tolist())
        x = batch["cls"].float()[:, None]
        schedule.backward(schedule._loop.model.inner(x).sum() * schedule.scale())
        if schedule.step() is not None:
            windows.append(own)
            own = []
            if len(windows) == most:
                break
    return windows


def told(table: Any) -> list[list[list[int]]]:
    """The same of a table, whose windows begin with 0."""
    windows = dict[int, dict[int, list[int]]]()
    for step, microbatch, key in zip(
        *(table[name].to_pylist() for name in ("step", "microbatch", "key")), strict=True
    ):
        windows.setdefault(step, {}).setdefault(microbatch, []).append(int(key))
    assert [*windows] == [*range(len(windows))]
    return [[own[at] for at in range(len(own))] for own in windows.values()]


@pytest.mark.parametrize("accumulate", [2, 3, 5, 12, 20])
def test_windows_are_told_as_they_were(ints: Made, accumulate: int) -> None:
    """Twelve batches an epoch: the last window of one is short, but for 2, 3 and 12."""
    with loader_over(ints) as loader, schedule_over(loader, accumulate) as schedule:
        windows = [*run(schedule), *run(schedule), *run(schedule, most=1)]
        state = schedule.state_dict()["loader"]
    table = provenance(state, ints.open(), range(len(windows)), accumulate=accumulate)
    assert told(table) == windows
    assert len(notes_of(table)) == (12 % accumulate > 0)
    with pytest.raises(IndexError, match=f"optimizer step {len(windows)} is not known: with accumulate="):
        provenance(state, ints.open(), len(windows), accumulate=accumulate)
    with loader_over(ints) as loader:
        loader.load_state_dict(state)
        last = loader.provenance(len(windows) - 1, accumulate=accumulate)
        assert [*map(int, last["key"].to_pylist())] == [n for own in windows[-1] for n in own]


def test_a_training_that_went_on_from_states_is_told(ints: Made) -> None:
    windows, state = [], None
    for most in (2, 3, 1, None, 2):
        with loader_over(ints) as loader, schedule_over(loader, 2) as schedule:
            if state is not None:
                schedule.load_state_dict(state)
            windows += run(schedule, most)
            state = schedule.state_dict()
    assert state is not None
    assert told(provenance(state["loader"], ints.open(), range(len(windows)), accumulate=2)) == windows


def test_what_was_passed_over_is_part_of_no_window(ints: Made) -> None:
    with loader_over(ints, skip_steps=[(3, 6), (10, 11)]) as loader, schedule_over(loader, 2) as schedule:
        windows = [*run(schedule), *run(schedule)]
        state = schedule.state_dict()["loader"]
    assert len(windows) == 4 + 6
    table = provenance(state, ints.open(), range(len(windows)), accumulate=2)
    assert told(table) == windows


def test_a_loop_that_was_left_early_ends_what_can_be_counted(ints: Made) -> None:
    with loader_over(ints) as loader, schedule_over(loader, 2) as schedule:
        windows = run(schedule, most=3)
        run(schedule)
        state = schedule.state_dict()["loader"]
    assert told(provenance(state, ints.open(), range(2), accumulate=2)) == windows[:2]
    with pytest.raises(
        ValueError, match=r"a loop was left early before step .* cannot be counted from there"
    ):
        provenance(state, ints.open(), 2, accumulate=2)  # its last batches may have been taken ahead


def windows_of_rank(made: Made, accumulate: int) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Two epochs of a rank, without the batches that it only runs again; and the state."""
    r, windows, own = dist.get_rank(), [], list[list[int]]()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with (
        loader_over(made, batch_size=1, tail="uneven", topology=rank(r, 2)) as loader,
        GradSchedule(loader, model, optimizer, accumulate) as schedule,
    ):
        for batch in chain(schedule, schedule):
            if not schedule._loop.present().is_replay:
                own.append(batch["cls"].tolist())
            schedule.backward(model(batch["cls"].float()[:, None]).sum() * schedule.scale())
            if schedule.step() is not None:
                windows, own = [*windows, own], []
        return windows, schedule.state_dict()["loader"]


def test_windows_of_ranks_one_of_which_has_a_batch_less(ints: Made) -> None:
    """Of 24 steps an epoch the last has one sample, for the first rank."""
    ranks = fast_ranks(windows_of_rank, 2, args=(ints, 3), timeout_s=60)
    for r, (windows, state) in enumerate(ranks):
        table = provenance(state, ints.open(), range(16), rank=r, accumulate=3)
        assert told(table) == windows
        assert len(windows[7]) == 3 - r


def test_packed_rows_are_told_by_microbatch(ints: Made, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make_tokens_bin(tmp_path_factory.mktemp("tokens"))
    batching = Packed(16, "tokens", window=8)
    with DataLoader(made.open(), 2, batching=batching, num_workers=0) as loader:
        steps = [len([*loader]) for _ in range(2)]
        num = sum(-(-each // 3) for each in steps)
        table = loader.provenance(range(num), accumulate=3)
        plain = loader.provenance(range(sum(steps)))
        with pytest.raises(IndexError, match=f"steps 0 to {num - 1} are complete"):
            loader.provenance(num, accumulate=3)
    assert table.drop_columns(["step", "microbatch"]).equals(plain.drop_columns(["step", "microbatch"]))
    assert max(table["microbatch"].to_pylist()) == 2


def test_other_ranks_may_have_had_another_number_of_microbatches(ints: Made) -> None:
    with loader_over(ints, topology=rank(0, 2)) as loader:
        [*islice(loader, 2)]
        state = loader.state_dict()
    with loader_over(ints, batch_size=8) as loader:
        loader.load_state_dict(state)
        batches = [*loader]
        table = loader.provenance(range(3), accumulate=2)
        assert "accumulate=2 is taken to hold for both" in notes_of(table)[0]
        last = table.filter([step == 1 for step in table["step"].to_pylist()])
        assert [*map(int, last["key"].to_pylist())] == [n for b in batches[:2] for n in b["cls"].tolist()]
        with pytest.raises(ValueError, match="in the middle of a window of accumulate=3 at step 2"):
            loader.provenance(1, accumulate=3)


def test_accumulation_is_refused_where_it_says_nothing(ints: Made) -> None:
    with loader_over(ints) as loader:
        [*islice(loader, 3)]
        with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
            loader.provenance(0, accumulate=0)
        assert {*loader.provenance(0)["microbatch"].to_pylist()} == {0}
        state = loader.state_dict()
    with pytest.raises(ValueError, match="name one batch: leave accumulate= out"):
        provenance(state, ints.open(), accumulate=2, epoch=0, position=0, global_batch=4)
