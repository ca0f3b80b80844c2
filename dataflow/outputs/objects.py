"""Columns of Python objects, which a function makes of the bytes of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.values import CONVERTERS
from dataflow.outputs.columns import ChunkColumns
from dataflow.outputs.decoded import DecodedOutput
from dataflow.outputs.output import Default, Output
from sharding.spans import Bytes

_NAMED = 20
"""Columns that a message names."""


@dataclass(frozen=True, kw_only=True)
class ObjectOutput(DecodedOutput):
    """A list of objects a batch, or one tensor of arrays that are all of one shape. Arrays become tensors."""

    kinds: ClassVar[tuple[str, str, str, str]] = ("", "objects", "", "lists of objects")

    convert: Callable[[bytes], Any]
    """The bytes of one value -> a Python object."""
    is_format_rule: bool = False
    """True if the function is the format's, not the user's."""

    @property
    def missing_cure(self) -> str:
        """See `Output`."""
        return super().missing_cure if self.is_list else "Optional()"

    def description(self) -> str:
        """Return the kind, dtype and function."""
        stacked = ", stacked" if self.is_stacked else ""
        return f"{super().description()} {getattr(self.convert, '__name__', '')}".rstrip() + stacked

    @property
    def function(self) -> Callable[[bytes], Any] | None:
        """See `Output`."""
        is_ours = any(self.convert is rule for rule in (bytes_tensor, *CONVERTERS.values()))
        return None if is_ours or self.is_format_rule else self.convert

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. A missing object is None, unless there is a default, and objects are not stacked."""
        if self.is_list:
            return super().optional(default, has_mask=has_mask)
        return replace(self, default=Default(default), is_stacked=False)

    def decode(self, columns: ChunkColumns, data: Bytes, row: int, number: int = 0) -> Any:
        """See `DecodedOutput`. Items of lists stay what the function makes of them."""
        value = self.convert(data.tobytes())
        return as_tensor(value) if isinstance(value, np.ndarray) and not self.is_list else value

    def stack(self, columns: ChunkColumns, stored: Sequence[Any], values: list[Any]) -> Tensor | list[Any]:
        """The arrays as one tensor, with zeros for bad ones; a list where torch has no such type."""
        first = next((value for value in values if isinstance(value, Tensor)), None)
        if first is None:
            return values
        for value, entry in zip(values, stored, strict=True):
            if value is not None and described(value) != described(first):
                what = f"{described(value)}, but another sample has {described(first)}"
                rule = "auto" if self.is_format_rule else "npy"
                cure = (
                    f"values of one size are stacked; decode={{{self.name!r}: Optional({rule!r})}} lists them"
                )
                raise columns.rows.sample_error(entry[1], f"{what}: {cure}", self.name)
        return torch.stack([torch.zeros_like(first) if value is None else value for value in values])


def is_text(output: Output) -> bool:
    """Return whether a column is delivered as `str`."""
    return isinstance(output, ObjectOutput) and output.convert is CONVERTERS["text"]


def bytes_tensor(data: bytes) -> Tensor:
    """A byte string as uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_tensor(value: NDArray[Any]) -> Tensor | NDArray[Any]:
    """An array as a tensor in native byte order; as it is where torch lacks its type."""
    native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])  # keeps 0-d arrays 0-d
    try:
        return torch.from_numpy(native)
    except TypeError:
        return value


def described(value: Any) -> str:
    """Return what a value is, for messages: type and shape, columns of a dict, no content."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        names = [repr(name) for name in list(value)[:_NAMED]]
        return f"a dict of {', '.join(names)}{', ...' * (len(value) > _NAMED)}" if names else "an empty dict"
    if isinstance(value, list | tuple):
        within = f", the first {described(value[0])}" if value and isinstance(value[0], Mapping) else ""
        return f"a {type(value).__name__} of {len(value)}{within}"
    return "None" if value is None else type(value).__name__
