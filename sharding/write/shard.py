"""One shard in progress: samples in, the bytes of one file out.

Tar goes through webdataset's own encoders, Parquet and Arrow through pyarrow's writers.
Samples are checked before any byte of them is written, in tables when their rows are.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO, cast

import numpy as np

from sharding.compression import compression_of
from sharding.errors import SampleError
from sharding.formats.extensions import INT_EXTENSIONS, PICKLED_EXTENSIONS, rule_of_extension
from sharding.formats.tar.samples import split_name
from sharding.write.file import NewFile
from sharding.write.values import DEEPEST, check_keys, check_row, check_rows, column_of, json_value

Sample = Mapping[str, Any]
_BLOCK, _RECORD = 512, 10_240


class NewShard(ABC):
    """A shard in progress, compressed if its name says so. After `finish`, its file can be committed."""

    def __init__(self, file: NewFile) -> None:
        self._file, self._out = file, _compressed(file)

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Append a sample; `SampleError` leaves the shard as it was."""

    def finish(self) -> Mapping[str, bytes]:
        """Write what is held back. Gives what belongs beside the file: last ending -> content."""
        if self._out is not self._file:
            self._out.close()
        return {}

    def abandon(self) -> None:
        """Let go of everything; called after the file was discarded, which swallows what is flushed."""
        NewShard.finish(self)  # of all that its own kind would write, nothing

    def refused(self, reason: str, key: str | None = None) -> SampleError:
        """The error of a sample that cannot be written."""
        return SampleError(self._file.url, reason, key=key, stage="write")


class NewTarShard(NewShard):
    """A tar shard."""

    def __init__(self, file: NewFile, *, allow_pickle: bool) -> None:
        super().__init__(file)
        self._allow_pickle, self._num_bytes = allow_pickle, 0
        self._encode: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        self._last_key: str | None = None

    def add(self, sample: Sample) -> None:
        """Append a sample: `__key__` and a value per extension; other names with "_" first are left out."""
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise self.refused(f"a sample needs a '__key__' of type str, got {key!r}")
        check_rows(self._file.url, [sample])
        fields = {name: value for name, value in sample.items() if not name.startswith("_")}
        refusal = self._refusal(key, fields)
        if refusal:
            raise self.refused(refusal, key)
        encoded = [(name, self._encoded(key, name, fields[name])) for name in sorted(fields)]
        try:
            heads = [header_of(f"{key}.{name}", len(data)) for name, data in encoded]
        except ValueError as error:
            raise self.refused(f"a tar cannot hold its name: {error}", key) from error
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
            if rule_of_extension(name) == "json":
                check_keys(value)
            return bytes(self._encode({name: value})[name])
        except ImportError:
            raise
        except Exception as error:
            reason = f"{name!r} of type {type(value).__name__} cannot be encoded: {error}; give its bytes"
            raise self.refused(reason, key) from error

    def finish(self) -> Mapping[str, bytes]:
        """Write the end of the archive: two empty blocks, filled up to a record."""
        self._put(bytes(2 * _BLOCK))
        self._put(bytes(-self._num_bytes % _RECORD))
        return super().finish()

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
                return f"{name!r} would be written as {str(value)!r}, which is no int64; give an int"
            if not self._allow_pickle and _is_pickled(name, value):
                return (
                    f"{name!r} would have to be unpickled; to write it all the same, give allow_pickle=True"
                )
        return None


class TypesDifferError(SampleError):
    """Rows that are held back have values of a wider type, or columns, than the shard that is begun."""


