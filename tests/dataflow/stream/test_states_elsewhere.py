"""States loaded over other data or into other batches: inside an epoch one cause, between two the next.

A table of its own, beside the contracts: these keep that a state resumes in the same loader, this one how two
loaders differ.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import edited
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from dataflow import DataLoader, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget

Batches = list[list[Any]]


def write_lines(folder: Path, **shards: range) -> None:
    for name, numbers in shards.items():
        rows = [{"n": n, "tokens": [n] * (1 + n % 7)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Times:
    """A transform that a state knows by its fingerprint."""

    def __init__(self, factor: int) -> None:
        self.factor, self.fingerprint = factor, f"times {factor}"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"n": sample["n"] * self.factor}


def lines(folder: Path, pattern: str = "[ab].jsonl", **how: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / pattern), **{"block_bytes": 200, **how})


def tokens(folder: Path, length: int) -> ShardedDataset:
    if not (folder / "t.bin").exists():
        np.arange(400, dtype=np.uint16).tofile(folder / "t.bin")
    return ShardedDataset(
        str(folder / "t.bin"), format="tokens", dtype="uint16", length=length, block_bytes=64
    )


def numbers(batch: Any) -> list[Any]:
    """What a batch of any loader here holds, comparable."""
    if "n" in batch:
        return [int(n) for n in batch["n"]]
    rows = batch["tokens"]
    return (rows if hasattr(rows, "tolist") else rows.tokens).tolist()  # type: ignore[no-any-return]


@dataclass
class Differs:
    """Two loaders that differ in one thing, and what is said of it."""

    there: Callable[[Path], Any]
    here: Callable[[Path], Any]
    cause: str
    """A pattern, with both values."""
    cure: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the first loader."""
    other: Mapping[str, Any] | None = None
    """Of the second; None: the same."""

    def loaders(self, folder: Path) -> tuple[DataLoader, DataLoader]:
        write_lines(folder, a=range(40), b=range(40, 60), c=range(60, 100))
        how = {"batch_size": 4, "shuffle": True, "num_workers": 0}
        options = self.options if self.other is None else self.other
        first = DataLoader(self.there(folder), **{**how, "seed": 7, **self.options})
        return first, DataLoader(self.here(folder), **{**how, **options})


