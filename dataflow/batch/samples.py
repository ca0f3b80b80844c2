"""The samples of a batch: taken out of its columns, left out, put together, and why they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from dataflow.batch.packed import Allocate
from dataflow.outputs.held_bytes import Ranges
from dataflow.outputs.objects import described
from dataflow.outputs.output import Output
from dataflow.ragged import LateArray, Ragged
from sharding.lengths.batching import Batching
from sharding.printable import listed
from sharding.spans import Ints

REPEAT = "__repeat__"
"""The column of `mark_repeats`: bool [samples], or [rows] of packed ones."""
KEPT = "__kept__"
"""The column of `marks_kept`: int64 [samples], which rows of the batch's plan they are."""
Form = tuple[str, tuple[int, ...]]
"""A dtype and the shape of one element."""
_OWN_MEMORY = 1 << 16
"""Bytes of a column from which on it is worth memory of its own, which processes share."""


class OnDemand(Struct, frozen=True, eq=False):
    """Values of a batch's samples, each decoded when it is asked for, and kept by nobody here."""

    decode: Callable[[int], Any]
    """Row of the chunk -> its value."""
    rows: Sequence[int]

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.rows[index])


class BatchSamples(Struct, frozen=True, eq=False):
    """The samples of a batch, made one by one: dicts of scalars as Python numbers, arrays as tensor views."""

    columns: Mapping[str, Any]
    """Column -> a value a sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    def decoded(self, sample: Mapping[str, Any]) -> list[Any]:
        """Return what was decoded for one sample alone."""
        return [sample[name] for name, values in self.columns.items() if isinstance(values, OnDemand)]


def drop_rows(batch: Mapping[str, Any], keep: Ints) -> dict[str, Any]:
    """The batch with only the rows `keep`."""
    index = torch.from_numpy(keep)
    rest: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Ragged):
            rest[name] = Ragged.of_rows([value.row(i) for i in keep.tolist()])
        elif isinstance(value, Tensor):
            rest[name] = value[index]
        elif isinstance(value, OnDemand):
            rest[name] = OnDemand(value.decode, [value.rows[i] for i in keep.tolist()])
        else:
            rest[name] = [value[i] for i in keep.tolist()]
    return rest


def samples_of(batch: Mapping[str, Any], outputs: Sequence[Output], size: int) -> BatchSamples:
    """The samples of a batch of so many."""
    columns: dict[str, Any] = {}
    for output in outputs:
        value = batch[output.name]
        if isinstance(value, Ragged):
            columns[output.name] = [value.row(i) for i in range(size)]
        elif isinstance(value, Tensor) and value.dim() == 1:
            columns[output.name] = value.tolist()
        else:
            columns[output.name] = value if isinstance(value, OnDemand) else list(value)
    return BatchSamples(columns)


def collated(samples: Sequence[Any], lists: Set[str] = frozenset()) -> Any:
    """The samples as a batch, by torch's rules; `lists`, whose lengths differ, become `Ragged`."""
    rest, columns = _without_lists(samples, lists)
    if not columns:
        return default_collate(list(samples))
    if misfit := _odd_list(columns):
        raise ValueError(f"column {misfit.column!r} has {misfit.what}, and {misfit.other}")
    return {**default_collate(rest), **{name: Ragged.of_rows(rows) for name, rows in columns.items()}}


def _without_lists(samples: Sequence[Any], lists: Set[str]) -> tuple[list[Any], dict[str, list[Tensor]]]:
    """The samples without the lists that all of them have, and those as tensors."""
    if not lists or not all(isinstance(sample, Mapping) for sample in samples):
        return list(samples), {}
    columns = {name: [sample.get(name) for sample in samples] for name in sorted(lists)}
    arrays = Tensor | np.ndarray
    columns = {n: rows for n, rows in columns.items() if all(isinstance(r, arrays) and r.ndim for r in rows)}
    rest = [{k: v for k, v in sample.items() if k not in columns} for sample in samples]
    return rest, {name: [*map(torch.as_tensor, rows)] for name, rows in columns.items()}


