"""Write datasets as shards that are either complete or not there.

An exception removes the shard in progress and leaves the finished ones (`NewFile`). Output depends on the
samples alone (no times, users or host names), so a second run gives the same bytes. What webdataset would
read back differently from what was written (dots in keys, repeated keys, `__meta__` names) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Self, cast

from sharding.compression import compression_of
from sharding.errors import ShardWriteError
from sharding.formats import ENTRIES, has_suffix, sibling, suffix_of
from sharding.write.file import NewFile, no_room, space_at
from sharding.write.shard import (
    NewJsonlShard,
    NewShard as NewShard,  # for writers outside
    NewTableShard,
    NewTarShard,
    Sample,
    TypesDifferError,
)
from sharding.write.tokens import TokenOptions

DEFAULT_SHARD_BYTES = 1 << 30
DEFAULT_ROW_GROUP_SIZE = 1024
_NUMBER = re.compile(r"%0(\d+)d|%d|\{(?::0?(\d+)d?)?\}")
_BRACES = re.compile(r"\{[^{}]*(?:\.\.|,)[^{}]*\}")
_TOKENS = {
    "tokens": "sharding.write.tokens:NewTokenShard",
    "megatron": "sharding.write.megatron:NewMegatronShard",
}
_MDS = "sharding.write.mds:NewMdsShard"
_FORMATS = ("tar", "parquet", "arrow", "arrow-stream", "jsonl", "mds", *_TOKENS)


@dataclass(frozen=True)
class WrittenShard:
    """A finished shard."""

    url: str
    num_samples: int
    num_bytes: int
    """The number of bytes in the store."""


class ShardWriter:
    """Write samples into numbered shards; a context manager, not thread-safe.

    A shard is finished when it has `max_count` samples or `max_bytes` bytes, whichever comes first. Parquet
    bytes are counted a row group at a time. Without either limit, numbered shards end at 1 GiB.

    Args:
        pattern: where shards go: a path or fsspec URL with the shard's number as `%06d` or `{:06d}`;
            without a number there is one shard.
        format: "tar" (also `.tar.gz`, `.tgz`, `.tar.zst`), "parquet", "arrow", "arrow-stream", "jsonl" (also
            `.jsonl.gz`, `.jsonl.zst`), "mds", "tokens" or "megatron"; None: by the pattern's ending, which
            must be `.bin` for the last two.
        max_count: samples a shard may have.
        max_bytes: stored bytes after which a shard ends.
        storage_options: for the fsspec filesystem.
        overwrite: replace shards that exist; otherwise they raise `FileExistsError`.
        allow_pickle: write extensions and arrays that reading would have to unpickle.
        row_group_size: samples in a Parquet row group, or a record batch of Arrow.
        schema: `pyarrow.Schema` of Parquet and Arrow shards; None: the narrowest types that hold the rows of
            a row group. Where a later one needs wider types, the next shard begins.
        columns: of MDS shards, column -> encoding as Streaming names them; None: what the first sample shows.
        rounds: whether floats are rounded to the types of `schema` and `columns`; else such are refused.
        start: number of the first shard.
        dtype: of a token, such as "uint16"; token shards need it.
        length: tokens of a sample where the reader of token shards gives no `length=`.
        end_token: appended to each document of token shards.
        tokenizer: what identifies the tokenizer, such as a hash of its file; kept beside token shards.

    Examples:
        >>> with ShardWriter("train-%06d.tar", max_count=1000) as shards:
        ...     for i in range(3):
        ...         shards.write({"__key__": f"{i:06d}", "npy": np.zeros(4, np.float32), "cls": i})
        >>> len(ShardedDataset("train-*.tar"))
        3
    """

    def __init__(
        self,
        pattern: str,
        *,
        format: str | None = None,  # noqa: A002 - the name users give everywhere
        max_count: int | None = None,
        max_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        row_group_size: int = DEFAULT_ROW_GROUP_SIZE,
        schema: Any = None,
        columns: Mapping[str, str] | None = None,
        rounds: bool = True,
        start: int = 0,
        dtype: str | None = None,
        length: int | None = None,
        end_token: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self._number = _number_in(pattern)
        _check_limits(self._number, pattern, max_count, max_bytes, row_group_size)
        if self._number and max_count is None and max_bytes is None:
            max_bytes = DEFAULT_SHARD_BYTES
        self._pattern, self._next = pattern, start
        self._max_count, self._max_bytes = max_count, max_bytes
        self._new_file = partial(NewFile, storage_options=storage_options, overwrite=overwrite)
        name = _format_of(pattern, format)
        tokens = {"dtype": dtype, "length": length, "end_token": end_token, "tokenizer": tokenizer}
        self._new_shard: Callable[[NewFile], NewShard]
        if name in _TOKENS:
            if dtype is None:
                raise ValueError(f"format {name!r} needs dtype=, the type of a token, such as 'uint16'")
            options = TokenOptions(dtype=dtype, length=length, end_token=end_token, tokenizer=tokenizer)
            self._new_shard = partial(resolve_name(_TOKENS[name]), options=options)
        elif token_options := [option for option, value in tokens.items() if value is not None]:
            raise ValueError(f"{token_options[0]}= is for formats {' and '.join(_TOKENS)}, not for {name!r}")
        elif columns is not None and name != "mds":
            raise ValueError(f"columns= is for format 'mds', not for {name!r}")
        elif name == "mds":
            is_rounded = rounds and columns is not None
            self._new_shard = partial(resolve_name(_MDS), columns=columns, rounds=is_rounded)
        elif name == "tar":
            self._new_shard = partial(NewTarShard, allow_pickle=allow_pickle)
        elif name == "jsonl":
            self._new_shard = NewJsonlShard
        else:
            typed = {"schema": schema, "types": None if schema is not None else {}, "rounds": rounds}
            self._new_shard = partial(NewTableShard, format=name, row_group_size=row_group_size, **typed)
        self._shards: list[WrittenShard] = []
        self._file: NewFile | None = None
        self._shard: NewShard | None = None
        self._num_samples = 0

    @property
    def shards(self) -> tuple[WrittenShard, ...]:
        """Return the shards that were finished so far."""
        return tuple(self._shards)

    def write(self, sample: Sample) -> None:
        """Append one sample.

        Tar: `__key__` and a value per extension; webdataset's encoders turn str, int, json, npy and so on
        into bytes by extension; other names beginning with "_" are not written, as in webdataset. Parquet,
        Arrow and JSON Lines: any names; a name may lack in some samples. Token shards: `tokens`, the
        integers of a document.

        Raises:
            SampleError: the sample cannot be written; nothing of it was, and writing may go on. (In Parquet
                and Arrow, what is wrong with a row is noticed when its row group is written.)
            FileExistsError: the shard to begin is there already.
            ShardWriteError: there is no room (an `OSError`, too). The shard in progress is gone, those before
                it are whole.
        """
        self._put(lambda shard: shard.add(sample), 1)

    def write_many(self, samples: Sequence[Sample]) -> None:
        """Append samples in order, many at once where that is less work: into one shard, however large.

        Raises as `write` does; a sample that cannot be written is then called by its number in the shard.
        """

        def put(shard: NewShard) -> None:
            if add_many := getattr(shard, "add_many", None):
                add_many(samples)
                self._num_samples += len(samples)
                return
            for sample in samples:
                shard.add(sample)
                self._num_samples += 1

        if samples:
            self._put(put, 0)

    def write_table(self, table: Any) -> None:
        """Append the rows of a `pyarrow.Table` to a Parquet or Arrow shard, as row groups of their own.

        What was written of single samples before comes first. Raises as `write` does, and `ValueError` for
        other formats.
        """

        def put(shard: NewShard) -> None:
            if not isinstance(shard, NewTableShard):
                raise ValueError("tables are written to Parquet and Arrow shards")
            shard.add_table(table)

        self._put(put, table.num_rows)

    def write_bytes(self, data: bytes | memoryview, num_samples: int) -> None:
        """Append samples to a tar shard as they lie in another: whole members, without an end of archive.

        They are not looked at: whose keys repeat, or links lead elsewhere, is not noticed. Raises as `write`.
        """

        def put(shard: NewShard) -> None:
            if not isinstance(shard, NewTarShard):
                raise ValueError("bytes of other shards are appended to tars")
            shard.add_members(data)

        self._put(put, num_samples)

    def _put(self, put: Callable[[NewShard], None], num_samples: int) -> None:
        if self._full():
            self.close()
        try:
            put(self._shard or self._begin())
        except TypesDifferError:
            self._put_into_the_next()
        except BaseException as error:
            self._raise_if_no_room(error)
            raise
        else:
            self._num_samples += num_samples

    def _put_into_the_next(self) -> None:
        """End a shard before the rows that it holds back: their types are none of its own."""
        shard = self._shard
        assert isinstance(shard, NewTableShard)
        if self._number is None:
            raise
        rows, self._num_samples = list(shard.rows), shard.num_written
        shard.rows.clear()
        self.close()
        self._put(lambda shard: cast(NewTableShard, shard).add_many(rows), len(rows))

    def close(self) -> None:
        """Finish the shard in progress; writing may go on in the next one."""
        if self._file is None or self._shard is None or not self._num_samples:
            self._abandon()
            return
        try:
            try:
                beside = self._shard.finish()
            except TypesDifferError:
                self._put_into_the_next()
                self.close()
                return
            # What lies beside a shard comes first: a shard that is there can be read.
            for suffix, content in beside.items():
                self._write_beside(suffix, content)
            self._file.commit()
        except BaseException as error:
            self._raise_if_no_room(error)
            self._abandon()
            raise
        file = self._file
        self._shards.append(WrittenShard(file.url, self._num_samples, file.num_bytes))
        self._file = self._shard = None
        self._num_samples = 0
        self._next += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _begin(self) -> NewShard:
        if self._number is None and self._shards:
            raise ValueError(
                f"the only shard is finished; for more, put %06d into the pattern {self._pattern!r}"
            )
        self._file = self._new_file(self._next_url())
        try:
            self._shard = self._new_shard(self._file)
        except BaseException:
            self._abandon()
            raise
        return self._shard

    def _raise_if_no_room(self, error: BaseException) -> None:
        """Raise what a full disk means for the shards, if that is what an error is about."""
        full, file, num_samples = no_room(error), self._file, self._num_samples
        if full is None:
            return
        url, written = (file.url, file.num_bytes) if file is not None else (self._next_url(), 0)
        space = file.space if file is not None else space_at(url)
        self._abandon()
        lost = f"this shard, of {num_samples:,} samples and {written:,} bytes so far, is removed"
        whole, cure = "", "free some space and write its samples again"
        if self._number:
            last = f", the last is {self._shards[-1].url}" if self._shards else ""
            whole = f"{len(self._shards):,} shards are whole{last}"
            cure += f", in another run with start={self._next}"
        parts = "; ".join(filter(None, [lost, space, whole, cure]))
        raise ShardWriteError(url, f"{full.strerror or full}: {parts}", full.errno) from error

    def _abandon(self) -> None:
        file, shard = self._file, self._shard
        self._file = self._shard = None
        self._num_samples = 0
        if file is not None:
            file.discard()
        if shard is not None:
            shard.abandon()

    def _write_beside(self, suffix: str, content: bytes) -> None:
        assert self._file is not None
        file = self._new_file(sibling(self._file.url, suffix))
        try:
            file.write(content)
            file.commit()
        finally:
            file.discard()

    def _full(self) -> bool:
        if self._file is None or not self._num_samples:
            return False
        too_many = self._max_count is not None and self._num_samples >= self._max_count
        return too_many or (self._max_bytes is not None and self._file.num_bytes >= self._max_bytes)

    def _next_url(self) -> str:
        if self._number is None:
            return self._pattern
        width = int(self._number[1] or self._number[2] or 0)
        before, after = self._pattern[: self._number.start()], self._pattern[self._number.end() :]
        return f"{before}{self._next:0{width}d}{after}"


def _number_in(pattern: str) -> re.Match[str] | None:
    numbers = list(_NUMBER.finditer(pattern))
    if len(numbers) > 1:
        raise ValueError(f"a pattern must have one number at most, got {pattern!r}")
    if _BRACES.search(pattern):
        raise ValueError(
            f"braces name shards to read; to write some, put %04d where the number goes; got {pattern!r}"
        )
    return numbers[0] if numbers else None


def _check_limits(
    number: re.Match[str] | None,
    pattern: str,
    max_count: int | None,
    max_bytes: int | None,
    row_group_size: int,
) -> None:
    limits = {"max_count": max_count, "max_bytes": max_bytes, "row_group_size": row_group_size}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be >= 1, got {limit}")
    if number is None and (max_count or max_bytes):
        raise ValueError(f"several shards need a number such as %06d in the pattern, got {pattern!r}")


def _format_of(pattern: str, name: str | None) -> str:
    if name is None:
        name = next((name for name in _FORMATS if has_suffix(pattern, ENTRIES[name].suffixes)), None)
    if name not in _FORMATS:
        listed = ", ".join(_FORMATS)
        raise ValueError(
            f"format must be one of {listed} (or the pattern end so), got {name!r} for {pattern!r}"
        )
    if name in _TOKENS and suffix_of(pattern) != ".bin":
        raise ValueError(f"shards of format {name!r} end in .bin, got {pattern!r}")
    if not ENTRIES[name].may_be_compressed and compression_of(pattern):
        raise ValueError(f"format {name!r} compresses inside the file, if at all: {pattern!r} names a stream")
    return name
