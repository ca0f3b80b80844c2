"""Weights that are set while a mixture runs: from which batch on, on all ranks, in states."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from datasets_kit import edited, make_ints_tar, make_jsonl, make_parquet
from forked_kit import fast_ranks

from dataflow import DataLoader, Mixture, ShardedDataset, Shuffle
from sharding.errors import DataflowError

SIZES = (60, 40, 30)
BATCH = 6


@pytest.fixture
def sources(tmp_path: Path) -> list[ShardedDataset]:
    return opened(tmp_path)


def opened(folder: Path) -> list[ShardedDataset]:
    """Three datasets that deliver a number, which tells the source by its thousands."""
    found = []
    makers = ((make_parquet, "label"), (make_jsonl, "label"), (make_ints_tar, "cls"))
    for number, ((make, column), size) in enumerate(zip(makers, SIZES, strict=True)):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        made = make(own, num_samples=size)
        found.append(made.open(columns={"n": column}, transform=Thousands(number)))
    return found


class Thousands:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": int(sample["n"]) + 1000 * (1 + self.number)}


def loader_of(mixture: Any, **options: Any) -> DataLoader:
    options = {"num_workers": 0, "shuffle": Shuffle("window", 2), "seed": 3, **options}
    return DataLoader(mixture, options.pop("batch_size", BATCH), **options)


def shares_of(numbers: list[int]) -> list[float]:
    counted = Counter(n // 1000 - 1 for n in numbers)
    return [counted[source] / len(numbers) for source in range(len(SIZES))]


def run(loader: DataLoader, changes: dict[int, Any], epochs: int = 1) -> list[list[int]]:
    """All batches of some epochs; weights are set after so many batches."""
    got: list[list[int]] = []
    for _ in range(epochs):
        for batch in loader:
            got.append(batch["n"].tolist())
            if len(got) in changes:
                loader.dataset.set_weights(changes[len(got)])
    return got


def mixture_of(sources: list[ShardedDataset], **options: Any) -> Mixture:
    return Mixture(dict(zip(sources, (0.5, 0.3, 0.2), strict=True)), **options)


# ---- one rank -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_batch_has_the_new_shares_and_no_source_begins_anew(
    sources: list[ShardedDataset], workers: int
) -> None:
    with loader_of(mixture_of(sources, stop="never"), num_workers=workers) as loader:
        loop = iter(loader)
        before = [n for batch in islice(loop, 5) for n in batch["n"].tolist()]
        loader.dataset.set_weights([0.1, 0, 0.9])
        after = [n for batch in islice(loop, 4) for n in batch["n"].tolist()]
    assert shares_of(before) == pytest.approx([0.5, 0.3, 0.2], abs=1 / 30)
    assert shares_of(after) == pytest.approx([0.1, 0, 0.9], abs=1 / 24)
    assert len({*before, *after}) == len(before) + len(after), "no sample comes again while some are left"


def test_what_came_before_and_comes_without_a_change_is_the_same(sources: list[ShardedDataset]) -> None:
    with loader_of(mixture_of(sources)) as loader:
        plain = run(loader, {}, 2)
    with loader_of(mixture_of(sources)) as loader:
        changed = run(loader, {4: [1, 1, 1]}, 2)
    assert changed[:4] == plain[:4]
    assert changed[4] != plain[4]


def test_epochs_end_by_their_rule_and_later_ones_have_the_weights(sources: list[ShardedDataset]) -> None:
    with loader_of(mixture_of(sources, stop="all")) as loader:
        seen: list[list[int]] = []
        for epoch in range(3):
            own = []
            for number, batch in enumerate(loader):
                own += batch["n"].tolist()
                if (epoch, number) == (0, 3):
                    loader.dataset.set_weights([1, 1, 2])
            seen.append(own)
    for own in seen:
        assert {n // 1000 for n in own} == {1, 2, 3}
    assert len({*seen[0]}) == sum(SIZES), "all of every source"
    assert shares_of(seen[2]) == pytest.approx([1 / 4, 1 / 4, 1 / 2], abs=1 / len(seen[2]))


def test_weights_set_before_a_loop_hold_from_its_first_batch(sources: list[ShardedDataset]) -> None:
    mixture = mixture_of(sources)
    with loader_of(mixture) as loader:
        mixture.set_weights([0, 1, 0])
        assert {n // 1000 for batch in loader for n in batch["n"].tolist()} == {2}
        mixture.set_weights({sources[0]: 1})
        assert {n // 1000 for batch in loader for n in batch["n"].tolist()} == {1}


def test_what_was_read_ahead_of_the_next_epoch_is_dropped_whoever_looks_first(
    sources: list[ShardedDataset],
) -> None:
    mixture = mixture_of(sources)
    with loader_of(mixture) as loader:
        run(loader, {})
        mixture.set_weights([1, 0, 0])
        loader.state_dict()
        assert {n // 1000 for batch in run(loader, {}) for n in batch} == {1}


def test_a_schedule_ends_where_weights_are_set(sources: list[ShardedDataset]) -> None:
    mixture = Mixture(sources, schedule={0: [1, 1, 0], 18: [0, 0, 1]}, stop="never")
    with loader_of(mixture) as loader:
        loop = iter(loader)
        next(loop)
        mixture.set_weights([1, 0, 0])
        assert {n // 1000 for batch in islice(loop, 8) for n in batch["n"].tolist()} == {1}


def test_draws_of_several_samples_change_where_one_begins(sources: list[ShardedDataset]) -> None:
    mixture = Mixture(dict.fromkeys(sources, 1), run_length=BATCH, stop="all")
    with loader_of(mixture) as loader:
        batches = run(loader, {3: [0, 1, 1]})
    assert all(len({n // 1000 for n in batch}) == 1 for batch in batches)
    assert {batch[0] // 1000 for batch in batches[3:]} == {2, 3}
    with (
        loader_of(Mixture(dict.fromkeys(sources, 1), run_length=4)) as loader,
        pytest.raises(ValueError, match="between two draws of run_length=4"),
    ):
        run(loader, {1: [0, 1, 1]})


# ---- states ---------------------------------------------------------------------------------------------


def test_weights_set_for_an_epoch_of_before_end_those_that_were_set_later(
    sources: list[ShardedDataset],
) -> None:
    with loader_of(mixture_of(sources)) as loader:
        first = run(loader, {3: [0, 0, 1]})
        loader.set_epoch(0)
        again = run(loader, {2: [1, 0, 0]})
    assert again[:2] == first[:2]
    assert {n // 1000 for batch in again[2:] for n in batch} == {1}


def test_a_change_of_weights_takes_fifty_bytes_of_a_state_and_at_most_64_are_kept(
    sources: list[ShardedDataset],
) -> None:
    mixture, states, whole = mixture_of(sources, stop="never"), [], []
    with loader_of(mixture) as loader:
        loop = iter(loader)
        for number in range(70):
            states.append(loader.state_dict())
            whole.append(next(loop)["n"].tolist())
            mixture.set_weights([1 + number % 7, 1 + number % 5, 1 + number % 3])
        following = [next(loop)["n"].tolist() for _ in range(3)]
        sizes = [len(json.dumps(state)) for state in states]
        assert sizes[1] < sizes[0] + 100
        assert max(sizes) < sizes[1] + 64 * 50
        loader.set_epoch(0)
        with pytest.raises(ValueError, match="cannot begin anew: weights were set more than 64 times"):
            next(iter(loader))
    for cut in (1, 63, 64, 65, 69):
        with loader_of(mixture_of(sources, stop="never")) as loader:
            loader.load_state_dict(json.loads(json.dumps(states[cut])))
            assert next(iter(loader))["n"].tolist() == whole[cut]
            if cut < 64:
                loader.set_epoch(0)
                loop = iter(loader)
                assert [next(loop)["n"].tolist() for _ in range(cut)] == whole[:cut]
    assert len({*map(tuple, whole + following)}) == 73


def test_a_state_of_sixteen_sources_is_small(sources: list[ShardedDataset]) -> None:
    many = [sources[0].take(60 - i) for i in range(16)]
    mixture = Mixture(dict.fromkeys(many, 1), stop="never")
    with loader_of(mixture) as loader:
        loop = iter(loader)
        for _ in range(30):
            next(loop)
        mixture.set_weights([i + 1 for i in range(16)])
        assert len(json.dumps(loader.state_dict())) < 1000


def test_damaged_weights_of_a_state_are_refused_by_name(sources: list[ShardedDataset]) -> None:
    with loader_of(mixture_of(sources)) as loader:
        run_on = iter(loader)
        next(run_on)
        loader.dataset.set_weights([1, 1, 1])
        state = loader.state_dict()
        good = json.loads(state["weights"])
        shares = "1/3 1/3 1/3"
        assert good == {"steps": [[0, 6, shares]]}
        for wrong in (
            {"steps": [[0, 6, "1/3 1/3 1/3 0"]]},
            {"steps": [[0, 6, "1/3 a 1/3"]]},
            {"steps": [[0, 6, "1/3  1/3"]]},
            {"steps": [[0, 6, "1/0 1 1"]]},
            {"steps": [[0, 6, "-1 1 1"]]},
            {"steps": [[0, 6, "0 0 0"]]},
            {"steps": [[0, 6, shares], [0, 6, shares]]},
            {"steps": [[1, 0, shares], [0, 6, shares]]},
            {"steps": [[0, -6, shares]]},
            {"steps": [[True, 6, shares]]},
            {"steps": [[0, 6, ["1/3", "1/3", "1/3"]]]},
            {"steps": [0, 6, shares]},
            {"steps": []},
            {"steps": "0"},
            {},
            {**good, "first": [0, 0, 0]},
            {**good, "first": [0, 0, 0], "given": [1, 1, 1]},
            {**good, "first": [0, 0, True], "given": [2, 2, 2]},
            {**good, "first": [0, 0, 0], "given": [8, -2, 0]},
            {**good, "first": [0, 0, 0, 0], "given": [2, 2, 2]},
            {**good, "more": 1},
            [1],
            "{",
            "[1]",
        ):
            with pytest.raises(ValueError, match="weight"):
                loader.load_state_dict(edited(state, weights=wrong))
    with loader_of(sources[0]) as other, pytest.raises(ValueError, match="a mixture, and this"):
        other.load_state_dict(state)


# ---- ranks ----------------------------------------------------------------------------------------------


def sets_unlike(sources: list[ShardedDataset]) -> list[str]:
    mixture, said = mixture_of(sources), []
    for weights in ([[1, 1, 1], [1, 1, 2]], [[1, 1, 1], [1, 1, -1]]):
        with pytest.raises(ValueError, match="weights") as caught:
            mixture.set_weights(weights[dist.get_rank()])
        said.append(str(caught.value))
    return said


def test_ranks_that_set_unlike_weights_are_all_told(sources: list[ShardedDataset]) -> None:
    for said in fast_ranks(sets_unlike, 2, args=(sources,), timeout_s=60):
        assert "rank 0: 1/3 1/3 1/3; rank 1: 1/4 1/4 1/2" in said[0]
        assert "rank 1: weights must be finite numbers >= 0" in said[1]


def sets_alone(sources: list[ShardedDataset]) -> str:
    with loader_of(mixture_of(sources), timeout=0.5) as loader:
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(DataflowError, match=r"did not call set_weights within 0\.5 s") as caught:
            loader.dataset.set_weights([1, 1, 2])
        return str(caught.value)


def test_a_rank_that_sets_weights_alone_is_told_in_the_loader_s_time(sources: list[ShardedDataset]) -> None:
    assert fast_ranks(sets_alone, 2, args=(sources,), timeout_s=60)[0]


# ---- what is refused --------------------------------------------------------------------------------------


def test_what_are_no_weights_is_refused(sources: list[ShardedDataset]) -> None:
    mixture = mixture_of(sources)
    for weights in ([1, 1], [0, 0, 0], [1, -1, 1], [np.nan, 1, 1], {object(): 1}):
        with pytest.raises(ValueError, match="weight"):
            mixture.set_weights(weights)
    assert mixture.weights_set is None
    with pytest.raises(ValueError, match="set_weights needs a mixture by weights"):
        Mixture(sources, repeats=[1, 1, 1]).set_weights([1, 1, 1])


def test_the_mixture_of_a_loader_shows_weights_that_wait_and_from_which_sample_on_they_hold(
    sources: list[ShardedDataset],
) -> None:
    mixture = Mixture(dict(zip(sources, (2, 1, 1), strict=True)), stop="all")
    with loader_of(mixture) as loader, loader_of(sources[0]) as single:
        assert single.mixture is None
        assert "weights" not in repr(loader.mixture)
        loop = iter(loader)
        next(loop), next(loop)
        mixture.set_weights([0, 1, 3])
        text = f"weights 0, 0.25, 0.75 from sample {2 * BATCH} of epoch 0 on"
        assert text in repr(loader.mixture)
        assert text in loader.mixture._repr_html_()
        next(loop)
        assert text in repr(loader.mixture), "they hold now"
        assert "weights" not in repr(mixture), "other loaders over it may stand elsewhere"
