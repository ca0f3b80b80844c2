"""The bytes of a value become numbers, parsed for a whole block at once, or Python objects one by one.

`CONVERTERS` holds the decoders that `decode=` knows by name: a new one is one more line there.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.errors import MemoryLimitError
from sharding.blocks import Spans
from sharding.spans import Bytes, Ints, numbers_at

Array = NDArray[Any]
DRAWS = 24
"""Random numbers that a sample owns for its decoders."""
Draws = NDArray[np.float64]
"""Random numbers in [0, 1), [n, DRAWS]."""
BadRows = Sequence[tuple[int, str]]
"""Rows whose value cannot be decoded, each with the reason."""
LACKING = "the sample lacks this column"


def check_fits(nbytes: int, most_bytes: int) -> None:
    """Raise `MemoryLimitError` where a value of a sample would take more than the memory limit."""
    if nbytes > most_bytes:
        raise MemoryLimitError(
            f"decoded, it takes {nbytes:,} bytes or more, and memory_limit={most_bytes:,}: raise "
            "memory_limit, or leave such samples out by on_error='skip'"
        )


def parse_ints(column: Spans) -> tuple[Ints, BadRows]:
    """Decimal integers in ASCII, surrounding blanks allowed: values int64 [n], and the rows that are none.

    Values of at most 18 digits and nothing else are parsed together; otherwise one by one.
    """
    if not len(column):
        return np.zeros(0, np.int64), ()
    width = int(column.lengths.max())
    if 0 < width <= 18 and (column.lengths > 0).all():
        digits = _right_aligned(column, width)
        number = digits - np.uint8(48)
        inside = np.arange(width, 0, -1) <= column.lengths[:, None]
        if (number[inside] < 10).all():
            number[~inside] = 0
            return number.astype(np.int64) @ (10 ** np.arange(width - 1, -1, -1, dtype=np.int64)), ()
    return _parse_each(int, column, np.int64)


def parse_floats(column: Spans) -> tuple[NDArray[np.float64], BadRows]:
    """Decimal numbers in ASCII: values float64 [n], and the rows that are none."""
    return _parse_each(float, column, np.float64)


def stored_numbers(column: Spans, *, dtype: str, shape: tuple[int, ...]) -> tuple[Array, BadRows]:
    """Numbers as they are stored: values [n, *shape], and the rows that are none."""
    width = math.prod(shape) * np.dtype(dtype).itemsize
    good = np.flatnonzero(column.lengths == width)
    values = np.zeros((len(column), *shape), dtype)
    values[good] = numbers_at(column.buffer.view(np.uint8), column.starts[good], dtype, shape)
    bad = np.flatnonzero(column.lengths != width).tolist() if len(good) < len(column) else ()
    reasons = {
        row: LACKING if column.lengths[row] < 0 else f"it has not the {width} bytes of others" for row in bad
    }
    return values, list(reasons.items())


def _right_aligned(column: Spans, width: int) -> Bytes:
    """The values as rows [n, width] of characters, filled with blanks on the left."""
    offsets = column.starts[:, None] + column.lengths[:, None] - np.arange(width, 0, -1)
    inside = offsets >= column.starts[:, None]
    return np.where(inside, column.buffer.view(np.uint8)[np.where(inside, offsets, 0)], np.uint8(32))


def _parse_each(parse: Callable[[bytes], Any], column: Spans, dtype: type) -> tuple[Array, BadRows]:
    values: Array = np.zeros(len(column), dtype)
    bad: list[tuple[int, str]] = []
    for row in range(len(column)):
        if column.lengths[row] < 0:
            bad.append((row, LACKING))
            continue
        text = column.value(row).tobytes()
        try:
            values[row] = parse(text.strip())
        except (ValueError, OverflowError):
            bad.append((row, f"not a number of type {np.dtype(dtype)}: {text[:40]!r}"))
    return values, bad


def _from_npy(data: bytes) -> Array:
    from sharding.formats.tokens import plain_header

    header = plain_header(data)
    if header is not None:
        dtype, fortran, shape, start = header
        values = np.frombuffer(data, dtype, math.prod(shape), start)
        return values.reshape(shape, order="F" if fortran else "C").copy(order="K")
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def _unpickle(data: bytes) -> Any:
    import pickle

    return pickle.loads(data)


def _torch_load(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _pil_image(data: bytes) -> Any:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


CONVERTERS: dict[str, Callable[[bytes], Any]] = {
    "text": bytes.decode,
    "json": json.loads,
    "npy": _from_npy,
    "pil": _pil_image,
    "pickle": _unpickle,
    "torch": _torch_load,
}
"""Name in `decode=` -> the function that makes an object of the bytes of one value."""
