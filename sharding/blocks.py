"""The one shape of every format: a table of I/O blocks plus a codec.

A *shard* is one file or object. A *block* is a byte range of a shard that is read in one piece and
holds whole samples. A *codec* (`Format`) turns the bytes of a block into columns: one value per
sample and column name, as `numpy` arrays or as `Spans` of a buffer, without a Python loop over samples
wherever the layout allows it. Nothing here does I/O, knows threads, or imports torch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.errors import CorruptShardError
from sharding.urls import file_name

MISSING, NULL_INSIDE, PATH_ONLY, ABSENT = -1, -2, -3, -4
"""Codes that stand in place of a length: a sample has no value; a list has a null for which its elements'
type has no value; a value is only the path of a file, without its bytes. Nobody can use the latter two. The
fourth is for numbers alone: the sample has no value, as its shard has no such column, for which NaN stands
only where asked for."""

ALTERNATIVE = "/"
"""Stands between the names of alternatives in the name of a column, whose value is the first of them that a
sample has: for formats whose columns are extensions, none of which has this sign."""

DECIMAL = '{"_type": "Decimal"}'
"""The feature of columns of decimals, whose values are their digits."""
DEFAULT_BLOCK_BYTES = 2 << 20
"""Bytes a block aims at where the format has no unit of its own."""


@dataclass(frozen=True)
class Shard:
    """One file or object, as it was when it was indexed."""

    url: str
    """The name of the shard: its address, without password and signature."""
    size: int
    """Bytes in the store (compressed bytes for `.gz` and `.zst`)."""
    version: str
    """The version, which changes with the content: "etag:..." where the store has one, else "mtime:...", else
    ""."""
    signed_url: str = field(default="", repr=False, compare=False)
    """The URL with password and signature, where it has any: never kept, never shown."""

    @property
    def location(self) -> str:
        """Return the address that fsspec opens."""
        return self.signed_url or self.url

    def corrupt(self, reason: str, offset: int | None = None, *, stage: str = "index") -> CorruptShardError:
        """The error of a shard whose bytes break the rules of its format."""
        return CorruptShardError(self.url, reason, offset, stage=stage)


@dataclass(frozen=True)
class ColumnSpec:
    """The kind of one column of a dataset."""

    kind: str
    """"fixed": every value has `dtype` and `shape`. "bytes": byte strings. "text": UTF-8 strings.
    "list": variable-length runs of `dtype` elements. "json": nested values, each as its JSON text (UTF-8).
    "bytes_list": lists of byte strings, each list as one piece (`sharding.byte_lists`).

    Of single shards also: "null": no value anywhere, of a type that says no more. "null_list": lists that are
    empty or hold nulls. "other": of a type that nothing delivers. "unreadable": not even that is known."""
    dtype: str = "uint8"
    """numpy dtype name of an element ("uint8" for bytes, text and JSON)."""
    shape: tuple[int, ...] = ()
    """Shape of one value; for kind "fixed" only."""
    _: KW_ONLY
    size_range: tuple[int, int] | None = None
    """Least and greatest length of a value in elements, where indexing learned it; not for "fixed"."""
    optional: bool = False
    """True if some samples may lack the column."""
    unit: str = ""
    """For times, what the integers count, such as "timestamp[ms]"."""
    items: int = 0
    """For "bytes_list", about how many byte strings a list has: the mean of the block that has most."""
    feature: str = ""
    """The feature of Hugging Face `datasets`, as JSON, such as '{"_type": "Image"}', or the format's own word
    for how values are stored; of lists, that of an item. "": nothing but what is stored."""
    is_part: bool = False
    """True if it is a part of another column, and delivered only where it is named."""
    is_index: bool = False
    """True if it is an index that pandas wrote, which is delivered only where it is named, too."""
    is_repeated: bool = False
    """True if each value is a list by nature, which has one item, or a fixed number, in all samples here; in
    other shards it may have others."""
    note: str = ""
    """For "other", what tables call its type; for "unreadable", why; for a type for `decode_as`, who has
    it."""

    @property
    def feature_type(self) -> str:
        """Name of the feature, such as "Image"; "": it has none."""
        return str(json.loads(self.feature)["_type"]) if self.feature else ""


@dataclass(frozen=True)
class ShardScan:
    """The result of indexing one shard. The arrays have one entry per block, in file order."""

    offset: NDArray[np.int64]
    """First byte of the block in the stored file."""
    length: NDArray[np.int64]
    """Bytes to read from the store."""
    nbytes: NDArray[np.int64]
    """Bytes the decoded block occupies at most (decompressed); equals `length` for plain layouts."""
    num_samples: NDArray[np.int64]
    _: KW_ONLY
    schema: Mapping[str, ColumnSpec]
    """Column name -> spec, in the shard's own order."""
    index: Sequence[bytes] | None = None
    """Per block, what the codec needs to find its samples without a scan (format's own layout), or None."""
    footer: bytes = b""
    """Per shard, metadata the codec needs at every block (a Parquet footer, an Arrow schema), or b""."""
    unfinished: str = ""
    """The way in which the file ends before its format says so, where that was allowed; "": it does not."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For columns that some samples lack, as far as the index tells, the key of the first that does. For
    rows, which have no keys, how many do, in words ("3 of 100 rows of row group 0")."""


