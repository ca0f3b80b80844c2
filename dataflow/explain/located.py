"""Locate samples: their shards, bytes and rows, keys, and what they drew at random.

Nothing is read but the blocks' indexes in the catalog, and what holds keys where these are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.decode.values import DRAWS
from dataflow.joins.matches import blocks_of
from dataflow.staging.rows import read_rows
from sharding.blocks import Block, Spans
from sharding.catalog.table import Catalog
from sharding.errors import ShardError
from sharding.order.permutations import uniform
from sharding.spans import Ints


class LocatedSamples(NamedTuple):
    """The places of some samples of a dataset; arrays and lists are [n]."""

    shard: list[str]
    shard_row: Ints
    """The row of the sample in its shard."""
    block: Ints
    """Number of the block in its shard: a row group of Parquet."""
    block_row: Ints
    offset: Ints
    """First byte of the sample in the stored shard; of its block, where it has no bytes of its own."""
    length: Ints
    draw_number: Ints
    """The number that random draws depend on, beside seed and epoch."""
    matches: list[list[tuple[str, int]]]
    """Shard and row in it of the sample of each joined dataset."""


def located(dataset: ShardedDataset, number: int, samples: Ints) -> LocatedSamples:
    """Locate samples of a dataset, by their indexes in it; `number`: of it in a mixture, else 0."""
    catalog, table = dataset.catalog, dataset.catalog.blocks
    blocks, rows = dataset.selection.locate(samples)
    stored = table.first_sample[blocks] + rows
    source = dataset.source()
    with closing(source.reader):
        first_number = replace(source, number=number).first_number
    offset, length = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for block, index in _each_block(catalog, blocks):
        offset[index], length[index] = _bytes_of(dataset, block, rows[index])
    shards, shard_row, in_shard = _places(catalog, blocks, rows)
    matches: list[list[tuple[str, int]]] = [[] for _ in rows]
    for join in dataset.joins:
        other, numbers = join.other.catalog, join.matches.of(stored)
        held = blocks_of(other.blocks, numbers)
        urls, other_rows, _ = _places(other, held, numbers - other.blocks.first_sample[held])
        for match, url, row in zip(matches, urls, other_rows.tolist(), strict=True):
            match.append((url, row))
    return LocatedSamples(shards, shard_row, in_shard, rows, offset, length, first_number + stored, matches)


def _places(catalog: Catalog, blocks: Ints, rows: Ints) -> tuple[list[str], Ints, Ints]:
    """Shard, row in the shard, and number of the block in it, of rows of blocks."""
    table, numbers = catalog.blocks, catalog.blocks.shard[blocks].astype(np.int64)
    first = catalog.first_block[numbers]
    used, which = np.unique(numbers, return_inverse=True)
    urls = [catalog.shard(number).url for number in used.tolist()]
    in_shard = table.first_sample[blocks] - table.first_sample[first] + rows
    return [urls[index] for index in which.tolist()], in_shard, blocks - first


def _each_block(catalog: Catalog, blocks: Ints) -> Iterator[tuple[Block, Ints]]:
    """Yield each block, and [k] which of the rows it holds."""
    order = np.argsort(blocks, kind="stable")
    numbers, first = np.unique(blocks[order], return_index=True)
    for number, index in zip(numbers.tolist(), np.split(order, first[1:]), strict=False):
        yield catalog.block(number), index


def _bytes_of(dataset: ShardedDataset, block: Block, rows: Ints) -> tuple[Ints | int, Ints | int]:
    """First byte and number of bytes of rows of a block, in the stored shard."""
    spans = [*(dataset.codec.locate(block, None) or {}).values()]
    offsets = dataset.codec.sample_offsets(block, None) if spans else None
    if offsets is None:
        return block.offset, block.length
    ends = [np.where(span.lengths >= 0, span.starts + span.lengths, 0)[rows] for span in spans]
    end = block.offset + np.maximum.reduce(ends)
    return offsets[rows], np.maximum(0, end - offsets[rows])


def keys_of(dataset: ShardedDataset, samples: Ints) -> tuple[list[str | None], list[str]]:
    """The keys of samples, which are read; None: there is none. And what could not be read, in words."""
    keys: list[str | None] = [None] * len(samples)
    if not dataset.codec.has_keys or not len(samples):
        return keys, []
    source, lacking = dataset.source(is_awaited=True), dict[str, None]()
    with closing(source.reader):
        shards = dataset.catalog.blocks.shard[dataset.selection.locate(samples)[0]]
        for shard in np.unique(shards).tolist():
            inside = np.flatnonzero(shards == shard)
            try:
                for _, index, columns in read_rows(source, dataset.selection, samples[inside], ["__key__"]):
                    column = columns["__key__"]
                    assert isinstance(column, Spans)
                    for position, which in enumerate(inside[index].tolist()):
                        text = column.value(position).tobytes()
                        keys[which] = text.decode("utf-8", "backslashreplace")
            except ShardError as error:
                lacking[str(error)] = None
    return keys, [*lacking]


def draws_of(seed: int, epochs: Ints, numbers: Ints) -> NDArray[np.float64]:
    """The numbers that decoders draw for samples, float64 [n, DRAWS]."""
    draws = np.empty((len(numbers), DRAWS))
    for epoch in np.unique(epochs).tolist():
        index = np.flatnonzero(epochs == epoch)
        draws[index] = uniform(seed, epoch, numbers[index], DRAWS)
    return draws
