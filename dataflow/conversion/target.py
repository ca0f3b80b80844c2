"""Samples as the shards of a target have them: names, types, and what a target cannot hold.

The first samples decide the types of all; a later value of another type is an error that names its column. So
shards agree with each other, whoever writes them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, starmap
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.conversion.rows import KEY, Sample
from dataflow.conversion.values import npy_bytes
from sharding.formats.extensions import rule_of_extension
from sharding.printable import listed
from sharding.write.arrays import array_of
from sharding.write.mds import encoding_of
from sharding.write.values import check_keys, check_row, json_value, plain_value
from sharding.write.writer import ShardWriter

SUFFIXES = {"tar": ".tar", "parquet": ".parquet", "mds": ".mds", "tokens": ".bin", "megatron": ".bin"}
"""Endings of shards, by target."""
TOKENS = ("tokens", "megatron")
_ADDED = {"int": "cls", "text": "txt", "json": "json", "npy": "npy"}
"""The ending that a name gets as its extension in a tar where it does not end so."""
_PICTURES = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"RIFF", "webp"))
_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})
"""Types of values that are as they should be."""
_TOKEN_COLUMNS = ("tokens", "input_ids")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The shards that samples are written to. Picklable, and JSON but for the schema."""

    to: str
    columns: Mapping[str, str]
    """Column -> how it is stored: extension of tar, encoding of MDS, type of Arrow, dtype of tokens."""
    is_strict: bool = True
    """True if all samples must have the columns of the first; else some may lack some."""
    are_members: bool = False
    """True if values are the bytes of a tar's members, whose extensions are the columns' names."""
    schema: bytes = b""
    """Arrow's schema of Parquet shards, serialized."""
    rounds: bool = False
    """True if the user named the schema, to whose types floats may be rounded."""
    row_group_size: int = 1024
    dtype: str | None = None
    length: int | None = None
    end_token: int | None = None
    tokenizer: str | None = None

    def writer(self, url: str, storage_options: Mapping[str, Any]) -> ShardWriter:
        """Return the writer of one shard, which replaces what is there."""
        more: dict[str, Any] = {}
        if self.to == "parquet":
            more = {"schema": self.arrow_schema, "row_group_size": self.row_group_size, "rounds": self.rounds}
        elif self.to == "mds":
            more = {"columns": dict(self.columns), "rounds": False}
        elif self.to in TOKENS:
            more = {"dtype": self.dtype, "length": self.length, "end_token": self.end_token}
            more["tokenizer"] = self.tokenizer
        return ShardWriter(
            url, format=self.to, storage_options=storage_options, overwrite=True, max_count=None, **more
        )

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of Parquet shards."""
        return pa.ipc.read_schema(pa.BufferReader(self.schema))

    def fitted(self, sample: Any, key: Any) -> Sample:
        """Return a sample as the writer takes it. `ValueError` names what does not fit, and a cure."""
        if not isinstance(sample, (dict, Mapping)):  # in this order: the latter takes long
            raise ValueError(
                f"a sample is a dict of column to value, got {type(sample).__name__}: map= may return one"
            )
        row: Sample = sample if isinstance(sample, dict) else dict(sample)
        is_plain = self.to in ("mds", "parquet") and _PLAIN.issuperset(map(type, row.values()))
        if is_plain and row.keys() == self.columns.keys():
            return row
        check_row(row)
        fields = {
            name: value if type(value) in _PLAIN else plain_value(value)
            for name, value in row.items()
            if name != KEY
        }
        if self.is_strict and fields.keys() != self.columns.keys():
            raise ValueError(
                f"the first sample has the columns {listed(self.columns)}, this one {listed(fields)}: return "
                "the same columns each time, with None where a sample has no value"
            )
        if self.to == "mds":
            return fields
        key = str(row.get(KEY, key))
        if self.to == "tar":
            if "." in key.rpartition("/")[2]:
                raise ValueError(
                    f"the key {key!r} has a dot in its last part, where tars end it: map=lambda sample: "
                    "{**sample, '__key__': sample['__key__'].replace('.', '_')} gives another"
                )
            here = {name: value for name, value in fields.items() if value is not None}
            return {KEY: key, **(here if self.are_members else dict(starmap(self._member, here.items())))}
        if self.to == "parquet":
            more = fields.keys() - self.columns.keys()
            if more:
                raise ValueError(f"the first samples have no column {listed(sorted(more))}: give schema=")
            return {
                name: value if value is None or kind != "json" else _json_text(name, value)
                for name, kind in self.columns.items()
                for value in [fields.get(name)]
            }
        return {KEY: key, "tokens": fields[next(iter(self.columns))]}

    def _member(self, name: str, value: Any) -> tuple[str, bytes]:
        """The member of a tar that holds a value: extension and bytes."""
        if name != name.lower() or "/" in name or name.startswith("_"):
            raise ValueError(
                f"column {name!r} is no ending of a tar's member, which has no '/', no capitals and no '_' "
                "first: map= or columns={new: old} renames it"
            )
        kind, data = _stored(name, value)
        extension = self.columns.get(name) or _extension(name, kind, value)
        rule = rule_of_extension(extension)
        was = rule if rule in _ADDED else "bytes"
        if kind != was and self.columns.get(name):
            raise ValueError(
                f"column {name!r} is {kind} here, and {was} in the first samples (member .{extension}): "
                "map= may give it one type"
            )
        return extension, data


def targets_of(
    to: str, samples: list[Sample], *, is_strict: bool, schema: pa.Schema | None = None, **options: Any
) -> Target:
    """The target whose types the first samples decide. `ValueError` for what it cannot hold."""
    shown = samples[:1] if is_strict or to == "mds" else samples
    names = list(dict.fromkeys(name for sample in shown for name in sample if name != KEY))
    firsts: dict[str, list[Any]] = {
        name: [value for sample in samples if (value := sample.get(name)) is not None] for name in names
    }
    if not names and to != "tar":
        raise ValueError("the first samples have no columns: map= returns a dict of column to value")
    target = Target(to=to, columns={}, is_strict=is_strict, **options)
    if to == "tar":
        extensions = {
            name: _extension(name, _stored(name, values[0])[0], values[0]) if values else ""
            for name, values in firsts.items()
        }
        return replace(target, columns=extensions)
    if to == "mds":
        # Streaming has no missing values, so all samples have the same columns.
        encodings = {name: _encoding(name, values) for name, values in sorted(firsts.items())}
        return replace(target, columns=encodings, is_strict=True)
    if to == "parquet":
        types = schema or with_pictures(_schema(firsts), firsts)
        target = with_schema(replace(target, rounds=schema is not None), types)
        texts = [name for name, kind in target.columns.items() if kind in ("string", "large_string")]
        of_json = {name: "json" for name in texts if any(map(_is_json, firsts.get(name, ())))}
        if of_json and schema is None:
            what = f"dicts in {listed(map(repr, of_json))} become JSON text in Parquet"
            warnings.warn(f"{what}: schema= gives such columns a type of their own", stacklevel=2)
        return replace(target, columns={**target.columns, **of_json})
    return replace(target, columns={_token_column(firsts): "tokens"}, is_strict=False)


def with_schema(target: Target, schema: pa.Schema) -> Target:
    """A Parquet target of a known schema."""
    columns = {field.name: str(field.type) for field in schema}
    return replace(target, columns=columns, schema=schema.serialize().to_pybytes())


# ---- tar ------------------------------------------------------------------------------------------------


def _stored(name: str, value: Any) -> tuple[str, bytes]:
    """The kind of a value in a tar, and its bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", bytes(value)
    if isinstance(value, str):
        return "text", value.encode()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(
                f"column {name!r} is {value}, and tars hold integers of int64: map= may give text"
            )
        return "int", str(int(value)).encode()
    if isinstance(value, (bool, float, np.floating, np.bool_, np.ndarray)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise ValueError(
                f"column {name!r} is an array of objects, which no tar holds: map= may give text"
            )
        return "npy", npy_bytes(array)
    if isinstance(value, (dict, list, tuple)):
        return "json", _json_text(name, value).encode()
    raise ValueError(
        f"column {name!r} is of type {type(value).__name__}, which no tar holds: map= may give bytes, text, "
        "numbers, arrays, or lists and dicts of those"
    )


def _extension(name: str, kind: str, value: Any) -> str:
    if kind == "bytes":
        picture = _picture(bytes(value[:12]))
        return name if not picture or rule_of_extension(name) == "image" else f"{name}.{picture}"
    return name if rule_of_extension(name) == kind else f"{name}.{_ADDED[kind]}"


# ---- MDS ------------------------------------------------------------------------------------------------


def _encoding(name: str, values: list[Any]) -> str:
    if not values:
        cure = "map= may fill it in, or columns= leave it out"
        raise ValueError(
            f"column {name!r} has no value in the first samples, and MDS no missing ones: {cure}"
        )
    try:
        return encoding_of(values[0])
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}; map= may give bytes, text or a number") from error