@dataclass(frozen=True)
class Block:
    """One row of the block table, with what the codec needs. A value made on demand, not stored."""

    shard: Shard
    offset: int
    length: int
    nbytes: int
    _: KW_ONLY
    first_sample: int
    """Number of the block's first sample in the whole dataset."""
    first_in_shard: int
    """Number of the block's first sample in its shard."""
    num_samples: int
    number: int
    """Row in the block table."""
    number_in_shard: int
    """Ordinal of the block in its shard (a Parquet row group's number)."""
    index: bytes | memoryview = b""
    footer: bytes | memoryview = b""
    checksum: int | None = None
    """CRC-32 (`zlib.crc32`) of the stored bytes; None where the catalog has none."""

    def corrupt(self, reason: str) -> CorruptShardError:
        """The error of a block whose bytes break the rules of its format."""
        return CorruptShardError(self.shard.url, reason, self.offset, stage="decode")


class Spans(Struct, frozen=True):
    """n variable-length values: value i is `buffer[starts[i] : starts[i] + lengths[i]]`.

    Spans may lie in any order and may overlap. A length may be `MISSING`, `NULL_INSIDE` or `PATH_ONLY`.
    """

    buffer: NDArray[np.generic]
    """1-D; uint8 for bytes, text and JSON, the element dtype for lists, or uint8 where these lie anywhere."""
    starts: NDArray[np.int64]
    """[n], in elements of `buffer`."""
    lengths: NDArray[np.int64]
    """[n], in elements of `dtype`."""
    element: str = ""
    """dtype of the elements of lists that lie at any byte of `buffer`; "": that of `buffer`."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of one element."""
        return np.dtype(self.element) if self.element else self.buffer.dtype

    def value(self, i: int) -> NDArray[np.generic]:
        """The i-th value, a view."""
        start, count = int(self.starts[i]), int(self.lengths[i])
        if not self.element:
            return self.buffer[start : start + count]
        return self.buffer[start : start + count * self.dtype.itemsize].view(self.dtype)


class Masked(Struct, frozen=True):
    """n values of one dtype and shape, some of which are not there."""

    values: NDArray[np.generic]
    """[n, ...]; where a value is not there: NaN of floats, anything of others."""
    lacks: NDArray[np.int8]
    """[n] 0 where the value is there, else `MISSING` or `NULL_INSIDE`."""

    def __len__(self) -> int:
        return len(self.lacks)


Column = NDArray[np.generic] | Spans | Masked
"""A decoded column: an array `[n, ...]` (possibly a strided view of the block's bytes), one of which values
are missing, or spans."""

Columns = dict[str, Column]


