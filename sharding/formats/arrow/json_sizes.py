"""How many bytes the JSON text of nested columns takes, estimated from above without writing it.

A `Tally` counts what is there, by the place in the type: tables are counted as they are parsed (JSON
Lines), record batches by the lengths in their headers (Arrow IPC), leaves by what Parquet's footer says of
their column chunks. Text counts twice: once for itself, once for what is escaped in it and for the Arrow
form that it is made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from sharding.blocks import ColumnSpec
from sharding.formats.arrow.schema import is_bytes, is_text, stored_type

Path = tuple[str, ...]
"""A place in a type: the column (structs flattened), then a level each: a field's name, "" in lists."""

NUMBER_BYTES = 25
"""Of a number and a comma, at most: "-2.2250738585072014e-308,"."""
_TIME_BYTES = 32
_VALUE_BYTES = 6  # of a bool, null, brackets or quotes, and a comma


@dataclass
class Tally:
    """What nested columns hold: how many values, and how many bytes of text, at each place."""

    values: Counter[Path] = field(default_factory=Counter)
    text: Counter[Path] = field(default_factory=Counter)

    def add_array(self, path: Path, array: pa.Array) -> None:
        """Count an array as pyarrow parses it from JSON: structs, lists, text, times and numbers."""
        self.values[path] += len(array)
        kind = array.type
        if pa.types.is_list(kind):
            self.add_array((*path, ""), array.flatten())
        elif pa.types.is_struct(kind):
            for i, child in enumerate(kind):
                self.add_array((*path, child.name), array.field(i))
        elif is_text(kind):
            self.text[path] += pc.sum(pc.binary_length(array)).as_py() or 0
        elif pa.types.is_timestamp(kind):  # text that looks like times, and will be delivered as text
            self.text[path] += _TIME_BYTES * len(array)

    def json_bytes(self, kind: pa.DataType, path: Path) -> int:
        """Bytes of the JSON text of all values at a place, which have this type; absent fields are null."""
        kind, count = stored_type(kind), self.values[path]
        each = NUMBER_BYTES if pa.types.is_integer(kind) or pa.types.is_floating(kind) else _VALUE_BYTES
        total = each * count + 2 * self.text[path]
        if pa.types.is_struct(kind):
            for child in kind:
                below = (*path, child.name)
                total += (len(child.name.encode()) + 4) * count
                total += self.json_bytes(child.type, below) if below in self.values else _VALUE_BYTES * count
        elif pa.types.is_nested(kind):
            total += self.json_bytes(kind.field(0).type, (*path, ""))
        return total


def tally_of_batch(
    schema: pa.Schema,
    lengths: Iterable[int],
    buffers: Iterable[int],
    views: Iterable[int],
    entry_bytes: float,
) -> Tally:
    """Count a record batch by its header.

    Args:
        schema: of the batch.
        lengths: of its arrays, parents before children.
        buffers: bytes of its buffers, in their order.
        views: how many buffers each array of string views has for its text.
        entry_bytes: mean size of an entry of the dictionaries, which lie elsewhere.
    """
    tally = Tally()
    walk = _Walk(tally, iter(lengths), iter(buffers), iter(views), entry_bytes)
    for column in schema:
        walk.visit(column.type, (column.name,))
    return tally


@dataclass
class _Walk:
    """Goes through a type with the header's vectors; one that is too short (damage) counts as zeros."""

    tally: Tally
    lengths: Iterator[int]
    buffers: Iterator[int]
    views: Iterator[int]
    entry_bytes: float

    def visit(self, kind: pa.DataType, path: Path) -> None:
        is_flattened = len(path) == 1 and pa.types.is_struct(kind)
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        count = next(self.lengths, 0)
        self.tally.values[path] += count
        if pa.types.is_dictionary(kind):
            self._skip(2)
            self.tally.text[path] += int(count * self.entry_bytes)
        elif pa.types.is_run_end_encoded(kind):
            self._runs(kind, path, count)
        elif is_text(kind) or is_bytes(kind):
            self.tally.text[path] += self._text_bytes(kind)
        elif pa.types.is_nested(kind):
            self._skip(kind.num_buffers - pa.types.is_union(kind))  # pyarrow counts a bitmap unions lack
            for i in range(kind.num_fields):
                child = kind.field(i)
                if is_flattened:
                    self.visit(child.type, (f"{path[0]}.{child.name}",))
                else:
                    self.visit(child.type, (*path, child.name if pa.types.is_struct(kind) else ""))
        elif not pa.types.is_null(kind):
            self._skip(2)

    def _skip(self, buffers: int) -> None:
        for _ in range(buffers):
            next(self.buffers, 0)

    def _text_bytes(self, kind: pa.DataType) -> int:
        if not (pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)):
            self._skip(2)
            return next(self.buffers, 0)
        self._skip(1)
        return sum(next(self.buffers, 0) for _ in range(1 + next(self.views, 0)))  # short text lies in views

    def _runs(self, kind: pa.DataType, path: Path, count: int) -> None:
        """Each run stands for as many values as runs have on average."""
        self.visit(kind.run_end_type, (*path, "run ends"))
        self.visit(kind.value_type, (*path, "values"))
        runs = self.tally.values[(*path, "values")]
        self.tally.text[path] += self.tally.text[(*path, "values")] * count // max(1, runs)


def json_columns(specs: Mapping[str, ColumnSpec]) -> frozenset[str]:
    """The columns whose values become JSON."""
    return frozenset(name for name, spec in specs.items() if spec.kind == "json")


__all__ = ["NUMBER_BYTES", "Path", "Tally", "json_columns", "tally_of_batch"]
