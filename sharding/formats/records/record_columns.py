"""The common part of formats of records: those that are Examples become columns, others one of bytes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, Spans
from sharding.errors import CorruptShardError
from sharding.formats.records.examples import BYTES, FeatureFacts, TooManyNamesError, column, parse
from sharding.formats.records.wire import WireError
from sharding.spans import Bytes, Ints

RECORD_COLUMN = "record"


class Records(Struct, frozen=True):
    """Records in memory."""

    data: Bytes
    """uint8, what holds them."""
    starts: Ints
    """[n] where each begins."""
    sizes: Ints
    """[n] bytes of each."""


class RecordLearner:
    """Learns the columns of a shard from its records, run by run."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._features: dict[str, FeatureFacts] = {}
        self._copied: list[dict[str, int]] = []
        """By run and feature, bytes of numbers, and of byte strings if these are delivered as lists."""
        self._num_records, self._sizes, self._num_bytes = 0, list[int](), list[int]()
        self._is_raw = False

    def add(self, records: Records) -> None:
        """Learn from a run of records."""
        if len(records.sizes):
            self._sizes += [int(records.sizes.min()), int(records.sizes.max())]
            self._sizes = [min(self._sizes), max(self._sizes)]
        self._num_bytes.append(len(records.data))
        if self._is_raw:
            return
        try:
            ends = records.starts + records.sizes
            entries = parse(records.data, records.starts, ends, self._features)
            self._num_records += len(ends)
            facts = {name: self._features.setdefault(name, FeatureFacts()) for name in entries.names}
            self._copied.append({name: fact.add(records.data, entries, name) for name, fact in facts.items()})
        except WireError:
            self._is_raw = True  # one that is no Example: then none is taken for one
        except TooManyNamesError as error:
            cure = "write names that are data, such as ids, as values"
            raise CorruptShardError(self._shard.url, f"{error}; {cure}") from error

    def decoded_bytes(self) -> list[int]:
        """Return the bytes that each run takes with its columns."""
        if self.is_raw:
            return self._num_bytes
        views = {name for name, fact in self._features.items() if fact.kinds == {BYTES} and not fact.is_list}
        return [
            num_bytes + sum(size for name, size in copied.items() if name not in views)
            for num_bytes, copied in zip(self._num_bytes, self._copied, strict=True)
        ]

    @property
    def looks_into_records(self) -> bool:
        """Return whether it still takes records for Examples, and needs what says what they hold."""
        return not self._is_raw

    @property
    def is_raw(self) -> bool:
        """Return whether the records are no Examples."""
        return self._is_raw or not self._features

    def schema(self) -> dict[str, ColumnSpec]:
        """Return the columns: those of the features, or one of bytes."""
        if not self.is_raw:
            return {name: self._features[name].spec(self._num_records) for name in sorted(self._features)}
        if not self._sizes:
            return {}
        return {RECORD_COLUMN: ColumnSpec("bytes", size_range=(self._sizes[0], self._sizes[-1]))}

    def missing(self) -> dict[str, str]:
        """See `ShardScan.missing`: how many records lack each feature that some lack, in words."""
        features = {} if self.is_raw else self._features
        lacks = {name: self._num_records - fact.num_records for name, fact in sorted(features.items())}
        return {name: f"{n} of {self._num_records} records" for name, n in lacks.items() if n}


def footer_of(learner: RecordLearner, **more: Any) -> bytes:
    """Columns of a shard, and what else its format keeps, as JSON."""
    schema = learner.schema()
    columns = {name: [spec.kind, spec.dtype, spec.shape, spec.note] for name, spec in schema.items()}
    return json.dumps({"columns": columns, "is_raw": learner.is_raw, **more}).encode()


@lru_cache(maxsize=256)
def _specs_in(footer: bytes) -> dict[str, ColumnSpec]:
    columns = json.loads(footer)["columns"]
    return {
        name: ColumnSpec(kind, dtype, tuple(shape), note=note)
        for name, (kind, dtype, shape, note) in columns.items()
    }


@lru_cache(maxsize=256)
def footer_value(footer: bytes, key: str) -> Any:
    """Return what else the format keeps in a footer."""
    return json.loads(footer).get(key)


class RecordFormat(Format):
    """A format whose blocks hold whole records. Thread-safe, stateless."""

    widens = True

    @abstractmethod
    def records(self, block: Block, data: memoryview) -> Records:
        """Find the records of a block in its stored bytes. Raises `CorruptShardError`."""

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the footer holds no columns."""
        _specs_in(bytes(block.footer))

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """The features as columns; see `Format.decode`. Byte strings are views of `data`.

        Raises:
            CorruptShardError: a column is not there, a checksum is wrong, or the records are not those that
                were indexed.
        """
        return self.decode_as(
            block, data, dict.fromkeys(_specs_in(bytes(block.footer)) if columns is None else columns)
        )

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`; raises as `decode` does."""
        known = _specs_in(bytes(block.footer))
        for name in specs:
            if name not in known:
                raise block.corrupt(f"no column {name!r}; the shard has {', '.join(known) or 'no columns'}")
            if known[name].kind in ("other", "unreadable"):
                raise block.corrupt(f"column {name!r} cannot be delivered: {known[name].note}")
        if not specs:
            return {}
        records = self.records(block, data)
        if footer_value(bytes(block.footer), "is_raw"):
            return {RECORD_COLUMN: Spans(records.data, records.starts, records.sizes)}
        ends = records.starts + records.sizes
        try:
            entries = parse(records.data, records.starts, ends, known, specs)
            return {
                name: column(records.data, entries, name, specs[name] or known[name], block.num_samples)
                for name in specs
            }
        except WireError as error:
            raise block.corrupt(str(error)) from error
