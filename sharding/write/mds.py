"""MDS shards in progress, as MosaicML Streaming and `MdsFormat` read them.

Byte for byte what Streaming's own `MDSWriter` makes of the same samples and encodings: how many samples,
where each begins, the columns as JSON, then the samples. As a shard begins with what only its end tells, its
samples are in memory until then. `index_entry` is what the dataset's `index.json` says of a shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np

from sharding.write.file import NewFile
from sharding.write.values import check_keys, check_row, has_an_end, plain_value
from sharding.write.writer import NewShard

_MOST_BYTES = (1 << 32) - 1
"""Bytes of a shard, at most: its offsets are u32."""
_NUMBERS = ("int", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
_FLOATS = ("float16", "float32", "float64")
_ARRAYS = frozenset(name for name in (*_NUMBERS[1:], *_FLOATS))
"""dtypes of arrays."""
_encode_json = json.JSONEncoder(allow_nan=False).encode
_PICTURES = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"))
ENCODINGS = ("bytes", "str", "json", "jpeg", "png", "ndarray", *_NUMBERS, *_FLOATS)
"""Encodings that are written; an array's dtype may follow: "ndarray:float32"."""


def encoding_of(value: Any) -> str:
    """Return the encoding of a column whose first value this is. `ValueError` where Streaming has none."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return next((name for magic, name in _PICTURES if bytes(value[:8]).startswith(magic)), "bytes")
    if isinstance(value, str):
        return "str"
    if type(value) is int:
        return "int"
    if type(value) is float:
        return "float64"
    if isinstance(value, (dict, list)):
        return "json"
    if isinstance(value, np.generic) and value.dtype.name in _ARRAYS:
        return str(value.dtype.name)
    if isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS:
        return f"ndarray:{value.dtype.name}" if value.ndim else str(value.dtype.name)
    kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
    raise ValueError(f"MDS has no encoding for a value of type {kind}")


class NewMdsShard(NewShard):
    """An MDS shard. Where no encodings are given, its first sample decides them.

    Args:
        file: where it goes.
        columns: column -> encoding, as `MDSWriter` takes them.
        rounds: whether floats may be rounded to the encodings.
    """

    def __init__(
        self, file: NewFile, *, columns: Mapping[str, str] | None = None, rounds: bool = False
    ) -> None:
        super().__init__(file)
        self._samples, self._num_bytes, self._rounds = list[bytes](), 0, rounds
        self._columns = None if columns is None else _Columns(columns, rounds)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append a sample: a value for each column."""
        fields = sample
        if "__key__" in sample:
            fields = {name: value for name, value in sample.items() if name != "__key__"}
        self.add_many([fields], key=sample.get("__key__"))

    def add_many(self, samples: Sequence[Mapping[str, Any]], key: Any = None) -> None:
        """Append samples, all or none. One that cannot be written is called `key`, or by its number."""
        encoded: list[bytes] = []
        try:
            if self._columns is None:
                check_row(samples[0])
                encodings = {name: _named(name, value) for name, value in samples[0].items()}
                self._columns = _Columns(encodings, self._rounds)
            encoded.extend(self._columns.encoded(samples))
        except ValueError as error:
            named = str(len(self._samples) + len(encoded) if key is None else key)
            raise self.refused(str(error), named) from error
        self._num_bytes += sum(map(len, encoded))
        count = len(self._samples) + len(encoded)
        if self._num_bytes + 4 * (count + 2) + len(self._columns.config) > _MOST_BYTES:
            raise self.refused("an MDS shard has at most 4 GiB: write smaller shards")
        self._samples += encoded

    def finish(self) -> Mapping[str, bytes]:
        """Write it all."""
        if self._columns is None:
            return {}
        config, sizes = self._columns.config, list(map(len, self._samples))
        offsets = np.cumsum([0, *sizes], dtype=np.int64) + 4 * (len(sizes) + 2) + len(config)
        self._file.write(np.uint32(len(sizes)).tobytes() + offsets.astype("<u4").tobytes() + config)
        self._file.write(b"".join(self._samples))
        return {}


