"""The columns of a dataset: what its shards say, merged column by column, and only for who asks.

Shards have schemas of their own. Those that name the same columns with the same types are one *group*, kept
once in the catalog; a shard's own sizes and nulls count for its group. Merging costs one comparison a group
and column. Where types go together, a column has the one that `widening` gives; where not, it has a
`Conflict`, which is raised when somebody asks for that column, and never else. A column that a group lacks is
null in its shards. Shards without samples have no say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import Struct, ValidationError, convert
from numpy.typing import NDArray

from sharding.blocks import ColumnSpec, spec_text
from sharding.catalog.widening import common_spec, is_alike
from sharding.errors import CorruptShardError

Schema = Mapping[str, ColumnSpec]
_KINDS = ("fixed", "bytes", "text", "list", "json", "bytes_list", "null", "null_list", "other", "unreadable")
_NO_TYPES = ("null", "null_list", "other", "unreadable")  # of which a dataset has other kinds, or none
_MOST_ELEMENTS = 1 << 48
"""The elements of one value, at most: more could not be stored, and sizes of batches stay below the end of an
int64."""
NO_SCHEMA = -1
"""Group of a shard without samples."""


class Conflict(Struct, frozen=True, kw_only=True):
    """Why a column cannot be delivered."""

    shard: str
    reason: str

    def error(self) -> CorruptShardError:
        """Return the error for whoever asks for the column."""
        return CorruptShardError(self.shard, self.reason)


@dataclass(frozen=True, eq=False)
class DatasetSchema(Mapping[str, ColumnSpec]):
    """Column name -> spec, true of all shards. Columns of a type that nothing delivers are left out."""

    specs: Schema
    conflicts: Mapping[str, Conflict] = field(default_factory=dict)
    """Columns whose shards contradict each other; of their spec, only that they are there counts."""
    owners: Mapping[str, Sequence[tuple[str, ColumnSpec]]] = field(default_factory=dict)
    """By column, the first shard of each group that has it, and the spec there."""

    def __getitem__(self, name: str) -> ColumnSpec:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def owner(self, name: str, other: ColumnSpec) -> str:
        """The first shard that has a column of its type here, or at least not of another one's."""
        owners = self.owners.get(name, ())
        of_type = [url for url, spec in owners if is_alike(spec, self.specs[name])]
        unlike = [url for url, spec in owners if not is_alike(spec, other)]
        return next(iter([*of_type, *unlike]), self.specs[name].note)

    def stored(self, name: str) -> ColumnSpec:
        """The spec of a column, of nulls alone not as the text or JSON that stands for them."""
        kinds = {spec.kind for _, spec in self.owners.get(name, ())}
        if kinds and kinds <= {"null", "null_list"}:
            return replace(self.specs[name], kind="null_list" if "null_list" in kinds else "null")
        return self.specs[name]

    def check(self, columns: Iterable[str]) -> None:
        """Raise `CorruptShardError` for the first of these columns that cannot be delivered."""
        for name in columns:
            if name in self.conflicts:
                raise self.conflicts[name].error()
            if name not in self.specs and (owners := self.owners.get(name)):
                url, spec = owners[0]
                what = f"column {name!r} is {spec.note}, which has no array form"
                raise Conflict(shard=url, reason=f"{what}: name the others in columns=").error()


def group_schemas(
    schemas: Iterable[Schema | None], *, together: bool
) -> tuple[list[dict[str, ColumnSpec]], NDArray[np.int32]]:
    """The distinct schemas of shards, and which is each shard's, [num_shards].

    Args:
        schemas: of each shard; None: it has no samples, and `NO_SCHEMA`.
        together: put all into one group, whose columns some shards may lack: where columns have one type by
            nature, and each shard may have other ones.
    """
    groups: list[dict[str, ColumnSpec]] = []
    known: dict[Any, int] = {}
    numbers = []
    for schema in schemas:
        if schema is None:
            numbers.append(NO_SCHEMA)
            continue
        if together:
            number = next((i for i, group in enumerate(groups) if _agree(group, schema)), len(groups))
        else:
            key = frozenset((name, _type_of(spec)) for name, spec in schema.items())
            number = known.setdefault(key, len(groups))
        if number == len(groups):
            groups.append(dict(schema))
        else:
            _add(groups[number], schema)
        numbers.append(number)
    return groups, np.array(numbers, np.int32)


def _agree(group: Schema, schema: Schema) -> bool:
    return all(name not in group or _type_of(group[name]) == _type_of(schema[name]) for name in schema)


def _type_of(spec: ColumnSpec) -> tuple[Any, ...]:
    """Return what shards of one group have in common."""
    named = (spec.feature, spec.is_part, spec.is_index, spec.note)
    return (spec.kind, spec.dtype, spec.shape, spec.unit, *named)


def _add(group: dict[str, ColumnSpec], schema: Schema) -> None:
    """Note what is known of values of one more shard, and columns that either lacks."""
    for name, spec in schema.items():
        before = group.get(name)
        if before is None:
            group[name] = replace(spec, optional=True)
        elif before != spec:
            group[name] = _with_both_facts(before, spec)
    for name in group.keys() - schema.keys():
        if not group[name].optional:
            group[name] = replace(group[name], optional=True)