PACKED = {"batching": Packed(16, columns=["tokens"], window=16)}
DIFFERENCES = {
    "longer sequences": Differs(
        lambda folder: tokens(folder, 4),
        lambda folder: tokens(folder, 8),
        "length=4, .* length=8",
        "length=4",
    ),
    "more shards": Differs(
        lines, lambda f: lines(f, "*.jsonl"), "2 shards, .* 3 shards", "the shards that it"
    ),
    "other shards": Differs(
        lines, lambda f: lines(f, "[ac].jsonl"), r"names \w{8}, .* names \w{8}", "the shards that it had"
    ),
    "smaller blocks": Differs(
        lines, lambda f: lines(f, block_bytes=90), r"blocks \d+ \(.*blocks \d+ \(", "block_bytes="
    ),
    "a part": Differs(
        lines, lambda f: lines(f).take(30), r"no view, .* a view of samples 30 \(\w+\)", "the part of"
    ),
    "another part": Differs(
        lambda f: lines(f).take(40), lambda f: lines(f).take(30), "samples 40 .* samples 30", "the part of"
    ),
    "another transform": Differs(
        lambda f: lines(f, transform=Times(1)),
        lambda f: lines(f, transform=Times(2)),
        "fingerprint times 1, .* fingerprint times 2",
        "the transform= that it had",
    ),
    "a joined column": Differs(
        lines,
        lambda f: lines(f).join(lines(f, columns={"n": "n", "more": "tokens"}), on="n"),
        r"no joins, .* joined data \w+",
        "the join that it had, or none",
    ),
    "longer rows": Differs(
        lines,
        lines,
        "length=16, .* length=32",
        "length=16",
        PACKED,
        {"batching": Packed(32, columns=["tokens"], window=16)},
    ),
    "rows in place of samples": Differs(
        lines, lines, "batching=None, .* batching of kind packed", "the batching= that it had", {}, PACKED
    ),
    "another batching": Differs(
        lines,
        lines,
        "kind packed, .* kind token_budget",
        "batching=",
        PACKED,
        {"batching": TokenBudget(24), "batch_size": 1},
    ),
    "other lengths that a transform makes": Differs(
        lambda f: lines(f, transform=dict),
        lambda f: lines(f, transform=dict),
        "measured='one', .* measured='two'",
        "measured='one'",
        {"batching": Packed(16, columns=["tokens"], window=16, lengths_key="one")},
        {"batching": Packed(16, columns=["tokens"], window=16, lengths_key="two")},
    ),
    "a mixture": Differs(
        lambda f: lines(f),
        lambda f: Mixture([lines(f), lines(f, "c.jsonl")]),
        "a dataset, .* a mixture",
        "a dataset",
    ),
    "other weights": Differs(
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1}),
        lambda f: Mixture({lines(f): 3, lines(f, "c.jsonl"): 1}),
        "weights='1/2 1/2', .* weights='3/4 1/4'",
        "set_weights of the mixture changes at any batch",
    ),
    "a larger source": Differs(
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1}),
        lambda f: Mixture({lines(f): 1, lines(f, "[bc].jsonl"): 1}),
        r"a source 1 of 40 samples \(\w+\), .* a source 1 of 60 samples",
        "the source 1 that it had",
    ),
    "another source": Differs(
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1}),
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1, lines(f, "b.jsonl"): 1}),
        "2 sources with a share, .* 3 sources",
        "a new one comes last, with weight 0, until set_weights",
    ),
    "another end": Differs(
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1}),
        lambda f: Mixture({lines(f): 1, lines(f, "c.jsonl"): 1}, stop="all"),
        "stop='first', .* stop='all'",
        "stop='first'",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_inside_an_epoch_one_cause_is_named_with_both_values_and_a_way_on(name: str, tmp_path: Path) -> None:
    row = DIFFERENCES[name]
    first, other = row.loaders(tmp_path)
    with first, other:
        next(iter(first))
        before = other.state_dict()
        with pytest.raises(ValueError, match=rf"was taken with .*{row.cause}") as caught:
            other.load_state_dict(first.state_dict())
        said = str(caught.value)
        assert re.search(rf"go on inside the epoch, give .*{re.escape(row.cure)}", said), said
        assert "begin anew, without the state: seed=7 and loader.set_epoch(1) run the next epoch" in said
        assert other.state_dict() == before


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.one_in(2)
def test_between_two_epochs_the_next_one_is_that_of_these_data_with_the_states_seed(
    name: str, tmp_path: Path
) -> None:
    """As a loader runs it that was made with the seed and told the epoch; mixtures have their own tests."""
    row = DIFFERENCES[name]
    first, other = row.loaders(tmp_path)
    with first, other:
        if isinstance(other.dataset, Mixture):
            pytest.skip("what its sources have given is kept")
        for _ in range(2):
            list(first)
        state = json.loads(json.dumps(first.state_dict()))
        other.load_state_dict(state)
        assert (other.seed, other.epoch, other.state_dict()["position"]) == (7, 2, 0)
        got = [[numbers(batch) for batch in other] for _ in range(2)]
        options = {**row.options} if row.other is None else {**row.other}
        how = {"batch_size": 4, "shuffle": True, "num_workers": 0, "seed": 7}
        with DataLoader(row.here(tmp_path), **{**how, **options}) as fresh:
            fresh.set_epoch(2)
            assert [[numbers(batch) for batch in fresh] for _ in range(2)] == got
        next(batches := iter(other))  # its states are those of these data
        with DataLoader(row.here(tmp_path), **{**how, **options}) as resumed:
            resumed.load_state_dict(other.state_dict())
            assert [numbers(batch) for batch in resumed] == [numbers(batch) for batch in batches]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_after_the_last_batch_of_an_epoch_other_data_begin_the_next_one(name: str, tmp_path: Path) -> None:
    """Frameworks save there, inside their loop. In the same loader nothing more comes of that epoch."""
    row = DIFFERENCES[name]
    first, other = row.loaders(tmp_path)
    with first, other:
        if isinstance(other.dataset, Mixture) or first.batching is not None:
            pytest.skip("units and shares do not tell that it is the last batch")
        batches = iter(first)
        for _ in range(len(first)):
            next(batches)
        state = first.state_dict()
        other.load_state_dict(state)
        assert (other.seed, other.epoch, other.state_dict()["position"]) == (7, 1, 0)
        assert list(batches) == []
        other.load_state_dict(state)
        got = [numbers(batch) for batch in other]
        other.load_state_dict(first.state_dict())
        assert [numbers(batch) for batch in other] == got
        first.load_state_dict(state)
        assert list(first) == []


