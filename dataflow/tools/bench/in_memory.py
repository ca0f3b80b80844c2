"""A dataset whose stored bytes are in memory: what loading costs without the storage.

Blocks of local shards are read once, so that the page cache has them, where the loader maps or reads them.
Those of remote shards are kept in this process, in place of the store. The beginning of the dataset is taken,
as much as fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.outputs.resolve import resolve_outputs
from dataflow.staging.block_source import BlockSource
from prefetch.store.reader import StoreReader
from sharding.blocks import Block, Shard
from sharding.catalog.reading import read_block
from sharding.urls import is_local

_THREADS = 16


class BlocksInMemory(StoreReader):
    """Blocks read once and served from memory. Thread-safe."""

    def __init__(self, blocks: Sequence[Block], reader: StoreReader) -> None:
        super().__init__()
        self._kept = dict(_read_all(blocks, reader, keep=True))

    def read_into(self, shard: Shard, offset: int, out: NDArray[np.uint8], **options: Any) -> None:
        """Copy a block, or neighbouring ones. `KeyError` for a range that is none."""
        filled = 0
        while filled < out.nbytes:
            block = self._kept[shard.url, offset + filled][: out.nbytes - filled]
            out[filled : filled + len(block)] = block
            filled += len(block)


class InMemory(ShardedDataset):
    """The beginning of a dataset, its stored bytes in memory.

    Args:
        dataset: what to take.
        limit_bytes: bytes to hold; one sample is taken at least.
        at_least: samples to take all the same.
        decode: False: leave the bytes as they are, without transforms.
    """

    def __init__(
        self, dataset: ShardedDataset, limit_bytes: int, *, at_least: int = 1, decode: bool = True
    ) -> None:
        total = int(dataset.catalog.blocks.length[dataset.selection.num_samples > 0].sum())
        fits = int(len(dataset) * min(1.0, limit_bytes / max(1, total)))
        self.__dict__.update(dataset.take(max(1, at_least, fits)).__getstate__())
        if not decode:
            self.outputs = resolve_outputs(self.catalog.schema, None, None, codec=self.codec)
            self.transform = self.batch_transform = None
        numbers = np.flatnonzero(self.selection.num_samples)
        blocks = [self.catalog.block(number) for number in numbers.tolist()]
        reader = self.new_reader()
        try:
            local = all(is_local(block.shard.url) for block in blocks)
            self._kept = None if local else BlocksInMemory(blocks, reader)
            if local:
                _read_all(blocks, reader, keep=False)
        finally:
            reader.close()

    def source(self, *arguments: Any, **options: Any) -> BlockSource:
        """Return what the loader reads with: memory."""
        source = super().source(*arguments, **options)
        return source if self._kept is None else replace(source, reader=self._kept)


def _read_all(
    blocks: Sequence[Block], reader: StoreReader, *, keep: bool
) -> list[tuple[tuple[str, int], Any]]:
    """Read every block; ((url, offset), bytes) of those that are kept."""

    def read(block: Block) -> tuple[tuple[str, int], Any]:
        data = read_block(block, reader.read_into)
        return (block.shard.url, block.offset), data if keep else None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-bench") as pool:
        return list(pool.map(read, blocks))