# ---- Parquet --------------------------------------------------------------------------------------------


def _schema(firsts: Mapping[str, list[Any]]) -> pa.Schema:
    fields = []
    for name, values in firsts.items():
        try:
            kind = pa.string() if any(map(_is_json, values)) else array_of(values).type
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(
                f"column {name!r}: {error}: map= may give one type, of bytes, text, numbers, arrays or lists"
            ) from error
        if not values or _is_null(kind):
            raise ValueError(f"column {name!r} has no value in the first samples: give schema=")
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def with_pictures(schema: pa.Schema, firsts: Mapping[str, list[Any]]) -> pa.Schema:
    """The schema that says of columns whose first values are pictures that they are, as `datasets` does."""
    features: dict[str, Any] = {}
    for name, values in firsts.items():
        depth = isinstance(values[0], list)
        items = list(chain.from_iterable(values)) if depth else values
        if items and isinstance(items[0], bytes) and _picture(items[0]):
            image = {"_type": "Image"}
            features[name] = {"feature": image, "_type": "List"} if depth else image
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return schema.with_metadata(metadata) if features else schema


def _picture(value: bytes) -> str:
    """The ending of a picture that bytes are; "": they are none that is known."""
    return next((ending for magic, ending in _PICTURES if value.startswith(magic)), "")


