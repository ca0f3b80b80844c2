"""`balance=` and `budget=` of a loader: costs that are stored, given, measured and kept make one plan."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import rank

from dataflow import DataLoader, Packed, ShardedDataset, ShardWriter
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