def test_a_loader_takes_its_own_order_whatever_it_had_loaded_before(tmp_path: Path) -> None:
    """Windows of the state of before are none of these data."""
    write_lines(tmp_path, a=range(40), b=range(40, 60), c=range(60, 100))
    how: dict[str, Any] = {"seed": 7, "num_workers": 0}
    with DataLoader(lines(tmp_path), 4, Shuffle("window", 2), **how) as small:
        same = small.state_dict()
    with DataLoader(lines(tmp_path, "*.jsonl"), 4, Shuffle("blocks", 2), **how) as grown:
        state = grown.state_dict()
    with (
        DataLoader(lines(tmp_path), 4, True, **how) as used,
        DataLoader(lines(tmp_path), 4, True, **how) as new,
    ):
        used.load_state_dict(same)
        used.load_state_dict(state)
        assert used.shuffle == new.shuffle
        assert [numbers(batch) for batch in used] == [numbers(batch) for batch in new]


# ---- mixtures ----------------------------------------------------------------------------------------


def mixed(*members: ShardedDataset, **how: Any) -> DataLoader:
    weights = how.pop("weights", [1] * len(members))
    mixture = Mixture(dict(zip(members, weights, strict=True)), **how)
    return DataLoader(mixture, 4, shuffle=True, seed=7, num_workers=0)


def test_a_source_that_stays_goes_on_where_it_was_and_one_that_grew_begins_its_next_epoch(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path, a=range(20), b=range(100, 140), c=range(140, 160))
    with mixed(lines(tmp_path, "a.jsonl"), lines(tmp_path, "b.jsonl"), weights=[2, 1]) as first:
        list(first)
        state = json.loads(json.dumps(first.state_dict()))
        given = state["sources"]
        assert given == [20, 10]
        rest = [numbers(batch) for batch in first]
    seen = Counter(n for n in chain(*rest) if n >= 100)
    # The first source has grown: it begins anew. The second goes on: the same samples as without the change.
    with mixed(lines(tmp_path, "[ac].jsonl"), lines(tmp_path, "b.jsonl"), weights=[2, 1]) as second:
        second.load_state_dict(state)
        got = [numbers(batch) for batch in second]
        assert Counter([n for n in chain(*got) if 100 <= n < 140][: seen.total()]) == seen
        assert sorted(n for n in chain(*got) if not 100 <= n < 140) == [*range(20), *range(140, 160)]
        middle = second.state_dict()
    with mixed(lines(tmp_path, "[ac].jsonl"), lines(tmp_path, "b.jsonl"), weights=[2, 1]) as third:
        third.load_state_dict(middle)
        assert [numbers(batch) for batch in third] == [numbers(batch) for batch in second]


@pytest.mark.parametrize("cut", [0, 2])
def test_states_of_a_mixture_that_went_on_as_another_one_resume(cut: int, tmp_path: Path) -> None:
    write_lines(tmp_path, a=range(20), b=range(100, 140), c=range(200, 230))
    a, b, c = (lines(tmp_path, f"{name}.jsonl") for name in "abc")
    with mixed(a, b) as first:
        list(first)
        state = first.state_dict()
    with mixed(a, b, c, weights=[1, 2, 1], stop="all") as second:
        second.load_state_dict(state)
        list(second)
        loop = iter(second)
        for _ in range(cut):
            next(loop)
        middle = json.loads(json.dumps(second.state_dict()))
        rest = [numbers(batch) for batch in loop]
    with mixed(a, b, c, weights=[1, 2, 1], stop="all") as third:
        third.load_state_dict(middle)
        assert [numbers(batch) for batch in third] == rest


