"""What a store is asked before the first batch: two round trips, at the start of an epoch and near its end.

The server holds every answer back until all requests of the same round trip have come, and never answers what
the first batch does not need: a loader that asked one after the other, or for more, would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import MAKERS, rows_of
from http_kit import WAIT_S, Asked, RangeServer, serving

from dataflow import DataLoader, ShardedDataset, Shuffle
from dataflow.state_checksum import checked_fields, with_checksum
from sharding.errors import ShardChangedError
from sharding.order.windows import windows_touched

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.reads_here

TOKENS = {"format": "tokens", "dtype": "uint16", "length": 4, "block_bytes": 64}


def covers(asked: Asked, wanted: Asked) -> bool:
    """Whether a request brings a block: neighbours may share one."""
    same = (asked.method, asked.name) == (wanted.method, wanted.name)
    return same and asked.start <= wanted.start and wanted.end <= asked.end


def consists_of(asked: Asked, trip: set[Asked]) -> bool:
    """Whether a request brings things of a round trip, and no byte else."""
    brought = [one for one in trip if covers(asked, one)]
    return bool(brought) and sum(one.end - one.start for one in brought) == asked.end - asked.start


class RoundTrips:
    """Answers a request when all of its round trip have come; what belongs to none, at the end."""

    def __init__(self, trips: Sequence[set[Asked]]) -> None:
        self._trips = trips
        self._changed = threading.Condition()  # guards what follows
        self._asked: set[Asked] = set()
        self._over = False

    def may_answer(self, asked: Asked) -> None:
        with self._changed:
            self._asked.add(asked)
            self._changed.notify_all()
            trip = next((trip for trip in self._trips if consists_of(asked, trip)), None)
            self._changed.wait_for(
                lambda: self._over or (trip is not None and self._are_asked(trip)), 2 * WAIT_S
            )

    def _are_asked(self, trip: set[Asked]) -> bool:
        return all(any(covers(asked, one) for asked in self._asked) for one in trip)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


@contextmanager
def answering_in(server: RangeServer, trips: Sequence[set[Asked]]) -> Iterator[None]:
    held = RoundTrips(trips)
    server.may_answer = held.may_answer
    try:
        yield
    finally:
        held.end()
        server.may_answer = lambda asked: None


def versions(dataset: ShardedDataset) -> set[Asked]:
    """One request a shard: is it still the one that was indexed."""
    return {Asked("HEAD", url.rsplit("/", 1)[-1], 0, 0) for url in dataset.catalog.urls}


def blocks_of_batch(loader: DataLoader, number: int) -> set[Asked]:
    """The blocks of the windows that a batch of the epoch lies in."""
    dataset = loader.dataset
    order = dataset.windows(0, loader.shuffle, seed=loader.seed)
    positions = np.arange(number * loader.batch_size, (number + 1) * loader.batch_size)
    windows = [window for window, _ in windows_touched(order.locate(positions)[0])]
    blocks = [dataset.catalog.block(int(b)) for window in windows for b in order.window_blocks(window)]
    return {Asked("GET", b.shard.url.rsplit("/", 1)[-1], b.offset, b.offset + b.length) for b in blocks}


def indexed(server: RangeServer, kwargs: Mapping[str, Any], catalog: Path) -> ShardedDataset:
    """The dataset over HTTP, its catalog kept in a file."""
    names = sorted(path.name for path in server.folder.glob("shard*") if path.suffix != ".idx")
    options = {key: value for key, value in kwargs.items() if key not in ("source", "catalog")}
    return ShardedDataset(
        **{**options, "source": [f"{server.url}/{name}" for name in names]}, catalog=str(catalog)
    )


@pytest.mark.parametrize("format_", ["tar", "parquet", "tokens.bin", "jsonl"])
def test_the_first_batch_comes_after_two_round_trips(format_: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    made = MAKERS[format_](tmp_path / "data")
    with serving(RangeServer(tmp_path / "data")) as server:
        catalog = tmp_path / "x.catalog"
        known = DataLoader(indexed(server, made.kwargs, catalog), 3, True)
        needed = [versions(known.dataset), blocks_of_batch(known, 0)]
        assert len(needed[1]) > 1
        with (
            answering_in(server, needed),
            DataLoader(ShardedDataset(str(catalog)), 3, True, timeout=WAIT_S) as loader,
        ):
            batch = rows_of(next(iter(loader)))
    assert len(batch) == 3
    assert all(row in made.samples for row in batch)


def test_opening_a_catalog_is_one_round_trip_however_many_shards_there_are(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(50):
        np.arange(9, dtype=np.uint16).tofile(tmp_path / "data" / f"shard-{i:02}.bin")
    with serving(RangeServer(tmp_path / "data")) as server:
        catalog = tmp_path / "x.catalog"
        indexed(server, TOKENS, catalog)
        some = {Asked("HEAD", f"shard-{49 * i // 15:02}.bin", 0, 0) for i in range(16)}
        server.asked.clear()
        with answering_in(server, [some]):
            assert len(ShardedDataset(str(catalog))) == 100
        assert set(server.asked) == some
        # A change of any other is noticed when it is read.
        server.versions["shard-01.bin"] = "2"
        dataset = ShardedDataset(str(catalog))
        with (
            pytest.raises(ShardChangedError, match="shard-01"),
            DataLoader(dataset, 10, True, timeout=WAIT_S) as loader,
        ):
            list(loader)


def test_near_the_end_of_an_epoch_the_first_batch_costs_what_it_costs_at_its_beginning(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    for i in range(4):  # 20 blocks of 8 samples each, and the one token that the last sample needs
        np.arange(i, i + 20 * 8 * 4 + 1, dtype=np.uint16).tofile(tmp_path / "data" / f"shard-{i}.bin")
    eighty_blocks = Shuffle("window", window_blocks=8)
    costs = []
    with serving(RangeServer(tmp_path / "data")) as server:
        catalog = tmp_path / "x.catalog"
        known = DataLoader(indexed(server, TOKENS, catalog), 16, eighty_blocks)
        assert len(known) == 40
        for number in (0, 36):
            needed = [versions(known.dataset), blocks_of_batch(known, number)]
            with (
                answering_in(server, needed),
                DataLoader(ShardedDataset(str(catalog)), 16, eighty_blocks, timeout=WAIT_S) as loader,
            ):
                fields = {**checked_fields(loader.state_dict()), "position": 16 * number}
                loader.load_state_dict(with_checksum(fields))
                assert len(next(iter(loader))["tokens"]) == 16
            costs.append([(len(trip), sum(asked.nbytes for asked in trip)) for trip in needed])
    assert costs[0] == costs[1] == [(4, 0), (8, costs[0][1][1])]
