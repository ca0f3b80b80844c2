"""The compiled executor: `libcore.so`, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.core.compile import LIBRARY
from prefetch.core.images import CropBox, ImageForm, Resizer
from prefetch.core.plan import BuildPlan
from prefetch.core.queue import CopyQueue, address_of, column_table

VERSION = 5
"""Of the contract in core.h."""
_WIDTHS = (1, 2, 4, 8)


_FUNCTIONS = {
    "core_version": ":i",
    "core_run": "piiip:i",
    "core_interleave": "piiip:",
    "core_resize": "pp:i",
    "core_bring": "pip:i",
    "core_keyed_orders": "ppip:i",
    "core_token_turns": "pppppipi:i",
    "core_queue_bytes": ":i",
    "core_open": "pii:i",
    "core_submit": "pp:",
    "core_give": "ppii:i",
    "core_take_back": "p:p",
    "core_take": "ppp:i",
    "core_work": "ppip:i",
    "core_settle": "p:",
    "core_count": "pp:",
    "core_stop": "p:",
    "core_close": "p:",
}
"""Arguments and result: pointers and int64."""
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "": None}


class CompiledExecutor:
    """Runs plans by a library that `core.h` describes. `OSError` where it cannot be loaded."""

    name = "compiled"

    def __init__(self, path: Path = LIBRARY) -> None:
        self._library = _typed(ctypes.CDLL(str(path)), path)
        self._holding = _typed(ctypes.PyDLL(str(path)), path)
        """For calls that do not wait: to let the interpreter go for them may cost a switch."""

    def run(self, plan: BuildPlan) -> NDArray[np.uint8]:
        """See `Executor`."""
        table = column_table(plan.columns)
        status = np.empty(plan.num_rows, np.uint8)
        self._library.core_run(address_of(table), len(table), 0, plan.num_rows, address_of(status))
        return status

    def resizer(self, form: ImageForm) -> Resizer:
        """See `Executor`."""
        return _CompiledResizer(self._library.core_resize, form)

    def open_queue(self, num_threads: int, *, wake_at: int = 1) -> CopyQueue:
        """See `Executor`."""
        return CopyQueue(self._library, self._holding, num_threads, wake_at)

    def bring(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Executor`."""
        status = np.empty(len(ranges), np.int64)
        self._library.core_bring(address_of(ranges), len(ranges), address_of(status))
        return status

    def keyed_orders(self, sizes: NDArray[np.int64], keys: Sequence[int], out: NDArray[np.int64]) -> None:
        """See `Executor`."""
        numbers = np.array(keys, np.uint64)
        if len(numbers) != len(sizes) or int(sizes.sum()) != len(out):
            raise ValueError(f"{len(numbers)} keys and {len(out)} places for sizes {sizes.tolist()}")
        if self._library.core_keyed_orders(
            address_of(sizes), address_of(numbers), len(numbers), address_of(out)
        ):
            raise MemoryError(f"no memory to order {len(out):,} samples")

    def token_turns(
        self,
        shares: NDArray[np.int64],
        owed: NDArray[np.int64],
        lengths: NDArray[np.int64],
        upcoming: NDArray[np.int64],
        end: NDArray[np.int64],
        out: NDArray[np.uint16],
    ) -> int:
        """See `Executor`."""
        tables = map(address_of, (shares, owed, lengths, upcoming, end))
        return int(self._library.core_token_turns(*tables, len(shares), address_of(out), len(out)))

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """See `Executor`."""
        width = out.itemsize
        if width not in _WIDTHS or any(column.dtype != out.dtype for column in columns):
            np.stack(columns, axis=-1, out=out)
            return
        arrays = [np.require(column, requirements=["C", "A"]) for column in columns]
        addresses = np.array([address_of(array) for array in arrays], np.int64)
        self._library.core_interleave(
            address_of(addresses), len(arrays), arrays[0].size, width, address_of(out)
        )


class _Form(ctypes.Structure):
    """`core_form`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("channels", "height", "width", "filter", "antialias", "planar")
        ),
        ("numbers", ctypes.c_void_p),
    )


class _Image(ctypes.Structure):
    """`core_image`."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("top", "left", "height", "width")),
        *(
            (name, ctypes.c_int64)
            for name in ("least_row", "past_row", "least_column", "past_column", "flip")
        ),
        ("out", ctypes.c_void_p),
    )


class _CompiledResizer:
    """`Resizer` of one form."""

    def __init__(self, resize: Any, form: ImageForm) -> None:
        numbers = form.numbers
        self._resize, self._form = resize, form
        self._table = _Form(
            form.channels,
            form.height,
            form.width,
            form.filter,
            form.antialias,
            form.planar,
            None if numbers is None else address_of(numbers),
        )

    def __call__(self, pixels: NDArray[np.uint8], crop: CropBox, out: NDArray[np.uint8 | np.float32]) -> None:
        """See `Resizer`."""
        top, left, bottom, right = crop.within
        image = _Image(
            address_of(pixels),
            pixels.strides[0],
            crop.top,
            crop.left,
            crop.height,
            crop.width,
            top,
            bottom,
            left,
            right,
            crop.flip,
            address_of(out),
        )
        if self._resize(ctypes.byref(image), ctypes.byref(self._table)):
            raise MemoryError(f"no memory to resize to {self._form.shape}")


def _typed(library: Any, path: Path) -> Any:
    """The library with its functions' types, if it is of this version."""
    if not hasattr(library, "core_version"):
        raise OSError(f"{path} is no library of ours: run python -m prefetch.core.compile")
    found = library.core_version()
    if found != VERSION:
        raise OSError(
            f"{path} is of version {found} of its contract, not {VERSION}: "
            "run python -m prefetch.core.compile"
        )
    for name, types in _FUNCTIONS.items():
        arguments, result = types.split(":")
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[kind] for kind in arguments], _TYPES[result]
    return library
