"""One shard in progress: samples in, the bytes of one file out.

Tar goes through webdataset's own encoders, Parquet and Arrow through pyarrow's writers.
Samples are checked before any byte of them is written, in tables when their rows are.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from sharding.compression import compression_of
from sharding.errors import SampleError
from sharding.formats.extensions import INT_EXTENSIONS, PICKLED_EXTENSIONS
from sharding.formats.tar.samples import split_name
from sharding.write.file import NewFile

Sample = Mapping[str, Any]
_BLOCK, _RECORD = 512, 10_240
"""Extensions that webdataset writes with `str` and reads with `int`."""


class NewShard(Protocol):
    """A shard in progress. After `finish`, its file can be committed."""

    def add(self, sample: Sample) -> None:
        """Append a sample; `SampleError` leaves the shard as it was."""
        ...

    def finish(self) -> Mapping[str, bytes]:
        """Write what is held back. Gives what belongs beside the file: last ending -> content."""
        ...

    def abandon(self) -> None:
        """Let go of everything; called after the file was discarded."""
        ...


class NewTarShard:
    """A tar shard, compressed if its name says so."""

    def __init__(self, file: NewFile, *, allow_pickle: bool) -> None:
        self._url, self._allow_pickle = file.url, allow_pickle
        self._encode: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        self._compressor = _compressor(file)
        self._out, self._num_bytes = self._compressor or file, 0
        self._last_key: str | None = None

    def add(self, sample: Sample) -> None:
        """Append a sample: `__key__` and a value per extension; other names with "_" first are left out."""
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise SampleError(
                self._url, f"a sample needs a '__key__' of type str, got {key!r}", stage="write"
            )
        fields = {name: value for name, value in sample.items() if not name.startswith("_")}
        refusal = self._refusal(key, fields)
        if refusal:
            raise SampleError(self._url, refusal, key=key, stage="write")
        encoded = [(name, self._encoded(key, name, fields[name])) for name in sorted(fields)]
        try:
            heads = [header_of(f"{key}.{name}", len(data)) for name, data in encoded]
        except ValueError as error:
            raise SampleError(
                self._url, f"a tar cannot hold its name: {error}", key=key, stage="write"
            ) from error
        for head, (_, data) in zip(heads, encoded, strict=True):
            self._put(head)
            self._put(data)
            self._put(bytes(-len(data) % _BLOCK))
        self._last_key = key

    def _put(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self._num_bytes += len(data)

    def add_members(self, data: bytes | memoryview) -> None:
        """Append members of another archive as they are: headers and values, padded, without an end."""
        self._put(data)

    def _encoded(self, key: str, name: str, value: Any) -> bytes:
        if type(value) is bytes:
            return value
        if self._encode is None:  # importing it takes longer than writing a shard of bytes
            from webdataset.writer import default_handlers, make_encoder

            self._encode = make_encoder(default_handlers)
        try:
            return bytes(self._encode({name: value})[name])
        except ImportError:
            raise
        except Exception as error:
            reason = f"{name!r} of type {type(value).__name__} cannot be encoded: {error}; give its bytes"
            raise SampleError(self._url, reason, key=key, stage="write") from error

    def finish(self) -> Mapping[str, bytes]:
        """Write the end of the archive: two empty blocks, filled up to a record."""
        self._put(bytes(2 * _BLOCK))
        self._put(bytes(-self._num_bytes % _RECORD))
        if self._compressor is not None:
            self._compressor.close()
        return {}

    def abandon(self) -> None:
        """Close the stream; a discarded file swallows what it flushes."""
        if self._compressor is not None:
            self._compressor.close()

    def _refusal(self, key: str, fields: Sample) -> str | None:
        """Why webdataset would not read the sample back as it is, or None."""
        if not fields:
            return "a sample needs a field besides '__key__'"
        if key == self._last_key:
            return "two samples in a row with one key would be read as one"
        for name, value in fields.items():
            if name != name.lower() or not _survives(key, name):
                return f"{key}.{name} would not be read back as key {key!r} and extension {name!r}"
            if not _reads_as_number(name, value):
                return f"{name!r} would be written as {str(value)!r}, which is no integer; give an int"
            if not self._allow_pickle and _is_pickled(name, value):
                return (
                    f"{name!r} would have to be unpickled; to write it all the same, give allow_pickle=True"
                )
        return None


class NewTableShard:
    """A Parquet or Arrow shard. Where no schema is given, the first row group decides it."""

    def __init__(self, file: NewFile, *, format: str, row_group_size: int, schema: Any = None) -> None:  # noqa: A002
        self._file, self._row_group_size, self._schema = file, row_group_size, schema
        self._format = format
        self._rows: list[Sample] = []
        self._num_written = 0
        self._writer: Any = None

    def add(self, sample: Sample) -> None:
        """Append a row; a value of the wrong type is noticed when its row group is written."""
        if not sample:
            raise SampleError(self._file.url, "a sample needs a field", stage="write")
        self._rows.append(dict(sample))
        if len(self._rows) >= self._row_group_size:
            self._flush()

    def add_many(self, samples: Sequence[Sample]) -> None:
        """Append rows as `add` does, without a copy: they must not change any more."""
        left = list(samples)
        while left:
            room = self._row_group_size - len(self._rows)
            self._rows += left[:room]
            del left[:room]
            if len(self._rows) >= self._row_group_size:
                self._flush()

    def add_table(self, table: Any) -> None:
        """Append the rows of a table, in row groups of its own."""
        import pyarrow as pa

        self._flush()
        if self._schema is None:
            self._schema = table.schema
        if self._writer is None:
            self._writer = self._opened(pa.PythonFile(self._file, mode="w"), self._schema)
        self._writer.write_table(table, self._row_group_size)

    def finish(self) -> Mapping[str, bytes]:
        """Write the last rows and the footer."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
        return {}

    def abandon(self) -> None:
        """Close the writer; a discarded file swallows the footer."""
        self._rows.clear()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        table = self._table(pa)
        if self._writer is None:
            self._schema = table.schema
            self._writer = self._opened(pa.PythonFile(self._file, mode="w"), table.schema)
        self._writer.write_table(table, len(self._rows))
        self._num_written += len(self._rows)
        self._rows.clear()

    def _opened(self, file: Any, schema: Any) -> Any:
        import pyarrow as pa

        if self._format == "parquet":
            import pyarrow.parquet as pq

            return pq.ParquetWriter(file, schema)
        return (pa.ipc.new_file if self._format == "arrow" else pa.ipc.new_stream)(file, schema)

    def _table(self, pa: Any) -> Any:
        types = {} if self._schema is None else {field.name: field.type for field in self._schema}
        names = dict.fromkeys(name for row in self._rows for name in row)
        unknown = names.keys() - types.keys() if types else ()
        if unknown:
            listed = ", ".join(sorted(unknown))
            raise self._refused(next(iter(unknown)), f"columns that the first row group lacks: {listed}")
        columns = {}
        for name in types or names:
            try:
                columns[name] = _array(pa, [row.get(name) for row in self._rows], types.get(name))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise self._refused(name, f"column {name!r}: {error}", types.get(name)) from error
        return pa.table(columns, schema=self._schema)

    def _refused(self, column: str, reason: str, kind: Any = None) -> SampleError:
        """The error of a column, by the first row whose value is not of its type."""
        found = self._first_unfit(column, kind) if kind is not None else None
        rows = [number for number, row in enumerate(self._rows) if row.get(column) is not None]
        number = found if found is not None else rows[0] if len(rows) == 1 else None
        key = None
        if number is not None:
            key = str(self._rows[number].get("__key__", self._num_written + number))
        return SampleError(self._file.url, f"{reason}; schema= tells the types", key=key, stage="write")

    def _first_unfit(self, column: str, kind: Any) -> int | None:
        """The first of the rows held whose value a type cannot hold."""
        import pyarrow as pa

        for number, row in enumerate(self._rows):
            try:
                pa.array([row.get(column)], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                return number
        return None


def _array(pa: Any, values: list[Any], kind: Any) -> Any:
    """An Arrow array. Plain values by hand: `pa.array` looks for pandas, whose import takes a second."""
    from sharding.arrow_arrays import bytes_array, number_array, text_array

    kinds = set(map(type, values))
    if kind == pa.int64() and kinds == {int}:
        return number_array(np.array(values, np.int64))
    if kind == pa.float64() and kinds == {float}:
        return number_array(np.array(values, np.float64))
    with suppress(OverflowError):  # more than one array of this type holds: Arrow makes several
        if kind == pa.string() and kinds == {str}:
            return text_array(values, kind)
        if kind == pa.binary() and kinds == {bytes}:
            return bytes_array(values, kind)
    return pa.array(values, kind)


class NewJsonlShard:
    """JSON Lines, compressed if its name says so: an object a sample, arrays as lists."""

    def __init__(self, file: NewFile) -> None:
        self._url, self._compressor = file.url, _compressor(file)
        self._out = self._compressor or file
        self._encode = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
        ).encode

    def add(self, sample: Sample) -> None:
        """Append a line."""
        try:
            if not sample:
                raise ValueError("a sample needs a field")
            line = self._encode(dict(sample)).encode()
        except (TypeError, ValueError) as error:
            key = sample.get("__key__")
            reason = f"it cannot be written as JSON: {error}"
            raise SampleError(
                self._url, reason, key=None if key is None else str(key), stage="write"
            ) from error
        self._out.write(line + b"\n")

    def finish(self) -> Mapping[str, bytes]:
        """Write what the compressor holds."""
        if self._compressor is not None:
            self._compressor.close()
        return {}

    def abandon(self) -> None:
        """Close the stream; a discarded file swallows what it flushes."""
        self.finish()