def form_of(values: Tensor | NDArray[Any] | LateArray) -> Form | None:
    """The dtype and trailing shape that values of a column share; None: it fits any, as it has no element.

    Lists of numbers, [n], may have any dtype.
    """
    if values.ndim > 1:
        return str(values.dtype).removeprefix("torch."), tuple(values.shape[1:])
    return ("", ()) if len(values) else None


def _odd_list(columns: Mapping[str, Sequence[Tensor]]) -> Misfit | None:
    """The first value whose dtype or trailing shape is another than that of the values before it."""
    for name, rows in columns.items():
        forms = [*map(form_of, rows)]
        first = next((index for index, form in enumerate(forms) if form), 0)
        for index, form in enumerate(forms):
            if form and form != forms[first]:
                return _unlike(index, name, rows[index], rows[first], ONE_FORM, beside=first)
    return None


# ---- samples whose lengths decide about batches -----------------------------------------------------------


class GatherSamples(Struct, frozen=True):
    """Puts samples together, whatever their lengths. Goes to builder processes.

    Args:
        lists: columns that must hold lists of numbers, or arrays [n, ...].
        optional: those of them that a sample may lack, and what it has then.
    """

    lists: tuple[str, ...]
    optional: Mapping[str, NDArray[Any]] = {}
    releases_gil: ClassVar[bool] = True
    """It takes too little time to decide who builds."""

    def checked(self, sample: Any) -> tuple[Any, str]:
        """The sample with its lists as arrays; and what is wrong with it, "": nothing."""
        if not isinstance(sample, Mapping):
            cure = "return the sample" if sample is None else "samples must be dicts to be batched by length"
            return sample, f"transform= returned {described(sample)}; {cure}, {LEAVE_OUT}"
        if self.optional:  # they come last, whether they are there or not
            lacking = {name: value for name, value in self.optional.items() if sample.get(name) is None}
            rest = {name: value for name, value in sample.items() if name not in self.optional}
            sample = {**rest, **{name: lacking.get(name, sample.get(name)) for name in self.optional}}
        if missing := [name for name in self.lists if name not in sample]:
            have = listed(map(str, sample)) or "no columns"
            which = f"batching by column {missing[0]!r}, but the sample has {have}"
            lets = f" (whole={{{missing[0]!r}: Optional()}} lets samples lack it)"
            cure = f"pass column=, or return that column{lets if missing[0] != self.lists[0] else ''}"
            return sample, f"{which}: {cure}, {LEAVE_OUT}"
        arrays = dict(sample)
        late = [n for n, value in sample.items() if isinstance(value, LateArray) and n not in self.lists]
        arrays.update((name, torch.from_numpy(np.asarray(sample[name]))) for name in late)
        for name in self.lists:
            array = _array_of(sample[name])
            if array is None:
                what = "text, whose length in tokens a tokenizer tells: use one in transform="
                if not isinstance(sample[name], str):
                    what = f"{described(sample[name])}: return lists of numbers, arrays or tensors"
                return sample, f"column {name!r} holds {what}, {LEAVE_OUT}"
            arrays[name] = array
        return arrays, ""

    def __call__(self, samples: Sequence[Any], allocate: Allocate | None = None) -> dict[str, Any]:
        """Column -> `Ragged`, or a list of what the samples have, of samples as `checked` gives them.

        Arrays that differ in dtype or trailing shape are such a list: who takes the batch names the sample.
        Large ones go where `allocate` says.
        """
        first = samples[0]
        batch: dict[str, Any] = {}
        for name in first:
            values = [sample[name] for sample in samples]
            batch[name] = ragged(values, allocate) if name in self.lists else values
        return batch