def test_weights_that_were_set_go_on_in_the_mixture_that_has_grown(tmp_path: Path) -> None:
    write_lines(tmp_path, a=range(40), b=range(100, 140), c=range(200, 230))
    a, b, c = (lines(tmp_path, f"{name}.jsonl") for name in "abc")
    with mixed(a, b) as first:
        next(iter(first))
        first.dataset.set_weights([3, 1])
        first.set_epoch(1)
        state = first.state_dict()
        assert state["position"] == 0
    with mixed(a, b, c, weights=[1, 1, 1]) as second:
        second.load_state_dict(state)
        batches = [numbers(batch) for batch in second]
    assert Counter(n // 100 for n in chain(*batches[:5])) == {0: 15, 1: 5}


def test_a_mixture_that_cannot_know_what_its_sources_gave_says_so(tmp_path: Path) -> None:
    write_lines(tmp_path, a=range(20), b=range(100, 140), c=range(200, 230))
    a, b, c = (lines(tmp_path, f"{name}.jsonl") for name in "abc")
    with mixed(a, b) as first, DataLoader(a, 4, seed=7) as single:
        list(first)
        list(single)
        state, alone = first.state_dict(), single.state_dict()
    with mixed(b, a) as swapped, pytest.raises(ValueError, match=r"source 0 .* has number 1 in the state"):
        swapped.load_state_dict(state)
    with mixed(a, b, c) as other:
        for untold in (alone, edited(state, data=None), edited(state, sources=None)):
            with pytest.raises(ValueError, match="does not tell what each source has given before epoch 1"):
                other.load_state_dict(untold)
        with pytest.raises(ValueError, match="data must be"):
            other.load_state_dict(edited(state, data={"sources": 1}))
    schedule = Mixture([a, c], schedule={0: [1, 0], 30: [1, 1]})
    with DataLoader(schedule, 4) as other, pytest.raises(ValueError, match="a schedule counts samples"):
        other.load_state_dict(state)
    with DataLoader(Mixture({a: 1, c: 1}, stop="never"), 4) as other:
        before = other.state_dict()
        with pytest.raises(ValueError, match="no epoch 1 of a mixture with stop='never'"):
            other.load_state_dict(state)
        assert other.state_dict() == before


# ---- samplers that say the order of the files ----------------------------------------------------------


def test_a_sequential_sampler_of_this_very_dataset_is_the_order_of_the_files(tmp_path: Path) -> None:
    """As Lightning puts it in for `overfit_batches`, with torch's own collate_fn and builders that were."""
    write_lines(tmp_path, a=range(40), b=range(40, 60))
    dataset, other = lines(tmp_path), lines(tmp_path)
    how: dict[str, Any] = {"sampler": SequentialSampler(dataset), "collate_fn": default_collate}
    for more in ({}, {"num_workers": 0, "workers": "thread"}, {"batching": Packed(16, columns=["tokens"])}):
        with DataLoader(dataset, 4, **how, **more) as loader:
            assert loader.shuffle.kind == "none"
            assert sorted(next(iter(loader))) == ["n", "tokens"]
    for sampler in (SequentialSampler(other), RandomSampler(dataset), range(60)):
        with pytest.raises(ValueError, match="sampler= cannot be used here"):
            DataLoader(dataset, 4, sampler=sampler)
    with pytest.raises(ValueError, match="sampler= cannot be used here"):
        DataLoader(dataset, 4, shuffle=True, sampler=SequentialSampler(dataset))


def test_a_loader_has_its_arguments_as_they_were_given_for_whoever_makes_it_anew(tmp_path: Path) -> None:
    write_lines(tmp_path, a=range(40))
    given: dict[str, Any] = {"seed": 3, "tail": "drop", "memory_limit": "9MB", "mark_repeats": True}
    with DataLoader(lines(tmp_path, "a.jsonl"), 4, **given) as loader:
        assert {name: vars(loader)[name] for name in given} == given
        assert loader.memory_limit == 9_000_000
    with DataLoader(range(4), memory_limit="9MB") as loader:
        assert loader.memory_limit == 9_000_000
        with pytest.raises(AttributeError, match="has 'seed' over shards only"):
            _ = loader.seed