class Format(ABC):
    """A file format: indexes and decodes shards. Stateless: one instance serves all threads.

    A format says how to `scan` and `decode`; all else has a default that is right for one whose values cannot
    be read by themselves, and whose samples and columns have no names of their own.
    """

    name: str
    """Name users give as `format=`."""
    of = ""
    """Name of the format that its files have, where that is another one; "": its own."""
    sibling_suffix = ""
    """Last ending of a file beside each shard, which `scan` is given as `sibling`; "": there is none."""
    may_lack_sibling = False
    """True if a shard may be without it; `scan` is then given none."""
    has_keys = False
    """True if samples have keys of their own, for `keys` to tell."""
    has_empty_samples = True
    """True if a sample may take no byte: if not, a block of more samples than bytes is damaged."""
    columns_are_extensions = False
    """True if a column is the file extension of its values, which tells how to decode them. A sample, and a
    whole shard, may then lack a column that others have, and a name may be one of `ALTERNATIVE` columns."""
    widens = False
    """True if `decode_as` brings columns to other types, and a shard may lack a column that others have."""
    locates_numbers = False
    """True if `locate` tells where columns of fixed size lie: they are delivered as they are stored."""
    token_column = ""
    """Column of fixed size that holds token ids, delivered as int64 whatever they are stored as; "": none."""
    listing_name = ""
    """Name of a file, in the folder of the shards or one above, that lists them; `scan` is given what it says
    of the shard as `listed`, or None where there is none. "": there is no such file."""

    if_changed = ""
    """The cure where a shard is gone, or changed since it was indexed, for messages; "": to index again."""

    def options(self) -> dict[str, str | int]:
        """Return what it was made with, as arguments of `resolve_format`, without those left at defaults.

        JSON values, kept in catalogs: they are all, besides the shards, that shapes the blocks.
        """
        return {}

    def alternatives(self, column: str) -> list[str]:
        """Return the stored columns that a column's name stands for: its value is the first there is."""
        return column.split(ALTERNATIVE) if self.columns_are_extensions else [column]

    def rule(self, spec: ColumnSpec) -> str | Callable[[bytes], Any] | None:
        """Return how `decode="auto"` decodes a column of byte strings whose kind does not tell.

        A name as in `decode=` ("pickle" is refused), or a function of one value's bytes that can be pickled,
        whose arrays become tensors; None: the bytes are delivered.
        """
        return decimal_of if spec.feature == DECIMAL else None

    @abstractmethod
    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index one shard by reading headers or footers only.

        `file` is seekable and positioned anywhere; for compressed formats it gives the stored bytes.
        Raises `CorruptShardError` naming shard and byte offset.
        """

    def check(self, block: Block) -> None:  # noqa: B027 - few have something to check
        """Raise `ValueError` where index and footer contradict the block's numbers.

        A catalog calls it once a block, before anybody else sees the block.
        """

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Return where the values lie in the stored bytes, known from `block.index` and geometry alone.

        The spans' buffer is empty; starts count bytes from `block.offset`, lengths are bytes.
        None where values cannot be read without decoding the whole block (Parquet, compressed files).
        """
        return None

    def value_bytes(self, block: Block, column: str) -> NDArray[np.int64] | None:
        """Bytes of each sample's value, [n], from the index alone; -1: it has none. None: the data tells."""
        spans = self.locate(block, [column])
        return None if spans is None else spans[column].lengths

    def num_missing(self, block: Block, column: str) -> int | None:
        """Samples that lack a value of a column, from the index alone; None: the data tells."""
        sizes = self.value_bytes(block, column)
        return None if sizes is None else int(np.count_nonzero(sizes < 0))

    def known_values(self, block: Block, column: str) -> list[Any]:
        """Values of a column whose sizes `value_bytes` does not tell, by the index alone; None: missing."""
        raise NotImplementedError

    def shard_name(self, url: str, footer: bytes | memoryview) -> str:
        """Return a name of the shard that stays when the dataset is copied elsewhere, for splits."""
        return file_name(url)

    def num_passed_over(self, footer: bytes) -> int:
        """Files of the shard with this footer that are part of no sample, such as hidden ones of a tar."""
        return 0

    def select(self, block: Block, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Byte ranges (offset in the file, length) that hold the columns of a block, for `decode` of these.

        Raises `CorruptShardError` for an unknown column where the format has its names at hand.
        """
        return [(block.offset, block.length)]

    @abstractmethod
    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Turn the stored bytes of a block into columns of `block.num_samples` values each.

        Columns may be views of `data`, which outlives them. `columns` None means all. A name that is not
        there raises `CorruptShardError`, or is missing from every sample where samples name their own
        columns (tar). Releases the GIL in the heavy parts; thread-safe.
        """

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """Decode as `decode` does, with columns of these types, which other shards have; None: of their own.

        Raises `ShardError` for a value that the type of the others cannot hold.
        """
        return self.decode(block, data, list(specs))

    def keys(self, block: Block, data: memoryview) -> list[str]:
        """Return what messages call each sample: its key where it has one, else its number in the shard."""
        return [str(block.first_in_shard + i) for i in range(block.num_samples)]

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64] | None:
        """The first byte of each sample, [n], in the shard or what it holds decompressed; for messages.

        Args:
            block: whose samples.
            data: its stored bytes; None: they cannot be had.

        Returns:
            None where samples have no bytes of their own, as rows of columns have none, or `data` would tell.
        """
        spans = list((self.locate(block, None) or {}).values())
        if not spans:
            return None
        none = np.iinfo(np.int64).max
        first = np.minimum.reduce([np.where(column.lengths >= 0, column.starts, none) for column in spans])
        return block.offset + np.where(first == none, 0, first)


def decimal_of(data: bytes) -> Decimal:
    """Return the number that digits are."""
    return Decimal(bytes(data).decode())


def common_dtype(dtypes: Collection[str]) -> str | None:
    """The narrowest dtype whose numbers are all of these; integers and floats alone have one."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    kinds = {np.dtype(dtype).kind for dtype in dtypes}
    if not kinds <= set("iuf"):
        return None
    if "f" in kinds:
        # The widest of what each needs beside the widest float: int16 and uint16 both fit float32.
        widest = np.result_type(*(dtype for dtype in dtypes if np.dtype(dtype).kind == "f"))
        return max((np.result_type(dtype, widest) for dtype in dtypes), key=lambda kind: kind.itemsize).name
    if kinds == {"i", "u"} and "uint64" in dtypes:
        return "uint64"
    return np.result_type(*sorted(dtypes)).name


def spec_text(spec: ColumnSpec) -> str:
    """One column's type, for messages: "float32[20]", "json", "list of int32", "int64 (timestamp[ms])"."""
    unit = f" ({spec.unit})" if spec.unit else ""
    if spec.kind == "fixed":
        shape = f"[{', '.join(map(str, spec.shape))}]" if spec.shape else ""
        return f"{spec.dtype}{shape}{unit}"
    what = {
        "list": f"list of {spec.dtype}{unit}",
        "bytes_list": "list of bytes",
        "null_list": "list of nulls",
        "other": spec.note,
    }.get(spec.kind, spec.kind)
    return f"{what} ({spec.feature_type})" if spec.feature else what
