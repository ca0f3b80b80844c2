"""The samples of a batch: taken out of its columns, left out, put together, and why they cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from dataflow.outputs.objects import described
from dataflow.outputs.output import Output
from dataflow.ragged import Ragged


def drop_rows(batch: Mapping[str, Any], keep: NDArray[np.int64]) -> dict[str, Any]:
    """The batch with only the rows `keep`."""
    index = torch.from_numpy(keep)
    rest: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Ragged):
            rows = [value.row(i) for i in keep.tolist()]
            lengths = value.lengths[index]
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
            rest[name] = Ragged(torch.cat(rows) if rows else value.values[:0], offsets)
        elif isinstance(value, Tensor):
            rest[name] = value[index]
        else:
            rest[name] = [value[i] for i in keep.tolist()]
    return rest


def samples_of(batch: Mapping[str, Any], outputs: Sequence[Output], size: int) -> list[dict[str, Any]]:
    """The samples of a batch, one dict each: scalars as Python numbers, arrays as tensor views."""
    columns = []
    for output in outputs:
        value = batch[output.name]
        if isinstance(value, Ragged):
            columns.append([value.row(i) for i in range(size)])
        elif isinstance(value, Tensor) and value.dim() == 1:
            columns.append(value.tolist())
        else:
            columns.append(list(value))
    names = [output.name for output in outputs]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def collated(samples: Sequence[Any], lists: Set[str] = frozenset()) -> Any:
    """The samples as a batch, by torch's rules; `lists`, whose lengths differ, become `Ragged`."""
    rest, columns = _without_lists(samples, lists)
    if not columns:
        return default_collate(list(samples))
    return {**default_collate(rest), **{name: Ragged.of_rows(rows) for name, rows in columns.items()}}


def _without_lists(samples: Sequence[Any], lists: Set[str]) -> tuple[list[Any], dict[str, list[Tensor]]]:
    """The samples without the lists that all of them have, and those."""
    if not lists or not all(isinstance(sample, Mapping) for sample in samples):
        return list(samples), {}
    columns = {name: [sample.get(name) for sample in samples] for name in sorted(lists)}
    columns = {name: rows for name, rows in columns.items() if all(map(_is_list, rows))}
    return [{k: v for k, v in sample.items() if k not in columns} for sample in samples], columns


def _is_list(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


# ---- why samples cannot be put together -------------------------------------------------------------------

_NAMED = 20
"""Columns that a message names."""
_OF_OTHER_ARGUMENTS = (KeyError, TypeError, AttributeError)
"""What is raised by code that takes its argument for something else."""
_LEAVE_OUT = "or leave such samples out by on_error='skip'"
_ONE_SHAPE = "pad or cut them to one shape in transform=, or give a collate_fn= that does"
_ONE_TYPE = "return one type for every sample, or give a collate_fn= that takes both"
_BATCHABLE = "return tensors, arrays, numbers, text, or lists and dicts of those, or give a collate_fn="


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """The first sample that `default_collate` cannot put together with the others."""

    at: int
    """Its place among them."""
    column: str
    """Such as "x", or "x.y[0]" inside a column; "": the sample as a whole."""
    what: str
    """What it has there."""
    cure: str
    beside: int | None = None
    """The sample that it does not fit; None: it cannot be in any batch."""
    other: str = ""
    """What that one has."""


def misfit_of(
    samples: Sequence[Any], outputs: Sequence[Output], lists: Set[str] = frozenset()
) -> Misfit | None:
    """Find who is at odds with the first sample, with torch's own function as the oracle; None: nobody."""
    samples, _ = _without_lists(samples, lists)
    cures = {
        output.name: f"decode={{{output.name!r}: {output.one_shape_cure}, or {_ONE_SHAPE}"
        for output in outputs
        if output.one_shape_cure
    }
    return None if _fits(samples) else _misfit(samples, "", cures)


def _misfit(values: Sequence[Any], column: str, cures: Mapping[str, str]) -> Misfit | None:
    first = values[0]
    for at, value in enumerate(values):
        if value is None:
            cure = f"return {'a value' if column else 'the sample'}, {_LEAVE_OUT}"
            return Misfit(at=at, column=column, what="None", cure=cure)
    if isinstance(first, Mapping | list | tuple):
        return _inner_misfit(values, column, cures)
    for at, value in enumerate(values):
        if not _fits([value]):
            return Misfit(at=at, column=column, what=described(value), cure=f"{_BATCHABLE}; {_LEAVE_OUT}")
        if not _fits([first, value]):
            same = isinstance(value, type(first))
            cure = cures.get(column, _ONE_SHAPE) if same else _ONE_TYPE
            return _unlike(at, column, value, first, cure)
    return None


def _inner_misfit(values: Sequence[Any], column: str, cures: Mapping[str, str]) -> Misfit | None:
    """Of dicts, or of lists and tuples."""
    first = values[0]
    kind = Mapping if isinstance(first, Mapping) else (list, tuple)
    for at, value in enumerate(values):
        cure = _ONE_SHAPE if isinstance(value, kind) else _ONE_TYPE
        if not isinstance(value, kind) or (kind is not Mapping and len(value) != len(first)):
            return _unlike(at, column, value, first, cure)
    for key in first if isinstance(first, Mapping) else range(len(first)):
        name = f"{column}[{key}]" if isinstance(key, int) else f"{column}.{key}" if column else str(key)
        for at, value in enumerate(values):
            if isinstance(value, Mapping) and key not in value:
                cure = "return the same columns for every sample"
                return Misfit(
                    at=at, column=name, what="missing", cure=cure, beside=0, other=described(first[key])
                )
        inner = [value[key] for value in values]
        if not _fits(inner):
            return _misfit(inner, name, cures)
    return None


def _unlike(at: int, column: str, value: Any, first: Any, cure: str) -> Misfit:
    """What does not fit the first sample's."""
    return Misfit(at=at, column=column, what=described(value), cure=cure, beside=0, other=described(first))


def _fits(values: Sequence[Any]) -> bool:
    try:
        default_collate(list(values))
    except Exception:
        return False
    return True


def transform_reason(error: Exception, columns: Sequence[str]) -> str:
    """Why a transform failed; where it may have taken its argument for something else, what that was."""
    reason = f"{type(error).__name__}: {error}"
    missing = not isinstance(error, KeyError) or error.args[:1] not in [(name,) for name in columns]
    if isinstance(error, _OF_OTHER_ARGUMENTS) and missing:
        reason += f"; it was given {described(dict.fromkeys(columns))}"
    return reason
