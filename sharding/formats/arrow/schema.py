"""Translate an Arrow schema: one `ColumnSpec` per column, structs flattened.

Fixed-width numbers, times (as integers in their unit), fixed-size lists and fixed-size binary are "fixed";
strings are "text", byte strings "bytes", lists of numbers "list". Decimals are "text", their digits, with a
feature of their own. A struct of bytes and path is "bytes", too, beside its leaves; lists of either are
"bytes_list". Other nested types are "json" if JSON can say all that is in them: text, numbers, bools and
nulls. Extension types count as what they store. Intervals and nested types of anything else (byte strings,
times, unions) cannot be delivered. Nulls, and lists of them, say nothing of their type: other shards do
(`sharding.catalog.schema`).

The features that Hugging Face `datasets` writes are JSON in the metadata of the schema: name -> description,
nested as the columns are, such as `{"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type":
"ClassLabel"}}`. They say what bytes are; types come from the Arrow schema alone, so that metadata that is
wrong can make no value another's. Without them, a struct of bytes and path is still one column, as `datasets`
stores media, and its name says what it holds (`_MEDIA_WORDS`). Values are not looked at: indexing reads no
data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sharding.blocks import DECIMAL, ColumnSpec
from sharding.formats.arrow.json_types import JSON_TEXT, UNREADABLE, problem_of

BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)
"""The errors that pyarrow raises of damage; the last where it fails to word its error, for text that is not
UTF-8."""
SPAN_BYTES = 16
"""Bytes `Spans` needs for each value besides its contents: start and length."""

NUMBER_BYTES = 25
"""The bytes of a number and a comma in JSON, at most: "-2.2250738585072014e-308,"."""

_INDEX_NAME = re.compile("__index_level_[0-9]+__")
_NEVER_DECODED = ("other", "unreadable")
_RENAME = "rename one when writing, or leave both out by columns="
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names where they are not numpy's; `to_pandas_dtype` imports pandas in older releases of pyarrow."""

_FEATURES = b"huggingface"
_DECIMAL_BYTES = 96
"""More than the digits of a decimal, of 256 bits at most."""
_MEDIA_WORDS = {
    "Image": ("image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp"),
    "Audio": ("audio", "sound", "speech", "voice", "wav", "mp3", "flac"),
    "Video": ("video", "movie", "clip", "mp4"),
}
"""The kind of a struct of bytes and path, where no features say so: the first whose word is in its name."""


@lru_cache(maxsize=64)
def schema_in(footer: bytes) -> pa.Schema:
    """The schema that a shard's footer begins with, as an Arrow message."""
    return pa.ipc.read_schema(pa.BufferReader(footer))


def specs_of(schema: pa.Schema, *, null_free: Collection[str] = ()) -> dict[str, ColumnSpec]:
    """Describe the columns that `columns_of` gives for a table of this schema; `named_columns` adds features.

    Columns of a type that cannot be delivered are "other", and those that share a name "unreadable":
    asking for them is an error. Columns named in `null_free` are known to hold no nulls.
    """
    specs: dict[str, ColumnSpec] = {}
    routes: dict[str, str] = {}
    indexes = index_columns(schema)
    for name, field, feature, is_part in named_columns(schema):
        route = _route(name, field)
        if name in routes:
            reason = f"two columns are named {name!r}: {routes[name]} and {route}; {_RENAME}"
            specs[name] = ColumnSpec("unreadable", note=reason)
            continue
        routes[name] = route
        spec = spec_of(field.type) or ColumnSpec("other", note=str(field.type))
        if field.type == UNREADABLE:
            spec = ColumnSpec("unreadable", note=problem_of(field))
        stored = f"{name}.bytes" if is_media(field.type) else name
        optional = spec.kind not in ("fixed", *_NEVER_DECODED) and field.nullable and stored not in null_free
        spec = replace(spec, feature=feature or spec.feature, is_part=is_part, is_index=name in indexes)
        specs[name] = replace(spec, optional=optional)
    return specs


def _route(name: str, field: pa.Field) -> str:
    """Say where a column lies, in words."""
    if field.name == name:
        return f"the column {name!r}"
    return f"field {field.name!r} of {name[: -len(field.name) - 1]!r}"


def index_columns(schema: pa.Schema) -> frozenset[str]:
    """The columns in which pandas keeps its index: by their name, or as its metadata lists them."""
    try:
        listed = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
    except (KeyError, TypeError, ValueError, RecursionError):
        listed = ()
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return frozenset([*names, *filter(_INDEX_NAME.fullmatch, schema.names)])


def leaves(fields: Any) -> Iterator[tuple[str, pa.Field]]:
    """Each column's name and field, structs flattened, in schema order."""
    for column in _named(fields, None, "", nullable=False, is_part=False):
        if not pa.types.is_struct(column.field.type):
            yield column.name, column.field


