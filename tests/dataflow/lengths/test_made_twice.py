"""Samples without `measure` that do not fit while they wait to be planned: made to measure, and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from forked_kit import fast_ranks
from test_measured_lengths import (
    IN_FILES,
    NUM_DOCUMENTS,
    document,
    loader_of,
    segments_of,
    units_of,
    whole_batches,
    write,
)

from dataflow import Packed
from sharding.errors import SampleError

BATCHING = Packed(32, columns=["tokens"], whole=["pixels"], overlong="error", window=40)
ROWS, SMALL, LARGE = 20, 1 << 21, 1 << 30
"""Rows of 1,000 pixels; limits with room for half of a packing window's samples, and for all."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "data")


class Pictures:
    """Tokens and pixels, a random number in these; the latter are large from one sample on."""

    def __init__(self, large_from: int = 0) -> None:
        self.made: Counter[tuple[int, int]] = Counter()
        self.large_from = large_from

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        n = sample["n"]
        drawn = int(rng.integers(1 << 30))
        self.made[n, drawn] += 1
        num = 5 * ROWS if n >= self.large_from else 1
        return {"tokens": document(n), "pixels": np.full((num, 1000), drawn % 251, np.uint8), "drawn": drawn}


def batch_of(batch: Mapping[str, Any]) -> tuple[Any, list[int], list[tuple[int, set[int]]]]:
    """Tokens of each row, what was drawn for each sample, and how many pixels it has, with their values."""
    pixels = [(len(own), {*own.numpy()[:, ::99].flat}) for own in batch["pixels"].rows()]
    return segments_of(batch["tokens"]), batch["drawn"].tolist(), pixels


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return sum("is made to be measured now, and again with its row" in line for line in caplog.messages)


@pytest.mark.parametrize("large_from", [0, NUM_DOCUMENTS // 2], ids=["from the first", "later"])
@pytest.mark.parametrize("builders", [{}, {"num_workers": 2, "workers": "thread"}], ids=["here", "threads"])
def test_batches_are_those_of_samples_that_are_made_once(
    folder: Path, large_from: int, builders: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    in_file_order = {"shuffle": None if large_from else True, **builders}
    with loader_of(folder, BATCHING, Pictures(large_from), memory_limit=LARGE, **in_file_order) as loader:
        expected = [[*map(batch_of, loader)] for _ in range(2)]
        assert [[rows for rows, _, _ in epoch] for epoch in expected] == [
            whole_batches(units_of(loader, epoch), 3) for epoch in range(2)
        ]
    assert not warned(caplog)
    pictures = Pictures(large_from)
    with loader_of(folder, BATCHING, pictures, memory_limit=SMALL, **in_file_order) as loader:
        assert [[*map(batch_of, loader)] for _ in range(2)] == expected
        assert loader.stats().skipped_samples == 0
    assert warned(caplog) == 1
    assert max(pictures.made.values()) <= 3  # what was made when it showed is dropped
    assert 2 in pictures.made.values()


def test_what_is_held_fits_the_limit(folder: Path) -> None:
    with loader_of(folder, BATCHING, Pictures(), memory_limit=SMALL) as loader:
        held = [loader.stats().memory for _ in loader]
    assert max(one.in_use_bytes + one.ready_bytes + one.building_bytes for one in held) < SMALL


@pytest.mark.parametrize("limits", [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_state_goes_on_within_another_limit(folder: Path, limits: tuple[int, int]) -> None:
    with loader_of(folder, BATCHING, Pictures(), memory_limit=LARGE) as loader:
        expected = [*map(batch_of, loader)]
    for cut in (1, 5, len(expected) - 1):
        with loader_of(folder, BATCHING, Pictures(), memory_limit=limits[0]) as loader:
            assert [batch_of(batch) for batch in islice(loader, cut)] == expected[:cut]
            state = loader.state_dict()
        with loader_of(folder, BATCHING, Pictures(), memory_limit=limits[1]) as loader:
            loader.load_state_dict(state)
            assert [*map(batch_of, loader)] == expected[cut:]


def of_rank(folder: Path, limits: list[int]) -> Any:
    options: dict[str, Any] = {"batch_size": 2, "memory_limit": limits[dist.get_rank()], "tail": "uneven"}
    with loader_of(folder, BATCHING, Pictures(), **options) as loader:
        return [[*map(batch_of, loader)] for _ in range(2)]


@pytest.mark.parametrize("limits", [[SMALL, SMALL], [LARGE, SMALL]], ids=["on all", "on one"])
def test_where_it_does_not_fit_on_one_rank_all_go_on_alike(folder: Path, limits: list[int]) -> None:
    few = [limit // 3 if limit == SMALL else limit for limit in limits]  # a rank makes its share
    fits, does_not = (
        fast_ranks(of_rank, 2, args=(folder, own), timeout_s=90) for own in ([LARGE, LARGE], few)
    )
    assert does_not == fits
    assert sum(len(row) for own in fits for rows, _, _ in own[0] for row in rows) == sum(
        bool(document(n)) for n in range(NUM_DOCUMENTS)
    )


def bad(sample: Mapping[str, Any], rng: np.random.Generator) -> Any:
    n = sample["n"]
    if n == IN_FILES[3]:
        raise ValueError("bad one")
    made = Pictures()(sample, rng)
    del made["drawn"]
    if n == IN_FILES[30]:
        return {**made, "tokens": "text"}
    if n == IN_FILES[50]:
        return {"pixels": made["pixels"]}
    return {**made, "tokens": document(n) * 4 if n == IN_FILES[60] else document(n)}


@pytest.mark.parametrize("memory_limit", [SMALL, LARGE])
def test_bad_samples_are_left_out_and_counted_alike(folder: Path, memory_limit: int) -> None:
    with loader_of(folder, BATCHING, bad, memory_limit=memory_limit, on_error="skip", shuffle=None) as loader:
        tokens = [batch["tokens"].tokens.flatten() for batch in loader]
        seen = {int(token) // 100 for token in chain(*tokens) if token}
        stats = loader.stats()
    too_long = len(document(IN_FILES[60])) * 4 > 32
    lacking = {IN_FILES[3], IN_FILES[30], IN_FILES[50], *([IN_FILES[60]] if too_long else [])}
    assert stats.skipped_samples == len(lacking)
    assert not seen & lacking
    assert "bad one" in str(stats.skipped)


def test_a_bad_sample_is_an_error_that_names_it(folder: Path) -> None:
    with (
        loader_of(folder, BATCHING, bad, memory_limit=SMALL) as loader,
        pytest.raises(SampleError, match="bad one"),
    ):
        list(loader)


def test_samples_that_are_cut_are_made_for_each_piece(folder: Path) -> None:
    def large(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": np.repeat(document(sample["n"]), 1000)}

    def of(limit: int) -> list[Any]:
        with loader_of(folder, Packed(8000, window=40), large, memory_limit=limit) as loader:
            return [batch["tokens"].tokens.tolist() for batch in loader]

    assert of(3 << 20) == of(LARGE)