def unlike_columns(columns: Sequence[str], lengths: Sequence[int]) -> str:
    """Return which of the columns that are cut alike is not as long as the first; "": all are."""
    for name, length in zip(columns, lengths, strict=True):
        if length != lengths[0]:
            parts = f"column {name!r} has {length} elements, and {columns[0]!r} {lengths[0]}"
            return f"{parts}: they must be alike"
    return ""


def not_cut(batching: Batching, column: str) -> str:
    """Return why a sample that is too long is not cut: it has values of 2 dimensions or more in a column."""
    return (
        f"{type(batching).__name__} cuts at {batching.longest:,}, and each piece would have all of "
        f"{column!r}, whose values have 2 dimensions or more, as pixels have: make such samples shorter, "
        'refuse all that are too long by overlong="error", or leave them out by on_error="skip"'
    )


def unlike_planned(column: str, made: int, planned: int) -> str:
    """The reason of a sample that is not as long as the one that was planned with."""
    return (
        f"column {column!r} has {made} elements, but its length was said to be {planned}: mend lengths=, or "
        "change lengths_key= where lengths of another transform were kept"
    )


def late_bytes(samples: Sequence[Mapping[str, Any]]) -> int:
    """Return how much less samples take than their batch, for what is computed where that lies."""
    names = [name for name, value in samples[0].items() if isinstance(value, LateArray)]
    return sum(getattr(sample[name], "late_bytes", 0) for name in names for sample in samples)


def ragged(arrays: Sequence[NDArray[Any] | LateArray], allocate: Allocate | None = None) -> Any:
    """The arrays one after the other as a `Ragged`; or as they are, where they are not of one form.

    An empty one [0] has no type of its own.
    """
    filled = [array for array in arrays if len(array)]
    shaped = [array for array in arrays if array.ndim > 1]
    if shaped and len({form for array in arrays if (form := form_of(array))}) > 1:
        return [*map(np.asarray, arrays)]
    filled = filled or shaped[:1] or [np.empty(0, np.int64)]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    shape, dtype = (int(offsets[-1]), *filled[0].shape[1:]), np.result_type(*{a.dtype for a in filled})
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = allocate(nbytes) if allocate and nbytes >= _OWN_MEMORY else np.empty(nbytes, np.uint8)
    out = memory.view(dtype).reshape(shape)
    if any(isinstance(array, LateArray) for array in filled):
        for array, part in zip(filled, np.split(out, np.cumsum([*map(len, filled[:-1])])), strict=True):
            if isinstance(array, LateArray) and array.dtype == dtype:
                array.write(part)
            else:
                np.copyto(part, array)
    else:
        np.concatenate(filled, out=out)
    return Ragged(torch.from_numpy(out), torch.from_numpy(offsets))


def _array_of(value: Any) -> NDArray[Any] | LateArray | None:
    """A list of numbers, or an array [n, ...] of numbers, as an array; None where it is none."""
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if value is None or isinstance(value, str | LateArray):
        return value if isinstance(value, LateArray) else None
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unlike lengths
        return None
    most = array.ndim if isinstance(value, Tensor | np.ndarray) else 1
    return array if 1 <= array.ndim <= most and (array.dtype.kind in "biuf" or not len(array)) else None


# ---- what a result keeps alive ----------------------------------------------------------------------------

_WORTH_A_COPY = 1 << 16
"""Bytes that would stay beside those of a result."""
_MOST_LOOKED_AT = 64
"""Values of one list or dict."""
_DEEPEST = 3


def without_rest(value: Any, decoded: Ranges, slots: Ranges, depth: int = _DEEPEST) -> Any:
    """A result whose views of much more than their own bytes are copies: else all of that would stay.

    Args:
        value: the result of a function of the user's; it stays as it is.
        decoded: what its sample was decoded to.
        slots: memory that stays in any case.
        depth: of the containers in it that are looked into.
    """
    kind = type(value)
    if kind is Tensor:
        return value.clone() if _keeps_more(value, decoded, slots) else value
    if kind is np.ndarray:
        return value.copy() if _array_keeps_more(value, decoded, slots) else value
    if kind not in (dict, list, tuple) or not depth or len(value) > _MOST_LOOKED_AT:
        return value
    parts = [*value.values()] if kind is dict else value
    new = [without_rest(part, decoded, slots, depth - 1) for part in parts]
    if all(result is other for result, other in zip(new, parts, strict=True)):
        return value
    return dict(zip(value, new, strict=True)) if kind is dict else kind(new)


