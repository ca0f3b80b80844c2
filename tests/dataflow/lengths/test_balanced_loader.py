"""`balance=` and `budget=` of a loader: costs that are stored, given, measured and kept make one plan."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import rank
from forked_kit import fast_ranks

from dataflow import DataLoader, Optional, Packed, ShardedDataset, ShardWriter
from sharding.errors import SampleError

N, LENGTH, MOST = 60, 16, 24


@pytest.fixture
def shards(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    with ShardWriter(f"{tmp_path}/%d.jsonl") as writer:
        for i in range(N):
            patches = [i] * int(rng.integers(0, 12) * (i % 3 > 0))
            tokens = [i + 1] * int(rng.integers(1, 9))
            writer.write({"tokens": tokens, "patches": patches, "cost": len(patches)})
    return f"{tmp_path}/*.jsonl"


def same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class Measured:
    """Makes samples as they are, and tells their lengths beforehand."""

    def __init__(self, **said: int) -> None:
        self.said, self.fingerprint = said, f"measured {said}"[:20]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def measure(self, sample: dict[str, Any]) -> dict[str, int]:
        return {name: len(sample[name]) for name in ("tokens", "patches")} | self.said


def loader_of(shards: str, r: int = 0, ranks: int = 1, *, made: Any = None, **settings: Any) -> DataLoader:
    settings = {"whole": ["patches"], "balance": "patches", "balance_group": 4, "window": 30} | settings
    batching = Packed(LENGTH, **{"budget": {"patches": MOST}} | settings)
    dataset = ShardedDataset(shards, transform=made)
    return DataLoader(
        dataset, shuffle=True, seed=3, batching=batching, topology=rank(r, ranks), num_workers=1
    )


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["tokens"].tokens[0].tolist() for batch in batches]


def costs_of(batch: Any) -> int:
    return sum(len(row) for row in batch["patches"].rows())


def test_no_row_is_above_the_budget_and_all_tokens_come(shards: str) -> None:
    with loader_of(shards) as loader:
        batches = list(loader)
        stats = loader.stats().lengths
    assert max(map(costs_of, batches)) <= MOST
    ids = {token for row in rows_of(batches) for token in row if token}
    assert ids == set(range(1, N + 1))
    assert stats is not None
    assert stats.cost_max_over_mean == 1.0  # one rank waits for none


@pytest.mark.parametrize("start", [0, 1, 7, 12])
def test_a_state_goes_on_on_other_ranks(shards: str, start: int) -> None:
    with loader_of(shards) as loader:
        batches = iter(loader)
        list(islice(batches, start))
        state = loader.state_dict()
        rest = rows_of(batches)
    resumed = []
    for r in range(2):
        with loader_of(shards, r, 2) as loader:
            loader.load_state_dict(state)
            resumed.append(rows_of(loader))
    together = [row for step in zip(*resumed, strict=True) for row in step]
    assert together[: len(rest)] == rest


def test_costs_that_are_given_or_measured_or_kept_make_the_same_plan(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with loader_of(shards) as loader:
        stored = rows_of(loader)
    with loader_of(shards, lengths={"tokens": "tokens", "patches": "cost"}) as loader:
        assert rows_of(loader) == stored
    with loader_of(shards, made=same, lengths={"tokens": "tokens", "patches": "cost"}) as loader:
        assert rows_of(loader) == stored
    for _ in ("measured", "kept"):
        with loader_of(shards, made=same, lengths_key="same") as loader:
            assert rows_of(loader) == stored
            assert rows_of(loader) != stored  # a second epoch
    for _ in ("told by measure", "kept"):
        with loader_of(shards, made=Measured()) as loader:
            assert rows_of(loader) == stored
            assert rows_of(loader) != stored  # a second epoch


def test_a_sample_alone_above_the_budget_is_named(shards: str) -> None:
    with pytest.raises(SampleError, match=r"'patches' counts .*, above budget=\{'patches': 5\}"):
        list(loader_of(shards, budget={"patches": 5}))
    with (
        loader_of(shards, made=same, budget={"patches": 5}) as loader,
        pytest.raises(SampleError, match=r"above budget=\{'patches': 5\}"),
    ):
        list(loader)


def test_lengths_must_tell_of_the_costs_too(shards: str) -> None:
    with pytest.raises(ValueError, match="does not tell of 'patches'"):
        list(loader_of(shards, made=same, lengths="tokens"))


def test_costs_that_are_not_as_was_said_are_an_error(shards: str) -> None:
    wrong = {"tokens": "tokens", "patches": np.zeros(N, np.int64)}
    with (
        loader_of(shards, made=same, lengths=wrong) as loader,
        pytest.raises(SampleError, match=r"column 'patches' has .* but its length was said to be 0"),
    ):
        list(loader)


def test_measure_tells_of_costs_too(shards: str) -> None:
    with (
        loader_of(shards, made=Measured(patches=2)) as loader,
        pytest.raises(SampleError, match=r"column 'patches' has .* but its length was said to be 2"),
    ):
        list(loader)
    with (
        loader_of(shards, made=Measured(), balance="pixels") as loader,
        pytest.raises(SampleError, match="without the length of 'pixels'"),
    ):
        list(loader)


def test_a_column_that_is_no_cost_is_named(shards: str) -> None:
    with (
        loader_of(shards, made=lambda sample: sample | {"cost": 0.5}, balance="cost") as loader,
        pytest.raises(SampleError, match=r"'cost' of balance= .* no whole number >= 0, nor a list"),
    ):
        list(loader)
    with (
        loader_of(shards, made=same, balance="pixels") as loader,
        pytest.raises(SampleError, match=r"'pixels' of balance= .* no whole number"),
    ):
        list(loader)


# ---- ranks ----------------------------------------------------------------------------------------------


class Pictures(Measured):
    """Makes patches [n, 3] of a quarter of the samples; others lack the column."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        patches = np.full((self.measure(sample)["patches"], 3), 0.5, np.float32)
        return {"tokens": sample["tokens"]} | ({"patches": patches} if len(patches) else {})

    def measure(self, sample: dict[str, Any]) -> dict[str, int]:
        has_any = sample["tokens"][0] % 4 == 0
        return {"tokens": len(sample["tokens"]), "patches": len(sample["patches"]) * has_any}


