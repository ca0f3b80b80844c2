"""Compare shards with their source: samples of the result with what is made of the source anew, by value."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.conversion.folder import CATALOG_NAME, ConversionError
from dataflow.conversion.rows import KEY, GivenRows, StoredRows
from dataflow.conversion.source import ConvertSource
from dataflow.conversion.target import TOKENS
from dataflow.conversion.values import with_types
from dataflow.conversion.work import TaskSpec, as_schema, chosen_tables, fitted_rows
from dataflow.dataset import ShardedDataset
from dataflow.progress.bar import ProgressBar
from sharding.arrow_arrays import number_array
from sharding.errors import DataflowError
from sharding.spans import Ints
from sharding.urls import file_name
from sharding.write.arrays import array_of
from sharding.write.values import plain_value

_AT_ONCE = 64
"""Samples that are delivered at a time, by either dataset."""


@dataclass(frozen=True)
class Asked:
    """The samples that are compared, and where the samples of an iterable come from once more."""

    num_samples: int | None
    """Drawn at random; None: all."""
    again: Callable[[], Iterator[Any]] | None
    dataset: ShardedDataset | None
    """The source, where what it delivers should be what the result delivers."""

    @classmethod
    def of(cls, verify: bool | int, inputs: ConvertSource) -> Asked | None:
        """Return what `verify=` asks for; None: nothing. `ValueError` where that cannot be done."""
        if verify is False:
            return None
        if verify is not True and verify < 1:
            raise ValueError(f"verify must be True or a number of samples >= 1, got {verify}")
        again = None
        if isinstance(inputs.rows, GivenRows):
            if iter(inputs.source) is inputs.source:
                raise ValueError(
                    "verify= reads the source twice, which an iterator cannot be: give an iterable, whose "
                    "__iter__ begins anew"
                )
            again = inputs.source.__iter__
        is_same = isinstance(inputs.rows, StoredRows) and inputs.map is None and inputs.source.decoding
        return cls(None if verify is True else verify, again, inputs.source if is_same else None)


def verify_shards(
    task: TaskSpec,
    receipts: Mapping[int, Mapping[str, Any]],
    asked: Asked,
    progress: bool | None,
) -> int:
    """Compare samples of the shards with the source; how many were.

    Args:
        task: how they were made.
        receipts: of the shards.
        asked: how many.
        progress: show a bar.

    Raises `ConversionError` for the first that differs, naming shard, sample and column.
    """
    chosen = _chosen(receipts, asked.num_samples)
    folder = task.folder
    written = ShardedDataset(folder.of(CATALOG_NAME), storage_options=folder.options, progress=progress)
    result = StoredRows(written, raw=task.target.to == "tar")
    first, compared, position, items = 0, 0, 0, asked.again() if asked.again else iter(())
    with ProgressBar("comparing", total=len(receipts), unit="shard", visible=progress) as bar:
        for number in sorted(receipts):
            receipt, rows = receipts[number], chosen[number]
            if asked.again is not None:
                task = replace(task, rows=GivenRows(list(islice(items, receipt["read"])), position))
                position += receipt["read"]
            if len(rows):
                shard = _ComparedShard(task=task, number=number, receipt=receipt, rows=rows, first=first)
                shard.compare(result)
                if asked.dataset is not None and task.target.to not in TOKENS:
                    shard.compare_delivered(asked.dataset, written)
                compared += len(rows)
            first += receipt["samples"]
            bar.show(number + 1)
    return compared


def _chosen(receipts: Mapping[int, Mapping[str, Any]], count: int | None) -> dict[int, Ints]:
    """The rows of each shard that are compared."""
    sizes = {number: int(receipts[number]["samples"]) for number in sorted(receipts)}
    total = sum(sizes.values())
    if count is None or count >= total:
        return {number: np.arange(size) for number, size in sizes.items()}
    drawn = np.sort(np.array(random.sample(range(total), count), np.int64))
    firsts = np.cumsum([0, *sizes.values()])
    parts = np.split(drawn, np.searchsorted(drawn, firsts[1:-1]))
    return {number: part - first for number, part, first in zip(sizes, parts, firsts, strict=False)}


@dataclass(frozen=True, kw_only=True)
class _ComparedShard:
    """Some rows of a shard, and how they came to be."""

    task: TaskSpec
    number: int
    receipt: Mapping[str, Any]
    rows: Ints
    first: int
    """Number of its first sample in the result."""

    def compare(self, result: StoredRows) -> None:
        """Raise `ConversionError` where a row is not what the source gives."""
        to = self.task.target.to
        if to == "tokens" or (to == "megatron" and self.task.target.length):
            self._compare_tokens()
            return
        positions = self.rows + self.first
        if to == "parquet":
            expected_rows = self._tables() if self.task.way == "tables" else self._as_rows()
            written_rows = (row for table in result.tables(positions) for row in _rows_of(table))
        else:
            expected_rows = self._fitted()
            written_rows = (sample for batch in result.batches(positions) for sample in batch)
        for row, was, now in zip(self.rows.tolist(), expected_rows, written_rows, strict=True):
            self._same(row, was, now)

    def compare_delivered(self, inputs: ShardedDataset, written: ShardedDataset) -> None:
        """Raise `ConversionError` where a row is delivered otherwise than the source delivers it."""
        if self.receipt["read"] != self.receipt["samples"]:
            return
        positions = self.task.positions(self.number)[self.rows]
        order = np.argsort(positions)
        for part in np.split(order, range(_AT_ONCE, len(order), _AT_ONCE)):
            self._delivered_alike(inputs, written, self.rows[part], positions[part])

    def _delivered_alike(
        self, inputs: ShardedDataset, written: ShardedDataset, rows: Ints, positions: Ints
    ) -> None:
        try:
            input_samples = inputs.__getitems__(positions.tolist())
        except DataflowError:  # of a bad sample, the stored values are all that can be compared
            for index in range(len(rows) if len(rows) > 1 else 0):
                self._delivered_alike(inputs, written, rows[index : index + 1], positions[index : index + 1])
            return
        columns = self.task.target.columns if self.task.target.to == "tar" else {}
        written_samples = written.__getitems__((self.first + rows).tolist())
        for row, was, now in zip(rows.tolist(), input_samples, written_samples, strict=True):
            if self.task.target.to == "tar":
                was.pop(KEY, None)  # it was compared as it is stored
            for name, value in was.items():
                names = [key for key in (name, columns.get(name, "")) if key in now]
                other = now[names[-1]] if names else None
                if not _is_delivered_alike(value, other):
                    place = f"{self.receipt['name']}, sample {row}, column {name!r}"
                    raise ConversionError(
                        f"{place}: {_short(other)} is delivered, and {_short(value)} by the source: map= may "
                        "give what the target has, or leave it out"
                    )

    def _same(self, row: int, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in sorted({*was, *now} - ({KEY} if self.task.target.to != "tar" else set())):
            if not is_same(was.get(name), now.get(name)):
                shown = f"{_short(now.get(name))} is not {_short(was.get(name))}"
                raise ConversionError(
                    f"{self.receipt['name']}, sample {row}, column {name!r}: {shown}, as the source has it: "
                    "source or functions changed, or the shard is damaged: "
                    "overwrite=True (--overwrite) writes anew"
                )

    def _fitted(self) -> Iterator[dict[str, Any]]:
        """The samples of the rows, as the writer was given them."""
        positions, target = self.task.positions(self.number), self.task.target
        rows: Container[int] = range(len(self.rows))
        if self.task.batch_size is None and len(positions) == self.receipt["read"] == self.receipt["samples"]:
            positions = positions[self.rows]
        else:  # which samples are which rows shows when all are made
            rows = set(self.rows.tolist())
        samples = (sample for part in fitted_rows(self.task, positions) for sample in part.samples)
        end = [] if target.end_token is None else [target.end_token]
        for row, sample in enumerate(samples):
            if row in rows and target.to == "megatron":
                yield {"tokens": np.append(sample["tokens"], end).astype(target.dtype)}
            elif row in rows:
                yield sample

    def _as_rows(self) -> Iterator[dict[str, Any]]:
        """The rows as Parquet gives them back."""
        schema, rounds = self.task.target.arrow_schema, self.task.target.rounds
        for sample in self._fitted():
            row = {field.name: array_of([sample[field.name]], field.type, rounds=rounds) for field in schema}
            yield from _rows_of(pa.table(row))

    def _tables(self) -> Iterator[dict[str, Any]]:
        positions = self.task.positions(self.number)
        if self.task.filter is None:
            tables = chosen_tables(self.task, positions[self.rows])
        else:
            left = pa.concat_tables(chosen_tables(self.task, positions))
            tables = iter([left.take(number_array(self.rows))])
        for table in tables:
            yield from _rows_of(table)

    def _compare_tokens(self) -> None:
        """Compare the whole file: its documents have no ends."""
        target, everything = self.task.target, np.arange(self.receipt["samples"])
        whole = replace(self, rows=everything)
        has_ends = target.end_token is None or target.to == "megatron"
        end = np.array([] if has_ends else [target.end_token], target.dtype)
        parts = [np.append(sample["tokens"], end).astype(target.dtype) for sample in whole._fitted()]
        ids = np.concatenate([*parts, np.zeros(0, target.dtype)])
        stored = np.frombuffer(self.task.folder.read(file_name(self.receipt["name"])) or b"", target.dtype)
        if len(ids) != len(stored) or (ids != stored).any():
            index = int(np.flatnonzero(ids[: len(stored)] != stored[: len(ids)])[:1].sum())
            raise ConversionError(
                f"{self.receipt['name']} has {len(stored):,} tokens, and the source gives {len(ids):,}; the "
                f"first that differs is token {index:,}: source or functions changed, or the shard is damaged"
            )


def _rows_of(table: pa.Table) -> Any:
    """The rows of a table; nanoseconds, which Python's times have not, as integers."""
    kinds = with_types(table.schema, lambda kind: pa.int64() if getattr(kind, "unit", "") == "ns" else kind)
    return as_schema(table, kinds).to_pylist()


def is_same(was: Any, now: Any) -> bool:
    """Return whether two values are the same, types included; NaN is NaN."""
    if isinstance(was, np.ndarray) and isinstance(now, np.ndarray):
        return was.dtype == now.dtype and np.array_equal(was, now, equal_nan=was.dtype.kind in "fc")
    if isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(was) == len(now) and all(map(is_same, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(is_same(was[name], now[name]) for name in was)
    if type(was) is not type(now) and {type(was), type(now)} != {int, float}:
        return False
    return bool(was == now) or (was != was and now != now)


def _is_delivered_alike(was: Any, now: Any) -> bool:
    was, now = plain_value(was), plain_value(now)
    if isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(was) == len(now) and all(map(_is_delivered_alike, was, now))
    if isinstance(was, (dict, list)) and isinstance(now, str):  # Parquet has JSON as text
        return bool(json.loads(now) == was)
    if was is None or now is None:  # NaN of floats
        return was is now or was != was or now != now
    if isinstance(was, np.ndarray) or isinstance(now, np.ndarray):
        return np.shape(was) == np.shape(now) and is_same(*map(np.asarray, (was, now)))
    return is_same(was, now)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
