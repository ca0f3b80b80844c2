"""`loader.stats()` as a table, as the figures of an interval and as plain numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow import DataLoader, LoaderStats, ShardedDataset, ShardWriter, WorkerStats
from dataflow.tables import html_table, text_table
from prefetch.control.depth import Decision
from prefetch.counts import CacheStats
from prefetch.engine.stats import NOT_STARTED, StageStats
from sharding.lengths.units import LengthStats

EARLIER: Any = LoaderStats(
    **vars(replace(NOT_STARTED, elapsed_s=2.0, starved_s=1.0, read=StageStats(2, 1.5, 10, 4))),
    read_bytes=1000,
    num_workers=2,
    workers="thread",
    cache=CacheStats(hits=1, misses=3),
    samples=100,
    batches=10,
    first_batch_s=0.5,
    window=Decision(4, "as given"),
    skipped_samples=1,
    skipped=("a",),
    empty_batches=0,
    image_warnings={"no end mark": 1},
    untrained_samples=0,
    read_amplification=1.5,
    lengths=LengthStats(units=1, tokens=6, capacity=8),
    mapped_bytes=0,
    unfinished_shards=0,
)
LATER = replace(
    EARLIER,
    **vars(replace(NOT_STARTED, elapsed_s=6.0, starved_s=1.5, read=StageStats(4, 3.5, 30, 2), depth=7)),
    read_bytes=5000,
    num_workers=3,
    cache=CacheStats(hits=9, misses=3),
    samples=500,
    batches=30,
    skipped_samples=3,
    skipped=("a", "b", "c"),
    image_warnings={"no end mark": 3, "leftover bytes before the end mark": 2},
    lengths=LengthStats(units=5, tokens=30, capacity=40),
)
WORKERS = WorkerStats(
    batches=4,
    delivered_bytes=400,
    elapsed_s=2.0,
    starved_s=1.0,
    first_batch_s=0.5,
    num_workers=2,
    workers="process",
    workers_reason="workers=None",
    ahead_batches=3,
    ready_batches=1,
    shared_bytes=1000,
    worker_pids=(8, 9),
)

FLAT_OF_WORKERS = {
    *("ahead_batches", "batches", "batches_per_s", "delivered_bytes", "delivered_bytes_per_s", "elapsed_s"),
    *("first_batch_s", "num_workers", "ready_batches", "shared_bytes", "stall_share", "starved_s"),
}
COUNTS = {
    *("batches", "decoded_bytes", "delivered_bytes", "elapsed_s", "empty_batches", "few_chunks_s"),
    "image_warnings",
    *("read_bytes", "samples", "skipped_samples", "starved_s", "untrained_samples"),
    *("build.busy_s", "build.cpu_s", "build.tasks", "read.busy_s", "read.cpu_s", "read.tasks"),
    *("cache.errors", "cache.evicted", "cache.evicted_bytes", "cache.hit_bytes", "cache.hits"),
    *("cache.miss_bytes", "cache.misses", "cache.passed", "cache.stored_bytes", "cache.waited"),
    *("faults.checksum_failures", "faults.hedge_bytes", "faults.hedges", "faults.hedges_won"),
    *("faults.resumed", "faults.retries", "faults.throttled", "faults.timeouts"),
}
RATES = {"batches_per_s", "delivered_bytes_per_s", "read_bytes_per_s", "samples_per_s", "stall_share"}
NOW = {
    *("build.queued", "build.threads", "depth", "first_batch_s", "in_flight_limit", "mapped_bytes"),
    *("memory.building_bytes", "memory.in_use_bytes", "memory.limit_bytes", "memory.peak_bytes"),
    *("memory.ready_bytes", "memory.window_bytes", "num_workers", "read.queued", "read.threads"),
    *("read_amplification", "ready_batches", "unfinished_shards", "window_blocks"),
}
LENGTHS = {
    *(
        "lengths.capacity",
        "lengths.cost_max_over_mean",
        "lengths.efficiency",
        "lengths.empty",
        "lengths.segments",
        "lengths.split",
    ),
    *("lengths.tokens", "lengths.truncated", "lengths.truncated_tokens", "lengths.units"),
}


def test_names_of_flat_figures_stay() -> None:
    assert LATER.flat().keys() == COUNTS | RATES | NOW | LENGTHS
    assert replace(LATER, lengths=None).flat().keys() == COUNTS | RATES | NOW
    assert WORKERS.flat().keys() == FLAT_OF_WORKERS
    assert all(type(value) is float for value in {**LATER.flat(), **WORKERS.flat()}.values())


def test_flat_figures_are_the_values_of_the_attributes() -> None:
    flat = LATER.flat()
    assert (flat["samples"], flat["read.busy_s"], flat["cache.hits"]) == (500, 3.5, 9)
    assert (flat["lengths.efficiency"], flat["image_warnings"]) == (0.75, 5)
    assert flat["samples_per_s"] == LATER.samples_per_s == 500 / 6


def test_the_figures_of_an_interval_are_those_between_two_snapshots() -> None:
    between = LATER.since(EARLIER)
    assert (between.samples, between.batches, between.read_bytes) == (400, 20, 4000)
    assert (between.elapsed_s, between.samples_per_s, between.stall_share) == (4.0, 100.0, 0.125)
    assert (between.cache.hits, between.cache.misses) == (8, 0)
    assert (between.read.busy_s, between.read.tasks) == (2.0, 20)
    assert (between.skipped_samples, between.skipped) == (2, ("b", "c"))
    assert between.image_warnings == {"no end mark": 2, "leftover bytes before the end mark": 2}


def test_what_holds_at_one_time_is_that_of_the_newer_snapshot() -> None:
    between, later = LATER.since(EARLIER).flat(), LATER.flat()
    assert {name: between[name] for name in NOW | LENGTHS} == {name: later[name] for name in NOW | LENGTHS}
    zero = LATER.since(LATER).flat()
    assert {zero[name] for name in COUNTS | RATES} == {0.0}
    assert LATER.since(EARLIER).workers == "thread"


def test_intervals_of_workers_add_up() -> None:
    later = replace(WORKERS, batches=10, elapsed_s=5.0, starved_s=1.0, worker_pids=(8, 9))
    between = later.since(WORKERS)
    assert (between.batches, between.batches_per_s, between.stall_share) == (6, 2.0, 0.0)
    assert (between.worker_pids, between.num_workers) == ((8, 9), 2)


def test_a_snapshot_that_is_not_older_is_refused() -> None:
    with pytest.raises(ValueError, match=r"its batches is 30 and this one's is 10; call newer\.since\(older"):
        EARLIER.since(LATER)
    with pytest.raises(ValueError, match="earlier must be a LoaderStats, got WorkerStats"):
        LATER.since(WORKERS)


def test_a_loaders_own_snapshots_have_an_interval_and_a_table_of_one_screen(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "%02d.parquet"), max_count=4) as shards:
        for i in range(16):
            shards.write({"x": i})
    with DataLoader(ShardedDataset(str(tmp_path / "*.parquet")), batch_size=4, shuffle=True) as loader:
        before = loader.stats()
        list(loader)
        between = loader.stats().since(before)
    assert between.samples == 16
    table = str(between).splitlines()
    assert len(table) <= 24
    assert max(map(len, table)) <= 100
    assert table[0].startswith("LoaderStats of ")
    assert [line.split()[:2] for line in table[1:3]] == [["samples", "16,"], ["batches", "4,"]]


def test_the_table_has_what_was_skipped_cached_and_packed() -> None:
    table = str(LATER)
    for line in (
        "samples      500, 83.3/s",
        "waited       1.5 s, 25.0% of the time",
        "builders     3 threads",
        "read         15% of 4 busy, 30 tasks, 2 wait",
        "bytes read   5 kB, 833 bytes/s; the ranks read each byte 1.5 times",
        "window       4 blocks: as given",
        "cache        75.0% hits, 9 hits, 3 misses",
        "skipped      3 samples, 0 empty batches",
        "lengths      75.0% of the places filled",
        "images       3 no end mark, 2 leftover bytes before the end mark",
    ):
        assert f"\n  {line}" in table
    assert "builders       2 worker processes: workers=None" in str(WORKERS)


def test_tables_wrap_and_escape() -> None:
    lines = text_table("T", [("a", "word " * 40), ("none", "")]).splitlines()
    assert [line[:7] for line in lines] == ["T", "  a    word "[:7], *["       "] * (len(lines) - 2)]
    assert text_table("T", [("a", "\x1b[31mred")]).endswith(r"\x1b[31mred")
    assert html_table("<T>", [("<a>", '"&"')]).count("&lt;") == 2
    assert "&quot;&amp;&quot;" in html_table("T", [("a", '"&"')])
    assert "a<b" not in replace(LATER, workers_reason="a<b")._repr_html_()


def test_the_figures_of_the_engine_are_a_part_of_a_loaders() -> None:
    assert (LATER.engine.depth, LATER.engine.open_windows, LATER.depth) == (7, 0, 7)
    assert not {"engine", "open_windows", "delivered_batches"} & LATER.to_json().keys()
