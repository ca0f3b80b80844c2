"""The block table of a whole dataset, and how it is built, kept and checked.

A `Catalog` is columnar: six numpy arrays with one entry a block (44 bytes together), and one row a shard.
Blocks lie in shard order and file order, so `first_sample` ascends and sample n belongs to the last block
that starts at or before it. The Arrow rows are what is saved; the arrays are views of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.arrow_arrays import number_array
from sharding.blocks import Block, ColumnSpec, Format, Shard
from sharding.cached_property import cached_property
from sharding.catalog.file import (
    CHECKSUMS,
    COLUMNS,
    BlobCrcs,
    blob_crc,
    damaged,
    folder_of,
    numpy_view,
    read_table,
    write_table,
)
from sharding.catalog.schema import (
    NO_SCHEMA,
    DatasetSchema,
    Schema,
    merge_schemas,
    schema_from_json,
    schema_to_json,
)
from sharding.catalog.widening import growth_of
from sharding.errors import CorruptShardError
from sharding.formats import ENTRIES, resolve_format
from sharding.hub.names import is_pinned
from sharding.redaction import identity_of
from sharding.urls import file_name, local_path

_MOST_SAMPLES = 1 << 48
"""Samples of a dataset, at most."""
MOST_IN_BLOCK = 1 << 28
"""Samples of a block that is read: what tells where they lie takes 8 bytes each."""
_MOST_BYTES = 1 << 60
"""The bytes of all blocks together, at most: sums stay far from the end of an int64."""

_UNFIT = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors that facts of other types or values raise, where they are made use of."""


