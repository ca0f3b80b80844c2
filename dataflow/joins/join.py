"""Joining two datasets by a key: which sample of the one brings along which of the other.

Only the key columns are read, once and in parallel: the ranges of the column where a format is tabular, the
keys alone where values can be read by themselves. Everything else is known from the catalogs. What comes out
is a table of sample numbers (`matches`) and what has no match, counted and named.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataflow.joins.matches import (
    NO_MATCH,
    MatchTable,
    allowance,
    blocks_of,
    comparable,
    duplicates,
    find_matches,
)
from dataflow.joins.windows import MatchSource
from dataflow.outputs.output import Output, staged_outputs
from dataflow.sources.views import column_array
from dataflow.staging.block_source import BlockSource
from dataflow.staging.rows import read_columns
from sharding.arrow_arrays import number_array
from sharding.catalog.table import Catalog
from sharding.formats.arrow.columns import TabularFormat
from sharding.order.selection import Selection
from sharding.printable import listed

_KEY_THREADS = 16
_NAMED = 5
"""Samples that are named of those without a match."""


@dataclass(frozen=True, kw_only=True)
class JoinReport:
    """The counts of a join, and the names of samples without a match."""

    on: tuple[str, str]
    """The key column of the dataset, and of the other."""
    num_samples: int
    """Samples of the dataset that have a match: those of the joined one."""
    without_match: int
    """Samples of the dataset that have none, and are left out."""
    first_without_match: tuple[str, ...]
    """The first of them, as "key in shard"."""
    unused: int
    """Samples of the other that are nobody's match."""
    first_unused: tuple[str, ...]
    """The first unused samples of the other."""
    amplification: float
    """Bytes of the other's blocks that are read in file order, over the bytes of those that are needed. 1:
    it is ordered alike."""


class Join(Struct, frozen=True, eq=False, kw_only=True):
    """Another dataset, whose columns come beside a dataset's own."""

    other: Any
    """A `ShardedDataset`, with the columns that it brings along, as they are delivered."""
    matches: MatchTable
    amplification: float
    """Times that its blocks may be read in an epoch."""
    report: JoinReport

    @property
    def names(self) -> frozenset[str]:
        """The columns that it brings along."""
        return frozenset(output.name for output in self.other.outputs)

    def source(self, outputs: Sequence[Output], *how: Any, **options: Any) -> MatchSource:
        """Return what a loader reads its columns among `outputs` with, as `ShardedDataset.source`."""
        used = staged_outputs([output for output in outputs if output.name in self.names])
        source = replace(self.other.source(*how, **options), outputs=used)
        return MatchSource(source=source, table=self.matches)


@dataclass(frozen=True, eq=False)
class JoinSide:
    """One of the two datasets: what it is read with, its samples, its key column."""

    source: BlockSource
    selection: Selection
    on: str

    @property
    def catalog(self) -> Catalog:
        """The catalog of its shards."""
        return self.source.catalog

    def numbers(self) -> NDArray[np.int64]:
        """The number of each of its samples in its shards, int64 [n] ascending."""
        blocks, rows = self.selection.locate(np.arange(len(self.selection)))
        return self.catalog.blocks.first_sample[blocks] + rows

    def shard_of(self, number: int) -> str:
        """The shard that holds a sample."""
        block = int(blocks_of(self.catalog.blocks, np.array([number]))[0])
        return self.catalog.shard(int(self.catalog.blocks.shard[block])).url

    def keys(self) -> pa.Array:
        """The key of each of its samples. `ValueError` for a column that is none, or holds no keys."""
        self._check()
        blocks = np.flatnonzero(self.selection.num_samples).tolist()
        of_block = self._column if isinstance(self.source.format, TabularFormat) else self._values
        with ThreadPoolExecutor(_KEY_THREADS, thread_name_prefix="dataflow-join") as pool:
            parts = list(pool.map(of_block, blocks))
        if len({part.type for part in parts}) > 1:
            raise ValueError(f"the keys in {self.on!r} are integers in some shards and text in others")
        return pa.concat_arrays(parts)

    def _check(self) -> None:
        names, codec = self.catalog.schema, self.source.format
        names.check([self.on])
        spec = names.get(self.on)
        if spec is None and not (codec.has_keys and self.on == "__key__"):
            raise ValueError(
                f"no column {self.on!r} in {self.catalog.shard(0).url} and its like, which have "
                f'{listed(names)}; name the keys of both by on=("...", "...")'
            )
        if spec and not isinstance(codec, TabularFormat) and spec.kind not in ("bytes", "text"):
            raise ValueError(f"keys must be text, bytes or integers of a table; {self.on!r} is {spec.kind}")

    def _column(self, number: int) -> pa.Array:
        """The keys of a block that is a table."""
        table = self.source.read_table(self.catalog.block(number), [self.on])
        column = table.column(self.on).take(number_array(self.selection.rows(number)))
        try:
            return comparable(column)
        except ValueError as error:
            raise ValueError(f"column {self.on!r}: {error}") from None

    def _values(self, number: int) -> pa.Array:
        """The keys of a block whose values are bytes."""
        block, rows = self.catalog.block(number), self.selection.rows(number)
        return column_array(read_columns(self.source, block, [self.on], rows, gap_bytes=0)[self.on])


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyMatch:
    """The samples that two datasets have in common."""

    selection: Selection
    """The samples of the first that have a match."""
    matches: MatchTable
    report: JoinReport