def decoded_bytes(specs: Mapping[str, ColumnSpec], rows: int) -> tuple[int, int]:
    """Bytes of the fixed-width columns, and bytes of the spans' starts and lengths, for so many rows."""
    fixed = [fixed_bytes(s) for s in specs.values() if s.kind == "fixed"]
    others = sum(spec.kind in _NEVER_DECODED for spec in specs.values())
    spans = SPAN_BYTES * (len(specs) - len(fixed) - others)
    decimals = sum(spec.feature == DECIMAL for spec in specs.values())
    return rows * sum(fixed), rows * (spans + _DECIMAL_BYTES * decimals)


def fixed_bytes(spec: ColumnSpec) -> int:
    """Bytes of a value of fixed size."""
    return np.dtype(spec.dtype).itemsize * math.prod(spec.shape)


def columns_of_kind(specs: Mapping[str, ColumnSpec], kind: str) -> frozenset[str]:
    """The columns whose values become JSON, as lists of nulls may, or lists of byte strings in one piece."""
    kinds = ("json", "null_list") if kind == "json" else (kind,)
    return frozenset(name for name, spec in specs.items() if spec.kind in kinds)


def with_items(specs: Mapping[str, ColumnSpec], items: Mapping[str, int]) -> dict[str, ColumnSpec]:
    """The specs, some of which know how many items their lists have."""
    return {name: replace(spec, items=items.get(name, 0)) for name, spec in specs.items()}


@lru_cache(maxsize=256)
def spec_of(kind: pa.DataType) -> ColumnSpec | None:
    """The spec of one Arrow type, or None where it cannot be delivered."""
    if kind == JSON_TEXT:
        return ColumnSpec("json")
    if kind == UNREADABLE:
        return None
    kind = stored_type(kind)
    if is_media(kind):
        return ColumnSpec("bytes")
    if pa.types.is_nested(kind):
        return _nested_spec(kind)
    if is_text(kind) or pa.types.is_null(kind):
        return ColumnSpec("text" if is_text(kind) else "null")
    if is_bytes(kind):
        return ColumnSpec("bytes")
    if pa.types.is_fixed_size_binary(kind):
        return ColumnSpec("fixed", "uint8", (kind.byte_width,))
    if pa.types.is_decimal(kind):
        return ColumnSpec("text", feature=DECIMAL)
    dtype = dtype_of(kind)
    return None if dtype is None else ColumnSpec("fixed", dtype.name, unit=_unit_of(kind))


def _nested_spec(kind: pa.DataType) -> ColumnSpec | None:
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        stored = stored_type(kind.value_type)
        if is_bytes(stored) or is_media(stored):
            return ColumnSpec("bytes_list")
    if pa.types.is_fixed_size_list(kind):
        inner = spec_of(kind.value_type)
        if inner is not None and inner.kind == "fixed":
            return replace(inner, shape=(kind.list_size, *inner.shape))
    elif is_list(kind):
        stored = stored_type(kind.value_type)
        dtype = dtype_of(stored)
        if dtype is not None:
            return ColumnSpec("list", dtype.name, unit=_unit_of(stored))
        if pa.types.is_null(stored):
            return ColumnSpec("null_list")
    return ColumnSpec("json") if unlike_json(kind) is None else None


def unlike_json(kind: pa.DataType) -> str | None:
    """Say what a type holds that JSON cannot hold, or None."""
    kind = stored_type(kind)
    if is_text(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return None
    if not pa.types.is_nested(kind) or pa.types.is_union(kind):
        return str(kind)
    children = [kind.field(i) for i in range(kind.num_fields)]
    names = [child.name for child in children]
    if pa.types.is_struct(kind) and len(set(names)) < len(names):
        return "two fields of one name"
    return next((what for child in children if (what := unlike_json(child.type))), None)


def has_one_json(kind: pa.DataType) -> bool:
    """Return whether all write the same JSON of it: no fractions are in it, and nothing of extensions."""
    is_encoded = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)
    parts = [kind.value_type] if is_encoded else [kind.field(i).type for i in range(kind.num_fields)]
    is_one = not pa.types.is_floating(kind) and not isinstance(kind, pa.BaseExtensionType)
    return is_one and all(map(has_one_json, parts))


def _unit_of(kind: pa.DataType) -> str:
    """Return what a time counts: the same in all time zones, as the integers count from 1970 in UTC."""
    if not pa.types.is_temporal(kind):
        return ""
    return str(pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind)


_TIMES = {
    str(kind): kind
    for kind in (
        *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.date32(), pa.date64()),
    )
}


