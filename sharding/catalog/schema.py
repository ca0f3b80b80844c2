"""The columns of a dataset: the union of what its shards say, where they agree.

Every shard must have the same columns with the same types; only formats whose samples name their own
columns (tar: a member's extension) may lack one in some shard, which makes it optional. Shards without
samples have no say. Cost: one comparison a shard and column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sharding.blocks import ColumnSpec, spec_text
from sharding.errors import CorruptShardError

Schema = Mapping[str, ColumnSpec]
_KINDS = ("fixed", "bytes", "text", "list", "json", "bytes_list")
_MOST_ELEMENTS = 1 << 48
"""Of one value: more could not be stored, and sizes of batches stay below the end of an int64."""


def merge_schemas(shards: Iterable[tuple[str, Schema]], *, may_lack: bool) -> dict[str, ColumnSpec]:
    """One schema for all shards.

    Args:
        shards: (url, schema) of each shard that has samples, in order.
        may_lack: whether a shard may lack a column that another has.

    Raises:
        CorruptShardError: two shards differ; names both, the column and both types.
    """
    merged: dict[str, ColumnSpec] = {}
    owner: dict[str, str] = {}  # column -> first shard that has it
    first = ""
    for url, schema in shards:
        if first and not may_lack:
            _refuse_missing(first, url, merged, schema)
        for name, spec in schema.items():
            before = merged.get(name)
            if before is None:
                merged[name] = replace(spec, optional=True) if first else spec
                owner[name] = url
            elif before != spec:
                merged[name] = _merge(owner[name], url, name, before, spec)
        for name in merged.keys() - schema.keys():
            if not merged[name].optional:
                merged[name] = replace(merged[name], optional=True)
        first = first or url
    return merged


def _refuse_missing(first: str, url: str, first_schema: Schema, schema: Schema) -> None:
    one_sided = first_schema.keys() ^ schema.keys()
    if not one_sided:
        return
    name = min(one_sided)
    has, lacks = (url, first) if name in schema else (first, url)
    text = spec_text(schema[name] if name in schema else first_schema[name])
    reason = f"column {name!r} ({text}) is in {has} but not in {lacks}; all shards must have the same columns"
    raise CorruptShardError(url, reason)


def _merge(first: str, url: str, name: str, one: ColumnSpec, other: ColumnSpec) -> ColumnSpec:
    if (one.kind, one.dtype, one.shape, one.unit) != (other.kind, other.dtype, other.shape, other.unit):
        raise CorruptShardError(
            url, f"column {name!r} is {spec_text(other)} here but {spec_text(one)} in {first}"
        )
    labels = [spec for spec in (one, other) if spec.feature_type == "ClassLabel"]
    if len(labels) == 2 and one.feature != other.feature:
        reason = f"the classes of column {name!r} have other names, or another order, than in {first}"
        raise CorruptShardError(url, f"{reason}: its numbers would mean two things")
    ranges = (one.size_range, other.size_range)
    both = None if None in ranges else (min(r[0] for r in ranges if r), max(r[1] for r in ranges if r))
    return replace(
        one,
        size_range=both,
        optional=one.optional or other.optional,
        items=max(one.items, other.items),
        feature=one.feature or other.feature,
    )


def schema_to_json(schema: Schema) -> dict[str, dict[str, Any]]:
    """A schema as JSON values, columns in order."""
    return {name: asdict(spec) for name, spec in schema.items()}


def schema_from_json(value: Mapping[str, Mapping[str, Any]]) -> dict[str, ColumnSpec]:
    """What `schema_to_json` wrote. `KeyError`, `TypeError` or `ValueError` where it is something else."""
    return {name: _spec(name, fields) for name, fields in value.items()}


def _spec(name: str, fields: Mapping[str, Any]) -> ColumnSpec:
    size_range = fields["size_range"]
    spec = ColumnSpec(
        kind=fields["kind"],
        dtype=fields["dtype"],
        shape=tuple(fields["shape"]),
        size_range=None if size_range is None else tuple(size_range),
        optional=fields["optional"],
        unit=fields.get("unit", ""),
        items=fields.get("items", 0),
        feature=fields.get("feature", ""),
        is_part=fields.get("is_part", False),
    )
    if (
        type(spec.feature) is not str
        or type(spec.is_part) is not bool
        or not isinstance(spec.feature_type, str)
    ):
        raise ValueError(f"column {name!r} has feature {spec.feature!r}, is_part {spec.is_part!r}")
    low, high = spec.size_range or (0, 0)
    sizes = (*spec.shape, low, high, spec.items)
    if spec.kind not in _KINDS or type(spec.optional) is not bool or type(spec.unit) is not str:
        raise ValueError(f"column {name!r} is of kind {spec.kind!r}, optional {spec.optional!r}")
    if type(spec.dtype) is not str or np.dtype(spec.dtype).hasobject or np.dtype(spec.dtype).itemsize == 0:
        raise ValueError(f"column {name!r} has elements of {spec.dtype!r}")
    if any(type(n) is not int or not 0 <= n < _MOST_ELEMENTS for n in sizes) or low > high:
        raise ValueError(f"column {name!r} has shape {spec.shape} and sizes {spec.size_range}")
    if math.prod(spec.shape) >= _MOST_ELEMENTS:
        raise ValueError(f"column {name!r} has shape {spec.shape}")
    return spec
