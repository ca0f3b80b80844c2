"""Samples of a source by their positions: those that shards store, block by block, or what a dataset gives.

What is stored is read as it lies: no decoding of images, no transforms. A dataset that has a transform, a
join or `decode=` of the user's own gives what it delivers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataflow.conversion.values import decode_of, values_of
from prefetch.retries import RetryPolicy
from prefetch.store.ranges import read_located
from prefetch.store.reader import StoreReader
from sharding.arrow_arrays import number_array
from sharding.blocks import Block, Columns, Format
from sharding.catalog.reading import ColumnReader, read_block
from sharding.catalog.table import Catalog
from sharding.errors import SampleError
from sharding.formats.arrow.columns import TabularFormat
from sharding.order.selection import Selection

Ints = NDArray[np.int64]
Sample = dict[str, Any]
_AT_ONCE = 256
"""Samples that a dataset is asked for at a time."""
KEY = "__key__"


class Rows(Protocol):
    """The samples of a source, by position. Picklable."""

    def __len__(self) -> int:
        """Return how many there are."""

    def batches(self, positions: Ints) -> Iterator[list[Any]]:
        """Yield the samples at these positions, in this order, some at a time."""

    def named(self, position: int) -> tuple[str, str]:
        """Return what messages call a sample: its shard, and its key or number there."""


class StoredRows:
    """The stored values of a dataset's columns. Workers that read them import no torch.

    Args:
        catalog: of the shards.
        codec: their format.
        selection: the samples that count.
        columns: name -> stored column.
        all_columns: whether these are all that shards have.
        raw: give bytes of tar's members as they are, in place of the numbers and texts they stand for.
        storage_options: for the fsspec filesystem.
        policy: when a remote read is tried again.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        codec: Format,
        selection: Selection,
        columns: Mapping[str, str],
        all_columns: bool,
        raw: bool,
        storage_options: Mapping[str, Any],
        policy: RetryPolicy | None,
    ) -> None:
        self.catalog, self.codec, self.selection, self.columns = catalog, codec, selection, dict(columns)
        self.all_columns, self._options, self._policy = all_columns, storage_options, policy
        self._decode: dict[str, Any] = {}
        self._signed: Mapping[str, str] = {}
        for name in self.columns.values():
            spec = catalog.schema.get(name)
            self._decode[name] = None if raw or spec is None else decode_of(name, spec, codec)

    def without_index(self) -> tuple[StoredRows, bytes]:
        """Return these rows without catalog and selection, and those, pickled. Secrets of URLs stay here."""
        signed, light = self.catalog.signed_urls, copy(self)
        vars(light).update(catalog=None, selection=None, _signed=signed)
        return light, pickle.dumps((replace(self.catalog, signed_urls={}), self.selection))

    def take_index(self, index: bytes) -> None:
        """Set catalog and selection, as `without_index` gave them."""
        catalog, self.selection = pickle.loads(index)
        self.catalog = replace(catalog, signed_urls=self._signed)

    def __len__(self) -> int:
        return len(self.selection)

    def named(self, position: int) -> tuple[str, str]:
        """See `Rows`."""
        blocks, rows = self.selection.locate(np.array([position], np.int64))
        block = self.catalog.block(int(blocks[0]))
        return block.shard.url, str(block.first_in_shard + int(rows[0]))

    def batches(self, positions: Ints) -> Iterator[list[Sample]]:
        """See `Rows`. What lies together is read together; else each block once, for all its rows."""
        blocks, rows = self.selection.locate(positions)
        with closing(self._reader()) as reader:
            if len(blocks) and (np.diff(blocks) >= 0).all():
                for own in np.split(np.arange(len(blocks)), np.flatnonzero(np.diff(blocks)) + 1):
                    yield self._samples(reader, int(blocks[own[0]]), rows[own])
                return
            found: list[Sample] = [{}] * len(positions)
            for number in np.unique(blocks).tolist():
                own = np.flatnonzero(blocks == number)
                for at, sample in zip(own.tolist(), self._samples(reader, number, rows[own]), strict=True):
                    found[at] = sample
        yield found

    def blocks(self, positions: Ints) -> list[tuple[Block, Ints]]:
        """Return the blocks of ascending positions, each with its rows."""
        blocks, rows = self.selection.locate(positions)
        numbers, first = np.unique(blocks, return_index=True)
        parts = np.split(rows, first[1:]) if len(numbers) else []
        return [(self.catalog.block(n), own) for n, own in zip(numbers.tolist(), parts, strict=True)]

    def tables(self, positions: Ints) -> Iterator[pa.Table]:
        """Yield Arrow tables of all columns at ascending positions, each in its shard's own types."""
        assert isinstance(self.codec, TabularFormat)
        with closing(self._reader()) as reader:
            for block, rows in self.blocks(positions):
                table = self.codec.table(block, read_block(block, reader.read_into), None)
                if len(rows) < block.num_samples:
                    together = len(rows) == rows[-1] - rows[0] + 1
                    table = table.slice(rows[0], len(rows)) if together else table.take(number_array(rows))
                yield table

    def stored(self, positions: Ints) -> Iterator[tuple[Block, memoryview]]:
        """Yield the bytes of whole blocks at ascending positions."""
        with closing(self._reader()) as reader:
            for block, rows in self.blocks(positions):
                assert len(rows) == block.num_samples
                yield block, read_block(block, reader.read_into)

    def _reader(self) -> StoreReader:
        return StoreReader(self._options, policy=self._policy)

    def _samples(self, reader: StoreReader, number: int, rows: Ints) -> list[Sample]:
        block = self.catalog.block(number)
        names = [*self.columns.values(), *([KEY] if self.codec.has_keys else [])]
        columns, at = self._decoded(reader, block, names, rows)
        values, specs = dict[str, list[Any]](), self.catalog.schema
        for name, source in self.columns.items():
            try:
                values[name] = values_of(columns[source], specs.get(source), self._decode[source], at)
            except (ValueError, TypeError) as error:
                reason = f"column {name!r} of a sample from {block.first_in_shard} on: {error}"
                raise SampleError(block.shard.url, reason, block.offset, stage="decode") from error
        if self.codec.has_keys:
            keys = values_of(columns[KEY], None, None, at)
            values[KEY] = [key.decode("utf-8", "surrogateescape") for key in keys]
        if self.codec.columns_are_extensions:
            return [
                {name: value for name, value in zip(values, row, strict=True) if value is not None}
                for row in zip(*values.values(), strict=True)
            ]
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def _decoded(
        self, reader: StoreReader, block: Block, names: list[str], rows: Ints
    ) -> tuple[Columns, slice | Ints]:
        """Decode a block, or what a few of its rows need of it; and which rows of that are asked for."""
        if 4 * len(rows) < block.num_samples:
            located = self.codec.locate(block, names)
            if located is not None:
                return read_located(block, located, self.catalog.schema, reader.read_into, rows), slice(None)
        columns = ColumnReader(self.catalog, self.codec, names)
        decoded = columns.decode(block, columns.read(block, reader.read_into))
        whole = len(rows) == block.num_samples and bool((rows == np.arange(len(rows))).all())
        return decoded, slice(None) if whole else rows


class DeliveredRows:
    """The samples that a map-style dataset gives: `__getitems__` where it has it, else `dataset[i]`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def named(self, position: int) -> tuple[str, str]:
        """See `Rows`."""
        return type(self.dataset).__name__, str(position)

    def batches(self, positions: Ints) -> Iterator[list[Any]]:
        """See `Rows`."""
        for first in range(0, len(positions), _AT_ONCE):
            indices = positions[first : first + _AT_ONCE].tolist()
            yield list(self._get(indices))

    def _get(self, indices: Sequence[int]) -> Sequence[Any]:
        get = getattr(self.dataset, "__getitems__", None)
        return get(list(indices)) if get is not None else [self.dataset[index] for index in indices]