def _keeps_more(tensor: Tensor, decoded: Ranges, slots: Ranges) -> bool:
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.requires_grad:
        return False
    whole = tensor.untyped_storage().nbytes() if tensor._is_view() else 0
    return _is_much(whole, tensor.nbytes, tensor.data_ptr(), decoded, slots)


def _array_keeps_more(array: NDArray[Any], decoded: Ranges, slots: Ranges) -> bool:
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    whole = 0 if isinstance(root, np.memmap) else root.nbytes
    return _is_much(whole, array.nbytes, array.__array_interface__["data"][0], decoded, slots)


def _is_much(whole_bytes: int, own_bytes: int, address: int, decoded: Ranges, slots: Ranges) -> bool:
    """Return whether what is kept alive is much more than the value's own bytes."""
    whole_bytes = max(whole_bytes, decoded.length_at(address))
    return whole_bytes > 2 * own_bytes + _WORTH_A_COPY and address not in slots


# ---- why samples cannot be put together -------------------------------------------------------------------

_TOO_DEEP = 50
"""No batch is nested as deep as this."""
_OF_OTHER_ARGUMENTS = (KeyError, TypeError, AttributeError)
"""Errors of code that takes its argument for something else."""
LEAVE_OUT = "or leave such samples out by on_error='skip'"
_ONE_SHAPE = "pad or cut them to one shape in transform=, or give a collate_fn= that does"
ONE_FORM = "return one dtype, and one shape but for the first dimension, for every sample"
_ONE_TYPE = "return one type for every sample, or give a collate_fn= that takes both"
_BATCHABLE = "return tensors, arrays, numbers, text, or lists and dicts of those, or give a collate_fn="


class Misfit(Struct, frozen=True, kw_only=True):
    """The first sample that `default_collate` cannot put together with the others."""

    at: int
    """Its index among the samples."""
    column: str
    """Such as "x", or "x.y[0]" inside a column; "": the sample as a whole."""
    what: str
    """The value that it has there."""
    cure: str
    beside: int | None = None
    """The sample that it does not fit; None: it cannot be in any batch."""
    other: str = ""
    """The value that the other has."""
    is_bad: bool = True
    """True if it is this one that is wrong; False: nobody knows which of the two."""


def misfit_of(
    samples: Sequence[Any], outputs: Sequence[Output], lists: Set[str] = frozenset()
) -> Misfit | None:
    """Find who is at odds with the first sample, with torch's own function as the oracle; None: nobody."""
    samples, columns = _without_lists(samples, lists)
    if misfit := _odd_list(columns):
        return misfit
    cures = {
        output.name: f"decode={{{output.name!r}: {output.one_shape_cure}, or {_ONE_SHAPE}"
        for output in outputs
        if output.one_shape_cure
    }
    for index, sample in enumerate(samples):
        if _is_too_deep(sample):
            what, cure = f"what holds itself, or is nested over {_TOO_DEEP} deep", "return plain values"
            return Misfit(at=index, column="", what=what, cure=f"{cure}, {LEAVE_OUT}")
    if not _objection(samples):
        return None
    are_dicts = [isinstance(sample, Mapping) for sample in samples]
    if None not in samples and any(are_dicts) and not all(are_dicts):
        index, dict_at = are_dicts.index(False), are_dicts.index(True)
        return _unlike(index, "", samples[index], samples[dict_at], _ONE_TYPE, beside=dict_at, is_bad=True)
    return _misfit(samples, "", cures)


