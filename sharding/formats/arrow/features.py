"""Read the features that Hugging Face `datasets` writes about columns of its Arrow and Parquet files.

They are JSON in the metadata of the schema: name -> description, nested as the columns are, such as
`{"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}`. They say what
bytes are; types come from the Arrow schema alone, so that metadata that is wrong can make no value another's.

Without them, a struct of bytes and path is still one column, as `datasets` stores media, and its name says
what it holds (`_WORDS`). Values are not looked at: indexing reads no data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

_METADATA = b"huggingface"
_WORDS = {
    "Image": ("image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp"),
    "Audio": ("audio", "sound", "speech", "voice", "wav", "mp3", "flac"),
    "Video": ("video", "movie", "clip", "mp4"),
}
"""The kind of a struct of bytes and path, where no features say so: the first whose word is in its name."""


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
        features = json.loads((schema.metadata or {})[_METADATA])["info"]["features"]
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
        name, feature = prefix + field.name, _member(features, field.name)
        if not pa.types.is_struct(field.type):
            yield NamedColumn(name, field, _text(feature, field), is_part)
            continue
        media = is_media(field.type)
        if media:
            yield NamedColumn(name, field, _text(feature, field), is_part)
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


def _member(feature: Any, name: str) -> Any:
    """The feature of one field of a struct; None where nothing is known of it."""
    if isinstance(feature, dict) and isinstance(feature.get("_type"), str):
        feature = feature.get("feature")  # a list of structs, stored as a struct of lists
    return feature.get(name) if isinstance(feature, dict) else None


def _text(feature: Any, field: pa.Field) -> str:
    """The feature of a column, of lists what they hold, as JSON; "" for plain values."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature["feature"] if isinstance(feature, dict) else feature[0] if feature else None
    known = isinstance(feature, dict) and isinstance(feature.get("_type"), str)
    if not known and is_media(media_in(field.type)):
        name = field.name.lower()
        guess = (kind for kind, words in _WORDS.items() if any(word in name for word in words))
        feature = {"_type": next(guess, "")}
    elif not known or feature["_type"] == "Value":
        return ""
    said = {key: value for key, value in feature.items() if key != "id" and value is not None}
    return json.dumps(said, sort_keys=True) if said["_type"] else ""