def _is_json(value: Any) -> bool:
    """True if a value is stored as JSON: a dict, or a list with one inside."""
    return isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(map(_is_json, value)))


def _is_null(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (pa.types.is_list(kind) and _is_null(kind.value_type))


def _json_text(name: str, value: Any) -> str:
    if not isinstance(value, (dict, list, tuple)):
        raise ValueError(
            f"column {name!r} is {type(value).__name__} here, and JSON in the first samples: map= may give "
            "it one type"
        )
    try:
        check_keys(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=json_value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"column {name!r}: a {type(value).__name__} is stored as JSON, and {error}; map= may give each "
            "item a column"
        ) from error


# ---- tokens ---------------------------------------------------------------------------------------------


def _token_column(firsts: Mapping[str, list[Any]]) -> str:
    named = [name for name in _TOKEN_COLUMNS if name in firsts]
    if named:
        return named[0]
    lists = [
        name
        for name, values in firsts.items()
        if values and isinstance(values[0], (list, np.ndarray)) and np.asarray(values[0]).dtype.kind in "iu"
    ]
    if len(lists) == 1:
        return lists[0]
    raise ValueError(
        f"token shards need one column of integers, such as 'tokens', and there are {listed(firsts)}: give "
        "tokenizer=, or columns=[...], or a map= that returns {'tokens': ids}"
    )
