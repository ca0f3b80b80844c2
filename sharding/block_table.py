"""The block table of a whole dataset, and how it is built, kept and checked.

A `Catalog` is columnar: six numpy arrays with one entry a block (44 bytes together), and one row a shard.
Blocks lie in shard order and file order, so `first_sample` ascends and sample n belongs to the last block
that starts at or before it. The Arrow rows are what is saved; the arrays are views of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import Block, ColumnSpec, Format, Shard
from sharding.catalog_file import CHECKSUMS, read_table, with_checksums, write_table
from sharding.errors import CorruptShardError
from sharding.formats import resolve_format
from sharding.schema import schema_from_json, schema_to_json
from sharding.urls import file_name


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Where every block lies. All arrays are [num_blocks], in reading order, and read-only."""

    shard: NDArray[np.int32]
    """Number of the block's shard; ascends."""
    offset: NDArray[np.int64]
    """First byte in the stored file."""
    length: NDArray[np.int64]
    """Bytes to read."""
    nbytes: NDArray[np.int64]
    """Bytes when decoded, at most."""
    num_samples: NDArray[np.int64]
    """Samples in the block; may be 0."""
    first_sample: NDArray[np.int64]
    """Number of its first sample in the dataset."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """All blocks of a dataset. Thread-safe; values of shards and blocks are made on demand."""

    format: str
    """Name of the format."""
    options: Mapping[str, str | int]
    """What the format was made with ("dtype", "length"), for `codec`."""
    block_bytes: int
    """Bytes a block aimed at."""
    schema: Mapping[str, ColumnSpec]
    """Column name -> spec, true of every shard."""
    rows: pa.Table
    """One row a shard, as saved (`catalog_file.COLUMNS`); the arrays of `blocks` are views of it."""

    @cached_property
    def blocks(self) -> BlockTable:
        """The block table, as numpy arrays."""
        table = self._block_column.values
        num_samples = _numpy(table.field("num_samples"))
        shard = np.repeat(np.arange(self.num_shards, dtype=np.int32), np.diff(self.first_block))
        first_sample = np.zeros(len(num_samples), np.int64)
        np.cumsum(num_samples[:-1], out=first_sample[1:])
        shard.flags.writeable = first_sample.flags.writeable = False
        offset, length, nbytes = (_numpy(table.field(name)) for name in ("offset", "length", "nbytes"))
        return BlockTable(shard, offset, length, nbytes, num_samples, first_sample)

    @cached_property
    def first_block(self) -> NDArray[np.int64]:
        """[num_shards + 1]: shard s has the blocks `first_block[s]` up to `first_block[s + 1]`."""
        return _numpy(self._block_column.offsets)

    @property
    def num_shards(self) -> int:
        """Shards, those without samples included."""
        return int(self.rows.num_rows)

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return len(self._block_column.values)

    @cached_property
    def num_samples(self) -> int:
        """Samples of all blocks."""
        return int(self.blocks.num_samples.sum())

    @property
    def urls(self) -> list[str]:
        """[num_shards], made anew at each call."""
        return list(self.rows.column("url").to_pylist())

    def shard(self, number: int) -> Shard:
        """One shard, as it was when it was indexed."""
        urls, sizes, versions = self._shard_columns
        return Shard(urls[number].as_py(), int(sizes[number]), versions[number].as_py())

    @cached_property
    def _shard_columns(self) -> tuple[pa.Array, NDArray[np.int64], pa.Array]:
        url, size, version = (self.rows.column(name).chunk(0) for name in ("url", "size", "version"))
        return url, _numpy(size), version

    def block(self, number: int) -> Block:
        """One block with its shard, index and footer; about 20 microseconds, no copy of the blobs."""
        if not 0 <= number < self.num_blocks:
            raise IndexError(f"block must be in [0, {self.num_blocks}), got {number}")
        table = self.blocks
        shard = int(table.shard[number])
        first = int(self.first_block[shard])
        first_sample = int(table.first_sample[number])
        return Block(
            shard=self.shard(shard),
            offset=int(table.offset[number]),
            length=int(table.length[number]),
            nbytes=int(table.nbytes[number]),
            first_sample=first_sample,
            first_in_shard=first_sample - int(table.first_sample[first]),
            num_samples=int(table.num_samples[number]),
            number=number,
            number_in_shard=number - first,
            index=_blob(self._indexes[number]),
            footer=_blob(self.rows.column("footer")[shard]),
            checksum=None if self.checksums is None else int(self.checksums[number]),
        )

    @cached_property
    def checksums(self) -> NDArray[np.uint32] | None:
        """[num_blocks] CRC-32 of each block's stored bytes; None where they were not computed."""
        if CHECKSUMS.name not in self.rows.column_names:
            return None
        return _numpy(self.rows.column(CHECKSUMS.name).chunk(0).values)

    def with_checksums(self, checksums: NDArray[np.uint32]) -> Catalog:
        """The catalog with the CRC-32 of every block's stored bytes, [num_blocks]: reads are held to it."""
        if checksums.shape != (self.num_blocks,):
            raise ValueError(f"checksums must have shape ({self.num_blocks},), got {checksums.shape}")
        return replace(self, rows=with_checksums(self.rows, checksums.astype(np.uint32)))

    def codec(self) -> Format:
        """The format, made again from its name and options. `ValueError` if it is none of ours."""
        dtype, length = self.options.get("dtype"), self.options.get("length")
        return resolve_format(
            self.format,
            (),
            dtype=None if dtype is None else str(dtype),
            length=None if length is None else int(length),
        )

    def fingerprint(self) -> str:
        """16 hex digits over the format, file names, sizes and block geometry; for resume states.

        A copy of the shards elsewhere has the same fingerprint: folders, hosts and versions do not count.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        table, sizes = self.blocks, _numpy(self.rows.column("size").chunk(0))
        names = [file_name(url) for url in self.urls]
        digest = hashlib.blake2b(digest_size=8)
        digest.update(json.dumps([self.format, dict(self.options), names], sort_keys=True).encode())
        for array in (sizes, self.first_block, table.offset, table.length, table.num_samples):
            digest.update(array.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    @cached_property
    def _block_column(self) -> pa.LargeListArray:
        return self.rows.column("blocks").chunk(0)

    @cached_property
    def _indexes(self) -> pa.LargeBinaryArray:
        return self._block_column.values.field("index")

    def save(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Write one file, replacing an older one at once. `ShardReadError` where the store refuses."""
        facts = {
            "format": self.format,
            "options": dict(self.options),
            "block_bytes": self.block_bytes,
            "schema": schema_to_json(self.schema),
        }
        write_table(url, self.rows, facts, storage_options)

    @classmethod
    def load(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> Catalog:
        """Read what `save` wrote; a local file is mapped, and its blobs stay on disk until touched.

        Raises:
            ShardReadError: the file cannot be read.
            CorruptShardError: it is no catalog, is damaged, or of another version.
        """
        rows, facts = read_table(url, storage_options)
        try:
            schema = schema_from_json(facts["schema"])
            catalog = cls(facts["format"], facts["options"], facts["block_bytes"], schema, rows)
            catalog._check()
        except (LookupError, TypeError, ValueError) as error:
            raise CorruptShardError(
                url, f"the catalog is damaged ({error}); index the shards again"
            ) from error
        return catalog

    def _check(self) -> None:
        first, table = self.first_block, self.blocks
        if first[0] != 0 or first[-1] != self.num_blocks or (np.diff(first) < 0).any():
            raise ValueError("its blocks do not belong to its shards")
        sizes = _numpy(self.rows.column("size").chunk(0))
        if any((n < 0).any() for n in (sizes, table.offset, table.length, table.nbytes, table.num_samples)):
            raise ValueError("a size is negative")
        if (table.length > sizes[table.shard] - table.offset).any():
            raise ValueError("a block lies outside its shard")
        if self.checksums is not None and len(self.checksums) != self.num_blocks:
            raise ValueError("it has not one checksum a block")


def _numpy(array: pa.Array) -> NDArray[Any]:
    view: NDArray[Any] = np.from_dlpack(array)  # no copy; `to_numpy` would import pandas, which takes 0.3 s
    return view


def _blob(value: pa.Scalar) -> memoryview | bytes:
    return memoryview(value.as_buffer()) if value.is_valid else b""


def options_of(codec: Format) -> dict[str, str | int]:
    """The options a format was made with, as JSON values; those left out are not in it."""
    given = {name: getattr(codec, name, None) for name in ("dtype", "length")}
    options: dict[str, str | int] = {}
    if given["dtype"] is not None:
        options["dtype"] = np.dtype(given["dtype"]).name
    if given["length"] is not None:
        options["length"] = int(given["length"])
    return options


__all__ = ["BlockTable", "Catalog", "options_of"]