class Unmeasured:
    fingerprint = "unmeasured"

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return Pictures()(sample)


def of_rank(shards: str, kind: type[Any], state: Any, num: int) -> tuple[Any, ...]:
    """A rank's rows, and what each step costs it; the state after `num` batches; the figure."""
    whole = {"patches": Optional(default=np.zeros((0, 3), np.float32))}
    batching = Packed(
        LENGTH, whole=whole, balance="patches", balance_group=4, budget={"patches": MOST}, window=30
    )
    dataset = ShardedDataset(shards, transform=kind())
    rows, costs, after = [], [], None
    with DataLoader(dataset, shuffle=True, seed=3, batching=batching, num_workers=1, tail="uneven") as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            assert batch["patches"].values.shape[1:] == (3,)
            assert batch["patches"].values.dtype == torch.float32
            rows.append(batch["tokens"].tokens[0].tolist())
            costs.append(len(batch["patches"].values))
            after = loader.state_dict() if len(rows) == num else after
        stats = loader.stats().lengths
    assert stats is not None
    return rows, costs, after, stats.cost_max_over_mean


def of_world(shards: str, kind: type[Any], num_ranks: int, state: Any = None, num: int = 3) -> Any:
    """The rows in the order of the plan, costs by step, the state after `num` steps, and the figure."""
    cache = {"XDG_CACHE_HOME": f"{shards.removesuffix('/*.jsonl')}/../cache{num_ranks}{state is None}"}
    ranks = fast_ranks(of_rank, num_ranks, args=(shards, kind, state, num), timeout_s=60, env=cache)
    rows = [row for step in zip_longest(*(own[0] for own in ranks)) for row in step if row]
    assert len({own[3] for own in ranks}) == 1
    return rows, [*zip(*(own[1] for own in ranks), strict=False)], ranks[0][2], ranks[0][3]


@pytest.mark.parametrize("kind", [Pictures, Unmeasured])
def test_ranks_have_like_costs_and_resume_on_other_ranks(shards: str, kind: type[Any]) -> None:
    rows, costs, state, figure = of_world(shards, kind, 2)
    assert Counter(token for token in chain(*rows) if token).keys() == {*range(1, N + 1)}
    assert any(not any(step) for step in costs)
    assert sum(0 in step and any(step) for step in costs) <= 2  # one at most in a packing window
    assert 1.0 < figure < 1.3
    paid = [max(step) / (sum(step) / 2) for step in costs if any(step)]
    assert figure == pytest.approx(sum(paid) / len(paid))
    alone, *_ = of_world(shards, kind, 1)
    assert alone == rows
    for num_ranks in (1, 2):
        assert of_world(shards, kind, num_ranks, state)[0] == rows[6:]


def test_rows_without_a_column_must_be_told_what_they_hold(shards: str) -> None:
    with pytest.raises(ValueError, match=r"before a sample that has it.*Optional\(default="):
        loader_of(shards, made=Pictures(), whole={"patches": Optional()})


def test_a_state_of_rows_in_another_order_is_refused(shards: str) -> None:
    plain = {"balance": None, "budget": {}}
    with loader_of(shards, **plain) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert not any(name in state["batching"] for name in ("balance", "budget"))
    with loader_of(shards, **plain) as loader:
        loader.load_state_dict(state)
    with loader_of(shards) as loader, pytest.raises(ValueError, match="give balance=None"):
        loader.load_state_dict(state)