class NewTableShard(NewShard):
    """A Parquet or Arrow shard. Where no schema is given, the first row group decides it.

    Args:
        file: where it goes.
        format: "parquet", "arrow" or "arrow-stream".
        row_group_size: rows that are written together.
        schema: types of the columns, as the user names them; None: those that hold the first rows.
        types: those of shards before, where no schema is given; this one adds its own.
        rounds: whether numbers may be rounded to a type of `schema`.
    """

    def __init__(
        self,
        file: NewFile,
        *,
        format: str,  # noqa: A002
        row_group_size: int,
        schema: Any = None,
        types: dict[str, Any] | None = None,
        rounds: bool = False,
    ) -> None:
        super().__init__(file)
        self._row_group_size, self._schema = row_group_size, schema
        self._format, self._types, self._rounds = format, types if schema is None else None, rounds
        self._writer: Any = None
        self.rows: list[Sample] = []
        """The rows that are held back until their row group is full."""
        self.num_written = 0

    def add(self, sample: Sample) -> None:
        """Append a row; what is wrong with its names and values is noticed when its row group is written."""
        if not sample:
            raise self.refused("a sample needs a field")
        self.rows.append(dict(sample))
        if len(self.rows) >= self._row_group_size:
            self._flush()

    def add_many(self, samples: Sequence[Sample]) -> None:
        """Append rows as `add` does, dicts without a copy: they must not change any more."""
        self.rows += samples if set(map(type, samples)) == {dict} else map(dict, samples)
        while len(self.rows) >= self._row_group_size:
            self._flush()

    def add_table(self, table: Any) -> None:
        """Append the rows of a table, in row groups of its own."""
        while self.rows:
            self._flush()
        self._write(table, self._row_group_size)

    def finish(self) -> Mapping[str, bytes]:
        """Write the last rows and the footer."""
        while self.rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        return super().finish()

    def abandon(self) -> None:
        """Forget the rows, and close the writer."""
        self.rows.clear()
        self.finish()

    def _flush(self) -> None:
        rows = self.rows[: self._row_group_size]
        self._write(self._table(rows), len(rows))
        del self.rows[: len(rows)]

    def _write(self, table: Any, rows_of_group: int) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._schema = self._schema or table.schema
            self._writer = self._opened(pa.PythonFile(self._file, mode="w"), self._schema)
        self._writer.write_table(table, rows_of_group)
        self.num_written += table.num_rows

    def _opened(self, file: Any, schema: Any) -> Any:
        import pyarrow as pa

        if self._format == "parquet":
            import pyarrow.parquet as pq

            return pq.ParquetWriter(file, schema)
        return (pa.ipc.new_file if self._format == "arrow" else pa.ipc.new_stream)(file, schema)

    def _table(self, rows: Sequence[Sample]) -> Any:
        import pyarrow as pa

        kinds = {} if self._schema is None else {field.name: field.type for field in self._schema}
        names = dict.fromkeys(chain.from_iterable(rows))
        if not all(isinstance(name, str) for name in names):
            check_rows(self._file.url, rows, self.num_written)
        if kinds and (unknown := sorted(names.keys() - kinds.keys())):
            reason = f"columns that the first row group lacks: {', '.join(unknown)}"
            raise self._refused(rows, unknown[0], reason, None, self._types is not None)
        columns = {name: self._array(name, rows, kinds.get(name)) for name in kinds or names}
        return pa.table(columns, schema=self._schema)

    def _array(self, name: str, rows: Sequence[Sample], kind: Any) -> Any:
        """A column of rows; without a schema, in the type that these rows or those before show."""
        import pyarrow as pa

        from sharding.write.arrays import array_of, as_kind, common_type

        values, widens = column_of(rows, name), False
        try:
            if self._types is None:
                return array_of(values, kind, rounds=self._rounds)
            array = array_of(values)
            common = common_type(self._types.get(name, pa.null()), array.type)
            if kind is None:
                self._types[name] = common
                return as_kind(array, common) if pa.types.is_null(array.type) else array
            widens = common != kind
            return as_kind(array, kind)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
            raise self._refused(rows, name, f"column {name!r}: {error}", kind, widens) from error

    def _refused(
        self, rows: Sequence[Sample], column: str, reason: str, kind: Any, widens: bool
    ) -> SampleError:
        """The error of a column, by the first row whose value is not of its type.

        `widens`: whether the next shard can hold the rows.
        """
        number = self._first_unfit(rows, column, kind)
        key = None if number is None else str(rows[number].get("__key__", self.num_written + number))
        cure = "schema= tells the types" if self._types is not None else "map= or schema= may give one type"
        if widens:
            cure += ", and with %06d in the pattern another shard begins"
        error = TypesDifferError if widens else SampleError
        return error(self._file.url, f"{reason}; {cure}", key=key, stage="write")

    def _first_unfit(self, rows: Sequence[Sample], column: str, kind: Any) -> int | None:
        """The first of some rows whose value a type, or that of the rows before, cannot hold."""
        import pyarrow as pa

        from sharding.write.arrays import array_of, as_kind, common_type

        if kind is None and self._schema is not None:
            return next((number for number, row in enumerate(rows) if column in row), None)
        arrays, common = list[Any](), pa.null() if kind is None else kind
        number = 0
        try:
            for number, row in enumerate(rows):  # noqa: B007 - the number of the one that fails
                arrays.append(array_of([row.get(column)]))
                common = kind or common_type(common, arrays[-1].type)
            for number, array in enumerate(arrays):  # noqa: B007
                as_kind(array, common, rounds=self._rounds)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError):
            return number
        return None


