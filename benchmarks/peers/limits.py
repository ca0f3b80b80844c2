"""The physical limit on the same bytes: only the unavoidable work, with nothing around it.

Each function yields how many samples it has processed since the last yield; nothing is delivered. `workers`
is the number of threads. Bytes lie in memory (mapped, page cache warm) before the clock starts.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data import FEATURES, LENGTH, Data

torch.set_num_threads(1)  # the threads of a limit are its own, counted ones

T = TypeVar("T")


class _Repeated:
    """An iterable that runs `work(item)` for all items on threads, a few ahead, once per iteration."""

    def __init__(self, items: Sequence[T], work: Callable[[T], int], threads: int) -> None:
        self._items, self._work, self._threads = items, work, threads
        self._pool = ThreadPoolExecutor(threads)

    def __iter__(self) -> Iterator[int]:
        if self._threads == 1:
            yield from map(self._work, self._items)
            return
        pending = deque()
        for item in self._items:
            pending.append(self._pool.submit(self._work, item))
            if len(pending) > 2 * self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def mapped(path: str) -> memoryview:
    """A file as memory, its pages touched."""
    with open(path, "rb") as file:
        return memoryview(
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        )


def w1(data: Data, workers: int) -> Iterable[int]:
    """Decode + crop + resize of JPEGs in memory."""
    from benchmarks.peers.images import decode_crop_resize

    index, shards = data.index("W1"), [mapped(path) for path in data.files("W1")]
    rows = zip(index.shard.tolist(), index.fields["jpg"].tolist(), strict=True)
    jpegs = [bytes(shards[s][at : at + size]) for s, (at, size) in rows]

    def work(chunk: list[bytes]) -> int:
        for jpeg in chunk:
            decode_crop_resize(jpeg)
        return len(chunk)

    return _Repeated([jpegs[i : i + 64] for i in range(0, len(jpegs), 64)], work, workers)


def w1_raw(data: Data, workers: int) -> Iterable[int]:
    """Copy of the mapped tars, in pieces of 4 MiB, into reused memory; counted in samples."""
    shards = [np.frombuffer(mapped(path), np.uint8) for path in data.files("W1")]
    pieces = [shard[at : at + (4 << 20)] for shard in shards for at in range(0, len(shard), 4 << 20)]
    per_byte = data.sizes.images / sum(len(shard) for shard in shards)
    targets = [np.empty(4 << 20, np.uint8) for _ in range(4)]
    free = deque(targets)

    def work(number: int) -> int:
        target = free.popleft()
        np.copyto(target[: len(pieces[number])], pieces[number])
        free.append(target)
        return counts[number]

    ends = np.round(np.cumsum([len(piece) for piece in pieces]) * per_byte).astype(int)
    counts = np.diff(ends, prepend=0).tolist()
    return _Repeated(range(len(pieces)), work, workers)


def w2(data: Data, workers: int) -> Iterable[int]:
    """Gather 16 random samples of 2,049 tokens and widen them to int64, into reused memory."""
    tokens = torch.from_numpy(np.frombuffer(mapped(data.files("W2")[0]), np.int16))
    samples = tokens.as_strided(((len(tokens) - 1) // LENGTH, LENGTH + 1), (LENGTH, 1))
    picks = torch.from_numpy(np.random.default_rng(0).permutation(len(samples))).split(16)[:-1]
    shape = (16, LENGTH + 1)
    free = deque((torch.empty(shape, dtype=torch.int16), torch.empty(shape, dtype=torch.int64)) for _ in "12")

    def work(chunk: Sequence[torch.Tensor]) -> int:
        narrow, wide = free.popleft()
        for rows in chunk:
            torch.index_select(samples, 0, rows, out=narrow)
            wide.copy_(narrow.view(torch.uint16))
        free.append((narrow, wide))
        return 16 * len(chunk)

    return _Repeated([picks[i : i + 64] for i in range(0, len(picks), 64)], work, workers)


def w3(data: Data, workers: int) -> Iterable[int]:
    """Decode a row group, transpose its columns into [rows, 20] and permute the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(1)
    groups = [(path, i) for path in data.files("W3") for i in range(pq.ParquetFile(path).num_row_groups)]
    footers = {path: pq.read_metadata(path) for path in data.files("W3")}
    rng = np.random.default_rng(0)

    def work(group: tuple[str, int]) -> int:
        path, number = group
        with pq.ParquetFile(path, metadata=footers[path], memory_map=True) as file:
            table = file.read_row_group(number, use_threads=False)
        features = torch.stack([torch.from_numpy(table[name].to_numpy()) for name in FEATURES], dim=1)
        label = torch.from_numpy(table["label"].to_numpy())
        order = torch.from_numpy(rng.permutation(len(label)))
        features.index_select(0, order)
        label.index_select(0, order)
        return len(label)

    return _Repeated(groups, work, workers)


def w4(data: Data, workers: int) -> Iterable[int]:
    """Gather 256 random records of 3,072 contiguous bytes from memory."""
    index, n = data.index("W4"), data.sizes.record_bytes
    shards = [mapped(path) for path in data.files("W4")]
    rows = zip(index.shard.tolist(), index.fields["bin"].tolist(), strict=True)
    joined = b"".join(shards[s][at : at + size] for s, (at, size) in rows)
    records = torch.from_numpy(np.frombuffer(joined, np.uint8)).view(-1, n)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(records)))
    picks = order.split(256)

    def work(chunk: Sequence[torch.Tensor]) -> int:
        for pick in chunk:
            records.index_select(0, pick)
        return sum(len(pick) for pick in chunk)

    return _Repeated([picks[i : i + 32] for i in range(0, len(picks), 32)], work, workers)


def w4_strided(data: Data, workers: int) -> Iterable[int]:
    """Copy the records out of the mapped tars, where they lie at a fixed stride, in file order."""
    index, n = data.index("W4"), data.sizes.record_bytes
    views: list[NDArray[np.uint8]] = []
    for shard, path in enumerate(data.files("W4")):
        at = index.fields["bin"][index.shard == shard, 0]
        assert len(set(np.diff(at))) <= 1, "records of one size lie at one stride"
        whole = np.frombuffer(mapped(path), np.uint8)
        stride = int(at[1] - at[0])
        views.append(np.lib.stride_tricks.as_strided(whole[at[0] :], (len(at), n), (stride, 1)))
    pieces = [view[i : i + 256] for view in views for i in range(0, len(view), 256)]

    def work(chunk: Sequence[NDArray[np.uint8]]) -> int:
        for piece in chunk:
            np.ascontiguousarray(piece)
        return sum(len(piece) for piece in chunk)

    return _Repeated([pieces[i : i + 32] for i in range(0, len(pieces), 32)], work, workers)