def match_sides(side: JoinSide, other: JoinSide, *, amplification: float) -> KeyMatch:
    """Find the match of each sample of the first in the second. Reads both key columns; closes the readers.

    Warns of samples without a match. Raises `ValueError` for keys that repeat in the second, keys of unlike
    types, datasets that have none in common, and reads beyond `amplification`.
    """
    with closing(side.source.reader), closing(other.source.reader):
        keys, others = side.keys(), other.keys()
    own_numbers, other_numbers = side.numbers(), other.numbers()
    if keys.type != others.type:
        raise ValueError(
            f"keys of unlike types never match: {side.on!r} holds {_kind(keys)}, {other.on!r} "
            f"{_kind(others)}; write one of them as the other's type, or name other columns by on=(..., ...)"
        )
    _refuse_duplicates(other, others, other_numbers)
    index = find_matches(keys, others)
    has_match = index != NO_MATCH
    if not has_match.any():
        raise ValueError(
            f"no key in {side.on!r} is one in {other.on!r}; the first are "
            f"{_key(keys, 0)} and {_key(others, 0)}"
        )
    matches = MatchTable.between(
        own_numbers[has_match], other_numbers[index[has_match]], side.catalog.blocks, other.catalog.blocks
    )
    is_unused = np.ones(len(others), np.bool_)
    is_unused[index[has_match]] = False
    report = JoinReport(
        on=(side.on, other.on),
        num_samples=int(has_match.sum()),
        without_match=int((~has_match).sum()),
        first_without_match=_named(side, keys, own_numbers, ~has_match),
        unused=int(is_unused.sum()),
        first_unused=_named(other, others, other_numbers, is_unused),
        amplification=matches.amplification,
    )
    if matches.amplification > amplification:
        raise ValueError(_refusal(report, other, matches))
    if report.without_match:
        warnings.warn(
            f"{report.without_match:,} of {len(keys):,} samples have no match and are left out: "
            f"{listed(report.first_without_match)}{' ...' if report.without_match > _NAMED else ''}",
            stacklevel=4,
        )
    return KeyMatch(selection=side.selection.at(np.flatnonzero(has_match)), matches=matches, report=report)


def _refuse_duplicates(side: JoinSide, keys: pa.Array, numbers: NDArray[np.int64]) -> None:
    count, where = duplicates(keys)
    if count:
        shards = " and ".join(dict.fromkeys(side.shard_of(int(numbers[index])) for index in where[:2]))
        raise ValueError(
            f"{count:,} keys in {side.on!r} come more than once, so nothing says which sample is meant: "
            f"{_key(keys, int(where[0]))} comes {len(where)} times, in {shards}; make keys unique, or leave "
            "the repetitions out by subset() or filter()"
        )