class BlockTable(Struct, frozen=True, eq=False, kw_only=True):
    """A table of all blocks. All arrays are [num_blocks], in reading order, and read-only."""

    shard: NDArray[np.int32]
    """Number of the block's shard; ascends."""
    offset: NDArray[np.int64]
    """First byte in the stored file."""
    length: NDArray[np.int64]
    """The number of bytes to read."""
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
    """The name of the format."""
    options: Mapping[str, str | int]
    """The options that the format was made with ("dtype", "length", "allow_unfinished", "version"), for
    `codec`."""
    block_bytes: int
    """Bytes a block aimed at."""
    schemas: Sequence[Schema]
    """The distinct schemas of shards; the rows say which is each shard's."""
    _: KW_ONLY
    rows: pa.Table
    """One row a shard, as saved (`file.COLUMNS`); the arrays of `blocks` are views of it."""
    unfinished: Mapping[int, str] = field(default_factory=dict)
    """Shards that end before their format says so, which `allow_unfinished` let pass: number -> how."""
    missing: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """For columns that some samples lack, as far as indexing learned it, the number of the first shard with
    such a sample, and what `ShardScan.missing` says of it; "": all samples of the shard."""
    types: Mapping[str, ColumnSpec] = field(default_factory=dict)
    """Types of columns that are wider than the shards ask for: those of a mixture. Never saved."""
    columns: Sequence[str] = ()
    """Columns that are read, for which `blocks` counts what they take in their common types. Never saved."""
    signed_urls: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By shard, its URL with password and signature, where it has any. Never saved."""
    url: str = ""
    """The file it was loaded from; "": it was built in this process."""
    blob_crcs: BlobCrcs | None = field(default=None, repr=False)
    """Checksums that the footers and indexes of a loaded catalog must have."""

    @cached_property
    def schema(self) -> DatasetSchema:
        """Column name -> spec, true of every shard; where shards contradict each other, its `conflicts`."""
        numbers, shards = np.unique(self.shard_schemas, return_index=True)
        urls = self.rows.column("url")
        groups = [
            (urls[shard].as_py(), self.schemas[number])
            for shard, number in sorted(zip(shards.tolist(), numbers.tolist(), strict=True))
            if number != NO_SCHEMA
        ]
        codec = self.known_codec
        merged = merge_schemas(
            groups,
            widens=codec is not None and codec.widens,
            may_lack=codec is not None and codec.columns_are_extensions,
        )
        return merged if not self.types else replace(merged, specs={**merged.specs, **self.types})

    @cached_property
    def shard_schemas(self) -> NDArray[np.int32]:
        """[num_shards] which of `schemas` is each shard's; `NO_SCHEMA`: it has no samples."""
        return numpy_view(self.rows.column("schema").chunk(0))

    def schema_of(self, block: Block) -> int:
        """Return the number of a block's schema in `schemas`."""
        return int(self.shard_schemas[self.blocks.shard[block.number]])

    def reading(self, columns: Iterable[str], types: Mapping[str, ColumnSpec] | None = None) -> Catalog:
        """The catalog of which these columns are read, some of them in wider types."""
        return replace(self, columns=tuple(columns), types=self.types if types is None else types)

    @cached_property
    def blocks(self) -> BlockTable:
        """The block table, as numpy arrays."""
        table = self._block_column.values
        num_samples = numpy_view(table.field("num_samples"))
        shard = np.repeat(np.arange(self.num_shards, dtype=np.int32), np.diff(self.first_block))
        first_sample = np.zeros(len(num_samples), np.int64)
        np.cumsum(num_samples[:-1], out=first_sample[1:])
        shard.flags.writeable = first_sample.flags.writeable = False
        return BlockTable(
            shard=shard,
            offset=numpy_view(table.field("offset")),
            length=numpy_view(table.field("length")),
            nbytes=self._widened_bytes(shard, numpy_view(table.field("nbytes")), num_samples),
            num_samples=num_samples,
            first_sample=first_sample,
        )

    def _widened_bytes(
        self, shard: NDArray[np.int32], nbytes: NDArray[np.int64], num_samples: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Bytes of decoded blocks with what it takes to bring the columns that are read to their types."""
        merged = self.schema if self.columns else {}
        if all(schema.get(name) is merged.get(name) for schema in self.schemas for name in self.columns):
            return nbytes
        growth = [growth_of(schema, merged, self.columns) for schema in self.schemas]
        if not any(map(any, growth)):
            return nbytes
        number = self.shard_schemas[shard]
        each, times = (np.array([*column, 0]) for column in zip(*growth, strict=True))  # 0: of `NO_SCHEMA`
        widened: NDArray[np.int64] = np.ceil(nbytes * (1.0 + times[number])).astype(np.int64)
        widened += each[number] * num_samples
        widened.flags.writeable = False
        return widened

    @cached_property
    def first_block(self) -> NDArray[np.int64]:
        """[num_shards + 1]: shard s has the blocks `first_block[s]` up to `first_block[s + 1]`."""
        return numpy_view(self._block_column.offsets)

    @property
    def num_shards(self) -> int:
        """Shards, those without samples included."""
        return int(self.rows.num_rows)

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of blocks of all shards."""
        return len(self._block_column.values)

    @cached_property
    def num_samples(self) -> int:
        """Return the number of samples of all blocks."""
        return int(self.blocks.num_samples.sum())

    @property
    def urls(self) -> list[str]:
        """[num_shards] what names the shards, made anew at each call."""
        return list(self.rows.column("url").to_pylist())

    def is_unchanged_here(self) -> bool:
        """Return whether all shards are files of this machine, as they were indexed; `changes` explains."""
        _, sizes, versions = self._shard_columns
        for url, size, version in zip(self.locations, sizes.tolist(), versions.to_pylist(), strict=True):
            try:
                status = os.stat(local_path(url))
            except (OSError, ValueError):
                return False
            now = stat.S_ISREG(status.st_mode), status.st_size, f"mtime:{status.st_mtime_ns}"
            if now != (True, size, version):
                return False
        return True

    @property
    def locations(self) -> list[str]:
        """[num_shards] what fsspec opens: URLs with passwords and signatures, as far as they are known."""
        return [self.signed_urls.get(url, url) for url in self.urls]

    def signed_by(self, urls: Iterable[str]) -> Catalog:
        """The catalog, whose shards are opened by these URLs of theirs from now on."""
        signed = {identity: url for url in urls if (identity := identity_of(url)) != url}
        return replace(self, signed_urls=signed) if signed else self

    def shard(self, number: int) -> Shard:
        """One shard, as it was when it was indexed."""
        urls, sizes, versions = self._shard_columns
        url = urls[number].as_py()
        return Shard(url, int(sizes[number]), versions[number].as_py(), self.signed_urls.get(url, ""))

    def footer(self, shard: int) -> bytes | memoryview:
        """Return what the codec needs of a shard, without a copy. Not compared with its checksum."""
        return _blob(self.rows.column("footer").chunk(0)[shard])

    @cached_property
    def _shard_columns(self) -> tuple[pa.Array, NDArray[np.int64], pa.Array]:
        url, size, version = (self.rows.column(name).chunk(0) for name in ("url", "size", "version"))
        return url, numpy_view(size), version

    def block(self, number: int) -> Block:
        """One block with its shard, index and footer; about 20 microseconds, no copy of the blobs.

        The first time, 0.1 ms, blobs of a loaded catalog are compared with their checksums, and the index
        with the block's numbers: `CorruptShardError`, naming the catalog, where they do not fit; one that
        names the shard where the block has more samples than `MOST_IN_BLOCK`.
        """
        if not 0 <= number < self.num_blocks:
            raise IndexError(f"block must be in [0, {self.num_blocks}), got {number}")
        table = self.blocks
        shard = int(table.shard[number])
        first = int(self.first_block[shard])
        first_sample = int(table.first_sample[number])
        if table.num_samples[number] > MOST_IN_BLOCK:
            raise CorruptShardError(
                self.shard(shard).url,
                f"the catalog says that a block has {table.num_samples[number]:,} samples, and at most "
                f"{MOST_IN_BLOCK:,} can be looked up in one; index the shards again, with smaller blocks",
                int(table.offset[number]),
                stage="plan",
            )
        block = Block(
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
            footer=self.footer(shard),
            checksum=None if self.checksums is None else int(self.checksums[number]),
        )
        if self.blob_crcs is not None and self._unchecked[number]:
            self._check_blobs(block, shard)
            self._unchecked[number] = False
        return block

    @cached_property
    def _unchecked(self) -> NDArray[np.bool_]:
        """Blocks whose blobs were not looked at yet."""
        return np.ones(self.num_blocks, np.bool_)

    @cached_property
    def _unchecked_footers(self) -> NDArray[np.bool_]:
        return np.ones(self.num_shards, np.bool_)

    def _check_blobs(self, block: Block, shard: int) -> None:
        """Raise where a block's blobs are not as they were saved, or lead outside the block."""
        assert self.blob_crcs is not None
        of_footers, of_indexes = self.blob_crcs
        where = f"block {block.number_in_shard} of {block.shard.url}"
        if self._unchecked_footers[shard]:
            if blob_crc(self.rows.column("footer")[shard]) != of_footers[shard]:
                raise damaged(self.url, f"the metadata of {block.shard.url} is not what was saved")
            self._unchecked_footers[shard] = False
        if blob_crc(self._indexes[block.number]) != of_indexes[block.number]:
            raise damaged(self.url, f"the index of {where} is not what was saved")
        if self.known_codec is not None:
            try:
                self.known_codec.check(block)
            except (LookupError, TypeError, ValueError, RecursionError) as error:
                raise damaged(self.url, f"{where}: {error}") from error

    @cached_property
    def known_codec(self) -> Format | None:
        """The format, where it is one of ours."""
        return self.codec() if self.format in ENTRIES else None

    @cached_property
    def checksums(self) -> NDArray[np.uint32] | None:
        """[num_blocks] CRC-32 of each block's stored bytes; None where they were not computed."""
        if CHECKSUMS.name not in self.rows.column_names:
            return None
        return numpy_view(self.rows.column(CHECKSUMS.name).chunk(0).values)

    def with_checksums(self, checksums: NDArray[np.uint32]) -> Catalog:
        """The catalog with the CRC-32 of every block's stored bytes, [num_blocks]: reads are held to it."""
        if checksums.shape != (self.num_blocks,):
            raise ValueError(f"checksums must have shape ({self.num_blocks},), got {checksums.shape}")
        numbers = number_array(checksums.astype(np.uint32))
        per_shard = pa.LargeListArray.from_arrays(self._block_column.offsets, numbers)
        return replace(self, rows=self.rows.select(COLUMNS.names).append_column(CHECKSUMS, per_shard))

    def codec(self, given: Format | None = None) -> Format:
        """The format, made again from its name and options. `ValueError` if it is none of ours.

        `given`: the format of the files, where the user has an instance of it.
        """
        if given is not None:
            is_hive, version = self.format == "hive", self.options.get("version")
            return resolve_format("hive", (), version=version, of=given) if is_hive else given
        options: dict[str, Any] = dict(self.options)
        known = {option for entry in ENTRIES.values() for option in entry.options}
        for option in options.keys() - known:
            what = f"option {option!r} of format {self.format!r}"
            raise ValueError(f"{what} is of a class of your own: give an instance of it, format=...")
        return resolve_format(self.format, (), **options)

    def fingerprint(self) -> str:
        """16 hex digits over the format, file names, sizes and block geometry; for resume states.

        A copy of the shards elsewhere has the same fingerprint: folders, hosts and versions do not count, but
        for versions that are hashes of the content (on the Hub).
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        table, sizes = self.blocks, numpy_view(self.rows.column("size").chunk(0))
        names = [file_name(url) for url in self.urls]
        digest = hashlib.blake2b(digest_size=8)
        digest.update(json.dumps([self.format, dict(self.options), names], sort_keys=True).encode())
        for array in (sizes, self.first_block, table.offset, table.length, table.num_samples):
            digest.update(array.astype("<i8", copy=False).tobytes())
        if all(map(is_pinned, self.urls)):
            digest.update(json.dumps(self.rows.column("version").to_pylist()).encode())
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
            "schemas": list(map(schema_to_json, self.schemas)),
            "unfinished": {str(number): how for number, how in self.unfinished.items()},
            "missing": dict(self.missing),
        }
        write_table(url, self.rows, facts, storage_options)

    @classmethod
    def load(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> Catalog:
        """Read what `save` wrote; a local file is mapped, and its blobs stay on disk until touched.

        All numbers are checked; blobs are when `block` gives them.

        Raises:
            ShardReadError: the file cannot be read.
            OldCatalogError: it is of another version.
            CorruptShardError: it is no catalog, or is damaged.
        """
        rows, facts, crcs = read_table(url, storage_options)
        try:
            schemas = tuple(map(schema_from_json, facts["schemas"]))
            unfinished = {int(number): str(how) for number, how in facts["unfinished"].items()}
            missing = {name: (int(shard), str(text)) for name, (shard, text) in facts["missing"].items()}
            catalog = cls(
                facts["format"],
                facts["options"],
                facts["block_bytes"],
                schemas,
                rows=rows,
                unfinished=unfinished,
                missing=missing,
                url=identity_of(url),
                blob_crcs=crcs,
            )
            catalog._validate()
            if catalog.url != url and (password_of := folder_of(url)) != (folder := folder_of(catalog.url)):
                beside = (shard for shard in catalog.urls if shard.startswith(folder))
                catalog = catalog.signed_by(password_of + shard.removeprefix(folder) for shard in beside)
        except _UNFIT as error:
            raise damaged(url, error) from error
        return catalog

    def _validate(self) -> None:
        """Raise where facts are of other types, or numbers lead outside a shard, overflow or do not fit."""
        kinds = {"length": int, "header": int, "allow_unfinished": bool}  # others are text
        if type(self.format) is not str or type(self.block_bytes) is not int or self.block_bytes < 0:
            raise ValueError(f"format {self.format!r} with blocks of {self.block_bytes!r} bytes")
        for name, value in self.options.items() if self.format in ENTRIES else ():
            if type(value) is not kinds.get(name, str):
                raise TypeError(f"option {name} is {value!r}")
        codec, specs = self.known_codec, (spec for schema in self.schemas for spec in schema.values())
        if codec is not None and any(spec.kind == "bytes_list" for spec in specs):
            from sharding.formats.arrow.columns import TabularFormat

            if not isinstance(codec, TabularFormat):
                raise ValueError(f"format {self.format!r} has no lists of bytes")
        if codec is not None and dict(self.options) != codec.options():
            raise ValueError(f"options {self.options!r} of format {self.format!r}")
        if any(self.rows.column(name).null_count for name in self.rows.column_names):
            raise ValueError("a shard lacks a value")
        first, table = self.first_block, self.blocks
        if first[0] != 0 or first[-1] != self.num_blocks or (np.diff(first) < 0).any():
            raise ValueError("its blocks do not belong to its shards")
        sizes = numpy_view(self.rows.column("size").chunk(0))
        if any((n < 0).any() for n in (sizes, table.offset, table.length, table.nbytes, table.num_samples)):
            raise ValueError("a size is negative")
        if (table.length > sizes[table.shard] - table.offset).any():
            raise ValueError("a block lies outside its shard")
        if table.num_samples.sum(dtype=np.float64) > _MOST_SAMPLES:
            raise ValueError(f"its samples are more than {_MOST_SAMPLES}")
        if codec is not None and not codec.has_empty_samples and (table.num_samples > table.nbytes).any():
            raise ValueError("a block has more samples than bytes")
        if max(n.sum(dtype=np.float64) for n in (sizes, table.nbytes)) > _MOST_BYTES:
            raise ValueError(f"its sizes sum to more than {_MOST_BYTES} bytes")
        named = [*self.unfinished, *(number for number, _ in self.missing.values())]
        if any(not 0 <= number < self.num_shards for number in named):
            raise ValueError("it names a shard that is none of its shards")
        with_samples = np.zeros(self.num_shards, np.bool_)
        with_samples[table.shard[table.num_samples > 0]] = True
        least = np.where(with_samples, 0, NO_SCHEMA)
        if ((self.shard_schemas < least) | (self.shard_schemas >= len(self.schemas))).any():
            raise ValueError("a shard has none of its schemas")
        if self.checksums is not None and len(self.checksums) != self.num_blocks:
            raise ValueError("it has not one checksum a block")
        if self.blob_crcs is None or tuple(map(len, self.blob_crcs)) != (self.num_shards, self.num_blocks):
            raise ValueError("it has not one checksum a blob")


def _blob(value: pa.Scalar) -> memoryview | bytes:
    return memoryview(value.as_buffer()) if value.is_valid else b""