def _plain(value: Any) -> Any:
    """Return what JSON has for a number or an array of numpy or torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    kind = type(value).__name__
    raise TypeError(f"a value of type {kind} is none of JSON's; tar and Parquet shards hold byte strings")


def header_of(name: str, size: int) -> bytes:
    """Return the header of a member, as webdataset has `tarfile` write it (mode 644, nobody's, of 1970)."""
    if size >= 1 << 33 or len(name) >= 100 or not name.isascii():
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")  # one more member says it
    text, digits = name.encode(), b"%011o" % size
    checksum = b"%06o" % (_PLAIN_SUM + sum(text) + sum(digits))
    return b"".join(
        [text.ljust(100, b"\0"), _PLAIN[100:124], digits, _PLAIN[135:148], checksum, _PLAIN[154:]]
    )


def _plain_header() -> tuple[bytes, int]:
    """The header of a member without a name and of no bytes, and what name and size add to in its sum."""
    info = tarfile.TarInfo("")
    info.mode = 0o644
    head = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    return head, int(head[148:154], 8) - sum(b"0" * 11)


_PLAIN, _PLAIN_SUM = _plain_header()


def _compressor(file: NewFile) -> Any:
    """A stream that compresses into `file`, or None. It leaves `file` open."""
    kind = compression_of(file.url)
    if kind == "gzip":
        return gzip.GzipFile(filename="", mode="wb", fileobj=cast(BinaryIO, file), mtime=0)
    if kind == "zstd":
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("writing .zst files needs `pip install 'dataflow-loader[zstd]'`") from error
        return zstandard.ZstdCompressor(write_checksum=True).stream_writer(
            cast(BinaryIO, file), closefd=False
        )
    return None


def _survives(key: str, extension: str) -> bool:
    written = [text.encode("utf-8", "surrogateescape") for text in (key, extension)]
    name = b".".join(written)
    return bool(extension) and b"\0" not in name and split_name(name) == tuple(written)


def _reads_as_number(extension: str, value: Any) -> bool:
    """Return whether webdataset writes a label, by `str`, as an integer; text and bytes are the user's."""
    if isinstance(value, str | bytes) or extension.rpartition(".")[2] not in INT_EXTENSIONS:
        return True
    try:
        int(str(value))
    except ValueError:
        return False
    return True


def _is_pickled(extension: str, value: Any) -> bool:
    if not set(PICKLED_EXTENSIONS).isdisjoint(extension.lower().split(".")):
        return True
    values = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(one, np.ndarray) and one.dtype.hasobject for one in values)