def element_type(spec: ColumnSpec) -> pa.DataType:
    """The Arrow type of one number or time of a column of fixed size, or of lists."""
    return _TIMES[spec.unit] if spec.unit else pa.from_numpy_dtype(np.dtype(spec.dtype))


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that values are made of, beneath extensions, dictionaries and run-length encoding."""
    while True:
        is_tensor = isinstance(kind, pa.FixedShapeTensorType)
        if is_tensor and kind.permutation in (None, list(range(len(kind.shape)))):  # of row-major values
            inner = kind.value_type
            for size in reversed(kind.shape):
                inner = pa.list_(inner, size)
            return inner
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def dtype_of(kind: pa.DataType) -> np.dtype[Any] | None:
    """The numpy dtype of an Arrow type of one number per value, or None. Times count in their unit."""
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(_FLOATS.get(str(kind), str(kind)))
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return np.dtype(f"int{kind.bit_width}")
    return None


def arrow_type(spec: ColumnSpec) -> pa.DataType:
    """An Arrow type of the columns that a spec describes."""
    if spec.kind in ("fixed", "list"):
        kind = element_type(spec)
        for size in reversed(spec.shape):
            kind = pa.list_(kind, size)
        return kind if spec.kind == "fixed" else pa.large_list(kind)
    if spec.kind == "bytes_list":
        return pa.large_list(pa.large_binary())
    return pa.large_binary() if spec.kind == "bytes" else pa.large_string()


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is of strings, whatever their offsets."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Byte strings of any length, whatever their offsets."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is of lists of any length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or is_list_view(kind))


def is_list_view(kind: pa.DataType) -> bool:
    """Lists that have a start and a size each."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


class NamedColumn(NamedTuple):
    """A column that a sample may have."""

    name: str
    """The name; that of a column in a struct is "outer.inner"."""
    field: pa.Field
    """Nullable if it or a struct around it is."""
    feature: str
    """The feature, as in `ColumnSpec`."""
    is_part: bool
    """True if it lies in a struct of bytes and path, which is a column, too."""


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """The features of a schema, as JSON values; empty where it has none that can be read."""
    try:
        features = json.loads((schema.metadata or {})[_FEATURES])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def named_columns(schema: pa.Schema) -> Iterator[NamedColumn]:
    """The columns of a schema, structs flattened, in schema order; see `is_media`."""
    return _named(schema, features_of(schema), "", nullable=False, is_part=False)


def _named(
    fields: Any, features: Any, prefix: str, *, nullable: bool, is_part: bool
) -> Iterator[NamedColumn]:
    for field in fields:
        field = field.with_nullable(field.nullable or nullable)
        name, feature = prefix + field.name, _member_feature(features, field.name)
        if not pa.types.is_struct(field.type):
            yield NamedColumn(name, field, _feature_text(feature, field), is_part)
            continue
        media = is_media(field.type)
        if media:
            yield NamedColumn(name, field, _feature_text(feature, field), is_part)
        inner, below = list(field.type), None if media else feature
        yield from _named(inner, below, f"{name}.", nullable=field.nullable, is_part=is_part or media)


def is_media(kind: pa.DataType) -> bool:
    """Return whether a type is a struct of bytes and path, as `datasets` stores images, sound and video."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {"bytes", "path"}:
        return False
    stored = kind.field("bytes").type
    if pa.types.is_dictionary(stored):
        stored = stored.value_type
    return bool(
        kind.num_fields == 2
        and (pa.types.is_binary(stored) or pa.types.is_large_binary(stored))
        and not pa.types.is_nested(kind.field("path").type)
    )


def media_in(kind: pa.DataType) -> pa.DataType:
    """Return what a list holds, at any depth; the type itself where it is no list."""
    while pa.types.is_nested(kind) and not pa.types.is_struct(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def _member_feature(feature: Any, name: str) -> Any:
    """The feature of one field of a struct; None where nothing is known of it."""
    if isinstance(feature, dict) and isinstance(feature.get("_type"), str):
        feature = feature.get("feature")  # a list of structs, stored as a struct of lists
    return feature.get(name) if isinstance(feature, dict) else None


def _feature_text(feature: Any, field: pa.Field) -> str:
    """The feature of a column, of lists what they hold, as JSON; "" for plain values."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature["feature"] if isinstance(feature, dict) else feature[0] if feature else None
    known = isinstance(feature, dict) and isinstance(feature.get("_type"), str)
    if not known and is_media(media_in(field.type)):
        name = field.name.lower()
        guess = (kind for kind, words in _MEDIA_WORDS.items() if any(word in name for word in words))
        feature = {"_type": next(guess, "")}
    elif not known or feature["_type"] == "Value":
        return ""
    said = {key: value for key, value in feature.items() if key != "id" and value is not None}
    return json.dumps(said, sort_keys=True) if said["_type"] else ""