class _Columns:
    """The columns of a shard, and how they are encoded. `ValueError` for encodings that are not written."""

    def __init__(self, columns: Mapping[str, str], rounds: bool) -> None:
        for name, encoding in columns.items():
            if encoding.partition(":")[0] not in ENCODINGS:
                raise ValueError(f"column {name!r}: encoding must be one of {', '.join(ENCODINGS)}")
        self.encodings = {name: columns[name] for name in sorted(columns)}
        self._writers = [(name, _writer_of(encoding, rounds)) for name, encoding in self.encodings.items()]
        self._varies = [_size_of(encoding) is None for encoding in self.encodings.values()]
        self._pack = Struct(f"<{sum(self._varies)}I").pack
        self.config = json.dumps(config_of(self.encodings), sort_keys=True).encode()

    def encoded(self, samples: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yield samples: the lengths of what has no fixed size, and the values."""
        names, writers, pack, join = self.encodings.keys(), self._writers, self._pack, b"".join
        varies = [i for i, is_varying in enumerate(self._varies) if is_varying]
        for fields in samples:
            if fields.keys() != names:
                check_row(fields)
                more, less = sorted(fields.keys() - names), sorted(names - fields.keys())
                raise ValueError(
                    f"all samples of MDS have the same columns; this one lacks {less}, adds {more}"
                )
            try:
                values = [write(fields[name]) for name, write in writers]
            except (TypeError, ValueError, OverflowError) as error:
                raise self._unfit(fields) from error
            yield join([pack(*[len(values[i]) for i in varies]), *values])

    def _unfit(self, fields: Mapping[str, Any]) -> ValueError:
        """The error of the first column whose value its encoding cannot hold."""
        check_row(fields)
        for name, write in self._writers:
            try:
                write(fields[name])
            except (TypeError, ValueError, OverflowError) as error:
                kind = type(fields[name]).__name__
                if fields[name] is None:
                    return ValueError(f"column {name!r} has no value here, and MDS no missing ones")
                return ValueError(
                    f"column {name!r} has encoding {self.encodings[name]!r}, which cannot hold a value of "
                    f"type {kind} ({error})"
                )
        return ValueError("a value changed while it was written")


def config_of(encodings: Mapping[str, str]) -> dict[str, Any]:
    """Return what a shard says of its columns, by sorted name."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": None,
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [_size_of(encoding) for encoding in encodings.values()],
    }


def index_entry(
    encodings: Mapping[str, str], name: str, num_samples: int, num_bytes: int, hashes: Mapping[str, str]
) -> dict[str, Any]:
    """Return what `index.json` says of a shard."""
    raw = {"basename": name, "bytes": num_bytes, "hashes": dict(hashes)}
    config = {**config_of(encodings), "hashes": list(hashes)}
    return {**config, "samples": num_samples, "raw_data": raw, "zip_data": None}


def index_json(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the `index.json` of a dataset of these shards."""
    return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


def _named(name: str, value: Any) -> str:
    try:
        return encoding_of(value)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error


def _size_of(encoding: str) -> int | None:
    """Bytes of each value; None: its length is stored."""
    return (
        (8 if encoding == "int" else np.dtype(encoding).itemsize) if encoding in _NUMBERS + _FLOATS else None
    )


def _writer_of(encoding: str, rounds: bool) -> Callable[[Any], bytes]:
    kind, _, config = encoding.partition(":")
    if kind in ("bytes", "jpeg", "png"):
        return _bytes
    if kind == "str":
        return _text
    if kind == "json":
        return _json
    if kind == "ndarray":
        return _array(np.dtype(config or "uint8"), names_dtype=not config)
    return _number(np.dtype("int64" if kind == "int" else kind), rounds)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError("bytes are asked for")
    return bytes(value)


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError("text is asked for")
    return value.encode()


def _json(value: Any) -> bytes:
    if not isinstance(value, (dict, list, str, int, float, bool)) or not has_an_end(value):
        raise TypeError("a JSON value is asked for")
    check_keys(value)
    return _encode_json(value).encode()


def _number(dtype: np.dtype[Any], rounds: bool) -> Callable[[Any], bytes]:
    form = Struct("<" + {"l": "q", "L": "Q"}.get(dtype.char, dtype.char))
    is_float, is_exact = dtype.kind == "f", dtype.name in ("int64", "float64")
    kinds = (int, float, np.integer, np.floating) if is_float else (int, np.integer)
    usual, pack = float if is_float else int, form.pack
    is_kept = is_exact or not is_float

    def write(value: Any) -> bytes:
        if type(value) is usual and is_kept:
            return packed(value)
        if type(value) is not usual:
            value = plain_value(value)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"a number of {dtype.name} is asked for")
        data = packed(value)
        if is_float:
            copy = form.unpack(data)[0]
            if copy != value and value == value and not (rounds and isinstance(value, (float, np.floating))):
                raise ValueError(f"{value!r} would be {copy!r} in {dtype.name}")
        return data

    def packed(value: Any) -> bytes:
        try:
            return pack(value)
        except Exception as error:
            raise ValueError(f"{value} does not fit {dtype.name}") from error

    return write


def _array(dtype: np.dtype[Any], *, names_dtype: bool) -> Callable[[Any], bytes]:
    if names_dtype:
        raise ValueError('give arrays with their dtype, such as "ndarray:float32"')

    def write(value: Any) -> bytes:
        if not isinstance(value, np.ndarray) or plain_value(value).dtype != dtype:
            raise TypeError(f"an array of {dtype.name} is asked for, got {getattr(value, 'dtype', 'none')}")
        if not value.ndim or not value.size:
            raise ValueError(f"Streaming has no arrays of shape {list(value.shape)}")
        width = next(i for i in range(4) if max(value.shape) < 1 << (8 << i))
        shape = np.array(value.shape, f"<u{1 << width}").tobytes()
        return bytes([value.ndim << 2 | width]) + shape + np.ascontiguousarray(value).tobytes()

    return write
