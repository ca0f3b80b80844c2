"""Samples of a source by their positions: those that shards store, block by block, or what a dataset gives.

What is stored is read as it lies: no decoding of images, no transforms. A dataset that has a transform, a
join or `decode=` of the user's own gives what it delivers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from dataflow.conversion.values import decode_of, values_of
from dataflow.staging.block_source import BlockSource
from dataflow.staging.rows import BlockRows, by_block, read_rows
from prefetch.store.reader import StoreReader
from sharding.arrow_arrays import number_array
from sharding.blocks import Block
from sharding.errors import SampleError
from sharding.formats.arrow.columns import TabularFormat
from sharding.spans import Ints

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset

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
        dataset: whose outputs are one column each.
        raw: give bytes of tar's members as they are, in place of the numbers and texts they stand for; so are
            they given where the dataset delivers them so.
    """

    def __init__(self, dataset: ShardedDataset[Any], *, raw: bool) -> None:
        self.catalog, self.codec, self.selection = dataset.catalog, dataset.codec, dataset.selection
        self.columns = {output.name: output.sources[0] for output in dataset.outputs}
        """Name -> stored column."""
        self.all_columns = dataset._all_columns
        """True if these are all that shards have."""
        self._options, self._policy = dataset.options_elsewhere(), dataset.retry
        self._decode: dict[str, Any] = {}
        self._signed: Mapping[str, str] = {}
        is_raw = raw or dataset.decoding is None
        for name in self.columns.values():
            spec = self.catalog.schema.get(name)
            self._decode[name] = None if is_raw or spec is None else decode_of(name, spec, self.codec)

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
        names = [*self.columns.values(), *([KEY] if self.codec.has_keys else [])]
        ascends, by_position = not (np.diff(positions) < 0).any(), dict[int, Sample]()
        with self._opened() as source:
            for part in read_rows(source, self.selection, positions, names, is_checked=True):
                samples = self._samples(part)
                if ascends:
                    yield samples
                else:
                    by_position.update(zip(part.at.tolist(), samples, strict=True))
        if by_position:
            yield [by_position[index] for index in range(len(positions))]

    def tables(self, positions: Ints) -> Iterator[pa.Table]:
        """Yield Arrow tables of all columns at ascending positions, each in its shard's own types."""
        assert isinstance(self.codec, TabularFormat)
        with self._opened() as source:
            for block, _, rows in by_block(self.catalog, self.selection, positions):
                table = self.codec.table(block, source.read_block(block), None)
                if len(rows) < block.num_samples:
                    together = len(rows) == rows[-1] - rows[0] + 1
                    table = table.slice(rows[0], len(rows)) if together else table.take(number_array(rows))
                yield table

    def stored(self, positions: Ints) -> Iterator[tuple[Block, memoryview]]:
        """Yield the bytes of whole blocks at ascending positions."""
        with self._opened() as source:
            for block, _, rows in by_block(self.catalog, self.selection, positions):
                assert len(rows) == block.num_samples
                yield block, source.read_block(block)

    @contextmanager
    def _opened(self) -> Iterator[BlockSource]:
        with closing(StoreReader(self._options, policy=self._policy)) as reader:
            yield BlockSource(catalog=self.catalog, format=self.codec, reader=reader, outputs=())

    def _samples(self, part: BlockRows) -> list[Sample]:
        values, specs, block = dict[str, list[Any]](), self.catalog.schema, part.block
        for name, source in self.columns.items():
            try:
                values[name] = values_of(part.columns[source], specs.get(source), self._decode[source])
            except (ValueError, TypeError) as error:
                reason = f"column {name!r} of a sample from {block.first_in_shard} on: {error}"
                raise SampleError(block.shard.url, reason, block.offset, stage="decode") from error
        if self.codec.has_keys:
            keys = values_of(part.columns[KEY], None, None)
            values[KEY] = [key.decode("utf-8", "surrogateescape") for key in keys]
        rows = zip(*values.values(), strict=True)
        if self.codec.columns_are_extensions:
            return [
                {name: value for name, value in zip(values, row, strict=True) if value is not None}
                for row in rows
            ]
        return [dict(zip(values, row, strict=True)) for row in rows]


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
        get = getattr(self.dataset, "__getitems__", None)
        for first in range(0, len(positions), _AT_ONCE):
            indices = positions[first : first + _AT_ONCE].tolist()
            yield list(get(indices)) if get is not None else [self.dataset[index] for index in indices]


class GivenRows:
    """Samples that an iterable has given; `first`: the number of the first of them."""

    def __init__(self, samples: list[Any], first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return len(self.samples)

    def named(self, position: int) -> tuple[str, str]:
        """See `Rows`."""
        return "the iterable", str(position)

    def batches(self, positions: Ints) -> Iterator[list[Any]]:
        """See `Rows`."""
        yield [self.samples[index] for index in (positions - self.first).tolist()]
