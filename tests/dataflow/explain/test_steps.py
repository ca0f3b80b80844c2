"""Which steps a loader's state tells of, however loops begin, end and go on."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
from datasets_kit import NUM_SAMPLES, Made, make_ints_tar, rank

from dataflow import DataLoader, Shuffle
from dataflow.explain.provenance import notes_of
from sharding.plan.history import StepHistory


@pytest.fixture(scope="module")
def ints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_ints_tar(tmp_path_factory.mktemp("ints"))


def loader_over(made: Made, **options: Any) -> DataLoader:
    return DataLoader(
        made.open(), **{"batch_size": 4, "shuffle": Shuffle("window", 2), "num_workers": 0, **options}
    )


def steps_of(loader: DataLoader) -> StepHistory:
    history = StepHistory.from_json(loader.state_dict()["history"])
    assert history is not None
    return history


def check(loader: DataLoader, batches: list[Any]) -> None:
    """Compare all steps with the batches that were delivered."""
    assert steps_of(loader).num_steps == len(batches)
    table = loader.provenance(range(len(batches)))
    told = [[] for _ in batches]
    for step, key in zip(table["step"].to_pylist(), table["key"].to_pylist(), strict=True):
        told[step].append(int(key))
    assert told == [batch["cls"].tolist() for batch in batches]


def test_loops_that_are_left_early_and_epochs_that_are_named(ints: Made) -> None:
    with loader_over(ints) as loader:
        batches = [*islice(loader, 3)]
        batches += islice(loader, 2)
        loader.set_epoch(7)
        batches += loader
        loader.set_epoch(0)
        batches += islice(loader, 5)
        check(loader, batches)
        assert [one[:3] for one in steps_of(loader).stretches] == [
            (0, 0, 0),
            (3, 1, 0),
            (5, 7, 0),
            (17, 0, 0),
        ]


def test_whole_epochs_are_one_stretch(ints: Made) -> None:
    with loader_over(ints) as loader:
        batches = [batch for _ in range(4) for batch in loader]
        check(loader, batches)
        assert len(steps_of(loader).stretches) == 1


def test_a_copy_goes_on_with_steps_of_its_own(ints: Made) -> None:
    with loader_over(ints) as loader:
        loop = iter(loader)
        batches = [next(loop) for _ in range(5)]
        with copy.copy(loader) as other:
            check(other, batches)
            own = [*batches, *islice(other, 2)]
            check(other, own)
        batches += loop
        check(loader, batches)


def test_of_loops_at_a_time_the_newest_counts(ints: Made) -> None:
    with loader_over(ints) as loader:
        first = iter(loader)
        batches = [next(first) for _ in range(2)]
        second = iter(loader)
        batches.append(next(second))
        next(first)  # no step: the loader's state is the newest loop's
        batches.append(next(second))
        check(loader, batches)


def test_a_loop_that_goes_on_after_close_is_one(ints: Made) -> None:
    with loader_over(ints) as loader:
        batches = [*islice(loader, 5)]
        state = loader.state_dict()
        loader.close()
        loader.load_state_dict(state)
        batches += loader
        check(loader, batches)
        assert len(steps_of(loader).stretches) == 1


def test_a_rank_without_the_last_batch_counts_its_step(ints: Made) -> None:
    steps = []
    for r in range(3):
        with loader_over(ints, topology=rank(r, 3), tail="uneven", batch_size=5) as loader:
            batches = [len([*loader]) for _ in range(2)]
            steps.append((batches[0], steps_of(loader)))
    assert len({history for _, history in steps}) == 1
    assert steps[0][1].num_steps == 2 * -(-NUM_SAMPLES // 15)
    assert len({num for num, _ in steps}) > 1 or NUM_SAMPLES % 15 >= 3


def test_the_state_of_a_loader_that_has_not_begun_tells_of_no_step(ints: Made) -> None:
    with loader_over(ints) as loader:
        assert loader.state_dict()["history"] == "[0]"
        with pytest.raises(IndexError, match="step 0 is not known: of 0 steps, none is"):
            loader.provenance(0)


@pytest.mark.parametrize("batch_size", [4, 8, 2])
def test_steps_that_were_passed_over_held_nothing(ints: Made, batch_size: int) -> None:
    """Named as steps of batches of four; the run goes on with others."""
    with loader_over(ints, skip_steps=[(4, 6)]) as loader:
        batches = [*islice(loader, 2)]
        state = loader.state_dict()
    with loader_over(ints, batch_size=batch_size) as loader:
        loader.load_state_dict(state)
        batches += [batch for _ in range(2) for batch in loader]
        num_steps = steps_of(loader).num_steps
        table = loader.provenance(range(num_steps))
        delivered = [int(n) for batch in batches for n in batch["cls"].tolist()]
        assert [int(key) for key in table["key"].to_pylist()] == delivered
        passed = sorted({*range(num_steps)} - {*table["step"].to_pylist()})
        assert passed == {4: [4, 5], 8: [3], 2: [6, 7, 8, 9]}[batch_size]
        assert len(notes_of(table)) == len(passed)
        with pytest.raises(IndexError, match="was passed over, as skip_steps says"):
            loader.batch_at(passed[0])


def test_what_was_passed_over_of_an_epoch_that_ran_again_is_not_known(ints: Made) -> None:
    with loader_over(ints) as loader:
        assert len([*loader]) == 12
        loader.set_epoch(0)
        loader.skip_steps([(14, 16)])
        with pytest.raises(ValueError, match="as skip_steps said, is not known"):
            loader.provenance(2)
        assert loader.provenance(1).num_rows == 4
        assert len([*loader]) == 10
        with pytest.raises(ValueError, match="the training went back to an epoch that it had run"):
            loader.provenance(2)
        assert loader.provenance(12).num_rows == 4