def _refusal(report: JoinReport, other: JoinSide, matches: MatchTable) -> str:
    once = int(other.catalog.blocks.length[np.unique(matches.other_blocks)].sum())
    return (
        f"{other.catalog.shard(0).url} and its like are ordered unlike this dataset: beside its blocks, one "
        f"after the other, {report.amplification * once:,.0f} bytes of theirs would be read, "
        f"{report.amplification:.3g} times the {once:,} that they have; write them in the order of this "
        f"dataset, or allow the reads: "
        f"join(..., amplification={allowance(report.amplification)})"
    )


def _named(
    side: JoinSide, keys: pa.Array, numbers: NDArray[np.int64], which: NDArray[np.bool_]
) -> tuple[str, ...]:
    first: Sequence[int] = np.flatnonzero(which)[:_NAMED].tolist()
    return tuple(f"{_key(keys, index)} in {side.shard_of(int(numbers[index]))}" for index in first)


def _key(keys: pa.Array, index: int) -> str:
    value = keys[index].as_py()
    return repr(value.decode(errors="backslashreplace") if isinstance(value, bytes) else value)


def _kind(keys: pa.Array) -> str:
    return "integers" if pa.types.is_integer(keys.type) else "text"


def columns_beside(
    outputs: Sequence[Output], others: Sequence[Output], on: tuple[str, ...], suffix: str | None
) -> tuple[Output, ...]:
    """The columns that another dataset brings along, under the names that they are delivered by.

    A mask is called after its column. Raises `ValueError` for names that both deliver.
    """
    names = {output.name for output in outputs}
    if on[0] == on[1]:  # the key itself is the same value twice
        others = [o for o in others if o.name not in names or (o.name, o.sources) != (on[0], (on[0],))]
    clashing = [output.name for output in others if output.name in names]
    if clashing and suffix is None:
        raise ValueError(
            f"both datasets deliver {', '.join(map(repr, clashing))}: pass suffix=, such as "
            f"suffix='_other', or choose and rename columns by columns="
        )
    new_names = {name: f"{name}{suffix}" for name in clashing}
    for output in others:
        column = output.name.removesuffix(output.suffix)
        if output.suffix and column in clashing:
            new_names[output.name] = f"{new_names[column]}{output.suffix}"
    renamed = tuple(replace(output, name=new_names.get(output.name, output.name)) for output in others)
    every = [*names, *(output.name for output in renamed)]
    if twice := [name for name in every if every.count(name) > 1]:
        raise ValueError(f"with suffix={suffix!r}, {twice[0]!r} is delivered twice; choose another suffix")
    if not renamed:
        raise ValueError("the dataset that is joined brings no column along but the key")
    return renamed


def match_datasets(
    base: Any, other: Any, on: str | tuple[str, str], *, suffix: str | None, amplification: float
) -> tuple[tuple[Output, ...], KeyMatch]:
    """The columns that one `ShardedDataset` brings to another, and the matches; as `ShardedDataset.join`."""
    names = (on, on) if isinstance(on, str) else tuple(on)
    if len(names) != 2:
        raise ValueError(f"on must be the name of a column, or one of each dataset, got {on!r}")
    if other.transform is not None or other.batch_transform is not None:
        raise ValueError(
            "the dataset that is joined has a transform= or batch_transform=, which would not be called: "
            "give it to the one it is joined to, whose transform gets the joined sample"
        )
    if any(output.clip_bytes is not None for output in (*base.outputs, *other.outputs)):
        raise ValueError(
            "cameras of a LeRobot dataset are not joined to anything yet: leave them out by columns="
        )
    if other.balance is not None:
        raise ValueError("the dataset that is joined is balanced: call balanced() on the joined one")
    if other.joins:
        raise ValueError("the dataset that is joined is itself joined: write a.join(b).join(c)")
    outputs = columns_beside(base.outputs, other.outputs, names, suffix)
    sides = [
        JoinSide(side.source(), side.selection, name) for side, name in zip((base, other), names, strict=True)
    ]
    return outputs, match_sides(*sides, amplification=amplification)