class NewJsonlShard(NewShard):
    """JSON Lines: an object a sample, arrays as lists."""

    def __init__(self, file: NewFile) -> None:
        super().__init__(file)
        self._num_samples = 0
        self._names: frozenset[str] = frozenset()  # of rows that were looked at
        self._encode = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=json_value
        ).encode

    def add(self, sample: Sample) -> None:
        """Append a line."""
        self._out.write(self._line(sample, self._num_samples) + b"\n")
        self._num_samples += 1

    def add_many(self, samples: Sequence[Sample]) -> None:
        """Append lines, all or none."""
        lines = [self._line(sample, number) for number, sample in enumerate(samples, self._num_samples)]
        self._out.write(b"\n".join([*lines, b""]))
        self._num_samples += len(lines)

    def _line(self, sample: Sample, number: int) -> bytes:
        try:
            row = sample if type(sample) is dict else dict(sample)
            if not row.keys() <= self._names:
                check_row(row)
                self._names = frozenset(row)
            line = self._encode(row)
            if line.find("{", 1) > 0:
                check_keys([*row.values()])
            if len(line) > 2 * DEEPEST and line.count("[") + line.count("{") > DEEPEST:
                check_row(row)
            data = line.encode()
        except (RecursionError, TypeError, ValueError) as error:
            check_rows(self._file.url, [sample], number)
            key = str(sample.get("__key__", number))
            raise self.refused(f"it cannot be written as JSON: {error}", key) from error
        if not row:
            raise self.refused("a sample needs a field", str(number))
        return data


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


def _compressed(file: NewFile) -> Any:
    """A stream that compresses into a file, and leaves it open; the file itself where its name says none."""
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
    return file


def _survives(key: str, extension: str) -> bool:
    written = [text.encode("utf-8", "surrogateescape") for text in (key, extension)]
    name = b".".join(written)
    return bool(extension) and b"\0" not in name and split_name(name) == tuple(written)


def _reads_as_number(extension: str, value: Any) -> bool:
    """Return whether webdataset writes a label, by `str`, as an integer; text and bytes are the user's."""
    if isinstance(value, str | bytes) or extension.rpartition(".")[2] not in INT_EXTENSIONS:
        return True
    with suppress(ValueError):
        return -(1 << 63) <= int(str(value)) < 1 << 63
    return False


def _is_pickled(extension: str, value: Any) -> bool:
    if not set(PICKLED_EXTENSIONS).isdisjoint(extension.lower().split(".")):
        return True
    values = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(item, np.ndarray) and item.dtype.hasobject for item in values)