def _with_both_facts(spec: ColumnSpec, other: ColumnSpec) -> ColumnSpec:
    ranges = (spec.size_range, other.size_range)
    both = None if None in ranges else (min(r[0] for r in ranges if r), max(r[1] for r in ranges if r))
    return replace(
        spec,
        size_range=both,
        optional=spec.optional or other.optional,
        items=max(spec.items, other.items),
    )


def merge_schemas(
    groups: Sequence[tuple[str, Schema]], *, widens: bool, may_lack: bool = False
) -> DatasetSchema:
    """One schema for all shards.

    Args:
        groups: the first shard of each group, and the schema of the group, in order.
        widens: whether the format brings columns to other types.
        may_lack: whether a shard may lack a column that others have, as where it widens.
    """
    specs: dict[str, ColumnSpec] = {}
    conflicts: dict[str, Conflict] = {}
    owners: dict[str, list[tuple[str, ColumnSpec]]] = {}
    for url, schema in groups:
        for name, spec in schema.items():
            owners.setdefault(name, []).append((url, spec))
    for name, holders in owners.items():
        if len(groups) == 1 and holders[0][1].kind not in _NO_TYPES:  # nothing to compare it with
            specs[name] = holders[0][1]
            continue
        conflict = _conflict(name, holders, widens)
        if conflict is None and not (widens or may_lack) and len(holders) < len(groups):
            lacks = next(url for url, schema in groups if name not in schema)
            conflict = _lacking(name, holders[0], lacks, groups)
        merged = holders[0][1] if conflict else common_spec([spec for _, spec in holders])
        assert merged is not None
        if len(holders) < len(groups) and not merged.optional:
            merged = replace(merged, optional=True)
        if conflict:
            conflicts[name] = conflict
        if conflict or merged.kind != "other":
            specs[name] = merged
    return DatasetSchema(specs, conflicts, owners)


def _lacking(
    name: str, owner: tuple[str, ColumnSpec], lacks: str, groups: Sequence[tuple[str, Schema]]
) -> Conflict:
    has, spec = owner
    order = [url for url, _ in groups]
    reason = f"column {name!r} ({spec_text(spec)}) is in {has} but not in {lacks}"
    return Conflict(
        shard=max(has, lacks, key=order.index), reason=f"{reason}; all shards must have the same columns"
    )


def _conflict(name: str, owners: Sequence[tuple[str, ColumnSpec]], widens: bool) -> Conflict | None:
    """Return how the types of a column contradict each other, by the first two shards that do."""
    unlike: dict[Any, tuple[str, ColumnSpec]] = {}
    for url, spec in owners:
        if spec.kind == "unreadable":
            return Conflict(shard=url, reason=spec.note)
        if _type_of(spec) in unlike:
            continue
        for first, before in unlike.values():
            if what := _contradiction(name, before, spec, first, widens):
                return Conflict(shard=url, reason=what)
        unlike[_type_of(spec)] = url, spec
    return None


def _contradiction(name: str, earlier: ColumnSpec, other: ColumnSpec, first: str, widens: bool) -> str | None:
    if not is_alike(earlier, other) and (not widens or common_spec([earlier, other]) is None):
        text = f"column {name!r} is {spec_text(other)} here but {spec_text(earlier)} in {first}"
        zoned = {"tz=" in spec.unit for spec in (earlier, other) if spec.unit.startswith("timestamp")}
        if len(zoned) == 2:
            return f"{text}: times with a zone and times without one are never the same; {_TYPE_CURE}"
        return f"{text}; {_TYPE_CURE}"
    labels = [spec for spec in (earlier, other) if spec.feature_type == "ClassLabel"]
    if len(labels) == 2 and earlier.feature != other.feature:
        reason = f"the classes of column {name!r} have other names, or another order, than in {first}"
        return f"{reason}: its numbers would mean two things; {_TYPE_CURE}"
    return None


_TYPE_CURE = "leave it out by columns=, or write it as one type in all shards"


def schema_to_json(schema: Schema) -> dict[str, dict[str, Any]]:
    """A schema as JSON values, columns in order."""
    return {name: asdict(spec) for name, spec in schema.items()}


def schema_from_json(value: Mapping[str, Mapping[str, Any]]) -> dict[str, ColumnSpec]:
    """Read what `schema_to_json` wrote. `KeyError`, `TypeError` or `ValueError` for anything else."""
    return {name: _spec(name, fields) for name, fields in value.items()}


def _spec(name: str, fields: Mapping[str, Any]) -> ColumnSpec:
    try:
        spec = convert(fields, ColumnSpec)
    except ValidationError as error:
        raise ValueError(f"column {name!r}: {error}") from error
    low, high = spec.size_range or (0, 0)
    if spec.kind not in _KINDS or np.dtype(spec.dtype).hasobject or np.dtype(spec.dtype).itemsize == 0:
        raise ValueError(f"column {name!r} is of kind {spec.kind!r} with elements of {spec.dtype!r}")
    sizes = (*spec.shape, math.prod(spec.shape), low, high, spec.items)
    if not all(0 <= n < _MOST_ELEMENTS for n in sizes) or low > high:
        raise ValueError(f"column {name!r} has shape {spec.shape} and sizes {spec.size_range}")
    spec.feature_type  # noqa: B018 - raises for what is no feature
    return spec