def _misfit(values: Sequence[Any], column: str, cures: Mapping[str, str]) -> Misfit | None:
    first = values[0]
    for index, value in enumerate(values):
        if value is None:
            cure = f"return {'a value' if column else 'the sample'}, {LEAVE_OUT}"
            return Misfit(at=index, column=column, what="None", cure=cure)
    if isinstance(first, Mapping | list | tuple):
        return _inner_misfit(values, column, cures)
    for index, value in enumerate(values):
        if why := _objection([value]):
            return Misfit(at=index, column=column, what=described(value), cure=f"{why}; {LEAVE_OUT}")
        if _objection([first, value]):
            same = isinstance(value, type(first))
            cure = cures.get(column, _ONE_SHAPE) if same else _ONE_TYPE
            return _unlike(index, column, value, first, cure)
    return None


def _inner_misfit(values: Sequence[Any], column: str, cures: Mapping[str, str]) -> Misfit | None:
    """Return how two dicts, lists or tuples differ inside."""
    first = values[0]
    kind = Mapping if isinstance(first, Mapping) else (list, tuple)
    for index, value in enumerate(values):
        cure = _ONE_SHAPE if isinstance(value, kind) else _ONE_TYPE
        if not isinstance(value, kind) or (kind is not Mapping and len(value) != len(first)):
            return _unlike(index, column, value, first, cure)
    for key in first if isinstance(first, Mapping) else range(len(first)):
        name = f"{column}[{key}]" if isinstance(key, int) else f"{column}.{key}" if column else str(key)
        for index, value in enumerate(values):
            if isinstance(value, Mapping) and key not in value:
                cure = "return the same columns for every sample" + f", {LEAVE_OUT}" * (not column)
                other = described(first[key])
                return Misfit(
                    at=index, column=name, what="missing", cure=cure, beside=0, other=other, is_bad=not column
                )
        inner = [value[key] for value in values]
        if _objection(inner):
            return _misfit(inner, name, cures)
    return None


def _is_too_deep(value: Any, depth: int = 0) -> bool:
    """Return whether lists and dicts lie in one another without an end: torch would fail on them late."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return depth > _TOO_DEEP or any(_is_too_deep(each, depth + 1) for each in inner)


def _unlike(
    index: int, column: str, value: Any, other: Any, cure: str, *, beside: int = 0, is_bad: bool = False
) -> Misfit:
    """Return what does not fit another sample's."""
    what, than = described(value), described(other)
    return Misfit(at=index, column=column, what=what, cure=cure, beside=beside, other=than, is_bad=is_bad)


def _objection(values: Sequence[Any]) -> str:
    """Why torch's function cannot put these together; "": it can."""
    try:
        default_collate(list(values))
    except TypeError:
        return _BATCHABLE
    except Exception as error:  # a negative stride, a sparse tensor, an integer that is too large
        return f"{error}".strip().rstrip(".") or type(error).__name__
    return ""


def transform_reason(error: BaseException, columns: Sequence[str]) -> str:
    """Why a transform failed; where it may have taken its argument for something else, what that was."""
    reason = type(error).__name__
    with suppress(Exception):  # whoever wrote the class may fail to tell it
        reason += f": {error}"
    missing = not isinstance(error, KeyError) or error.args[:1] not in [(name,) for name in columns]
    if isinstance(error, _OF_OTHER_ARGUMENTS) and missing:
        reason += f"; it was given {described(dict.fromkeys(columns))}"
    return reason


def checked_dict(batch: Any, function: str) -> MutableMapping[str, Any]:
    """Return a batch that columns can be added to. Raises `TypeError`, with who made it, if it is no dict."""
    if isinstance(batch, MutableMapping):
        return batch
    who = f"{function} returned" if function else "the transformed samples were collated to"
    raise TypeError(
        f"mark_repeats=True adds a column {REPEAT!r} to batches that are dicts, but {who} a "
        f"{type(batch).__name__}"
    )
