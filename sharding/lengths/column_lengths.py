"""Find the length of each sample, as cheaply as its format allows.

- tar, tokens, Megatron: from the catalog; nothing is read (tar: bytes of the member).
- Parquet: only the column's own bytes are read (`ParquetFormat.select`). Where the length is stored as an
  integer column, give that one: it is much smaller than the data.
- other formats: every block is read and decoded once. Save the result, and pass the array next time.

Lengths count elements: of a list its items, of text and byte strings bytes; a column of integers *is* the
lengths. Where a sample lacks the column its length is -1: it may not be in the view that is planned. Cost in
memory: 4 bytes a sample, 8 where one has 2**31 elements or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import MISSING, Block, Column, Masked, Spans
from sharding.catalog.build import Map
from sharding.catalog.table import Catalog
from sharding.lengths.batching import Lengths
from sharding.printable import listed

ReadColumn = Callable[[Block, str], Column]
"""Reads a column of a block: its bytes alone, where these lie apart."""


def resolve_lengths(
    source: Lengths | None,
    catalog: Catalog,
    column: str,
    read: ReadColumn,
    *,
    map: Map = map,  # noqa: A002
) -> NDArray[np.integer]:
    """The lengths a user asks for, [num_samples] in file order; of a column, -1 where a sample lacks it.

    Args:
        source: see `batching.Lengths`; None: the lengths of `column`.
        catalog: the dataset's.
        column: a column of the shards.
        read: asked where the catalog does not tell.
        map: calls a function on every shard; pass an executor's to read in parallel.

    Raises:
        ValueError: an array of another shape or type, a negative length, or a column that is not there.
    """
    if source is None or isinstance(source, str):
        return column_lengths(catalog, source or column, read, map=map)
    lengths = np.asarray(source(catalog) if callable(source) else source)
    if lengths.shape != (catalog.num_samples,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths must be {catalog.num_samples} integers, one a sample in file order, "
            f"got {lengths.dtype} of shape {lengths.shape}"
        )
    if len(lengths) and int(lengths.min()) < 0:
        sample = int(np.argmin(lengths))
        raise ValueError(f"lengths must be >= 0, got {int(lengths[sample])} for sample {sample}")
    return _narrow(lengths)


def column_lengths(
    catalog: Catalog,
    column: str,
    read: ReadColumn,
    *,
    map: Map = map,  # noqa: A002
) -> NDArray[np.integer]:
    """Lengths of a column's values, or its integers themselves, [num_samples] in file order; -1: it has none.

    Raises as `resolve_lengths` does, and as reading and decoding do where the format needs that.
    """
    spec = catalog.schema.get(column)
    if spec is None:
        raise ValueError(f"no column {column!r} to take lengths from; there are {listed(catalog.schema)}")
    catalog.schema.check([column])
    if spec.kind == "fixed" and spec.shape:
        lengths = np.full(catalog.num_samples, spec.shape[0], np.int32)
        table, of_schema = catalog.blocks, np.array([column in schema for schema in catalog.schemas])
        has_it = np.repeat(of_schema[catalog.shard_schemas[table.shard]], table.num_samples)
        return np.where(has_it, lengths, MISSING)
    if spec.kind == "fixed" and np.dtype(spec.dtype).kind not in "iu":
        raise ValueError(f"column {column!r} holds {spec.dtype} numbers; lengths must be integers")
    codec, itemsize = catalog.codec(), np.dtype(spec.dtype).itemsize

    def of_shard(number: int) -> list[NDArray[np.integer]]:
        return [
            of_block(catalog.block(row)) for row in range(*catalog.first_block[number : number + 2].tolist())
        ]

    def of_block(block: Block) -> NDArray[np.integer]:
        sizes = codec.value_bytes(block, column)
        if sizes is None:
            return _decoded(block, read(block, column))
        return np.where(sizes < 0, MISSING, sizes // itemsize)

    parts = [part for shard in map(of_shard, range(catalog.num_shards)) for part in shard]
    return _narrow(np.concatenate(parts))


def _decoded(block: Block, values: Column) -> NDArray[np.integer]:
    if isinstance(values, Spans):
        return np.maximum(values.lengths, MISSING)
    lacks = values.lacks if isinstance(values, Masked) else np.zeros(len(values), np.int8)
    numbers: NDArray[Any] = values.values if isinstance(values, Masked) else values
    if (numbers[lacks == 0] < 0).any():
        row = int(np.flatnonzero((lacks == 0) & (numbers < 0))[0])
        raise ValueError(f"lengths must be >= 0, got {numbers[row]} for sample {block.first_sample + row}")
    return np.where(lacks == 0, numbers.astype(np.int64), MISSING)


def _narrow(lengths: NDArray[np.integer]) -> NDArray[np.integer]:
    narrow = not len(lengths) or int(lengths.max()) < 1 << 31
    return lengths.astype(np.int32 if narrow else np.int64)
