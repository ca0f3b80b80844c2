"""Columns of encoded images: decoded straight into their rows of the slot, in parts that run in parallel."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.image import Image, decode_image, decode_images, of_own_size
from dataflow.outputs.columns import ChunkColumns, ChunkRows, StoredValue, WindowPart
from dataflow.outputs.fixed import FixedOutput
from dataflow.outputs.output import BuiltColumn, Output, split_list, split_rows
from prefetch.memory.arena import rounded_bytes

_LEAST_PART, _MOST_PART = 8, 32
"""Images decoded by one task: their Python costs as much for 8 as for 16."""


@dataclass(frozen=True, kw_only=True)
class ImageOutput(FixedOutput):
    """Images of one size: a tensor [batch, *image.shape]."""

    kind: ClassVar[str] = "image"
    is_decoded: ClassVar[bool] = True
    releases_gil: ClassVar[bool] = True
    missing_cure: ClassVar[str] = "Optional(Image(...), mask=True)"

    image: Image

    @property
    def _unknown(self) -> float:
        return 0

    @property
    def list_length(self) -> int | None:
        """None: images are no lists."""
        return None

    def description(self) -> str:
        """Kind, dtype, shape and settings."""
        return f"{super().description()} {self.image}"

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded in parts of a few."""
        columns.note_missing(self.name, self.lacking)
        out = columns.fixed_slot(self.dtype, self.shape)
        tasks: list[Callable[[], None]] = []
        most = part_size(columns.rows.num_rows)
        for part in columns.rows.parts:
            for start in range(0, len(part.rows), most):
                few = part.between(start, start + most)
                decode = partial(self._decode, columns, few)
                tasks.append(partial(_fill, columns, few, out, decode))
        return BuiltColumn(split=partial(split_rows, out), decodes=tasks)

    def _decode(self, columns: ChunkColumns, part: WindowPart, out: NDArray[Any]) -> None:
        """Decode the images of a part into `out`, and note those that cannot be."""
        spans, rows = part.spans(self.name), part.rows
        have = np.flatnonzero(spans.lengths[rows] >= 0)
        target = out
        if len(have) < len(rows):
            if self.default is not None:
                out[spans.lengths[rows] < 0] = self.default.value
            rows, target = rows[have], np.empty_like(out[have])
        draws = columns.randomness.draws(part.window, rows) if self.image.random else None

        def remark(index: int, text: str) -> None:
            columns.remark(part.chunk_row(int(have[index])), self.name, text)

        with part.window.values_of(spans, rows, self.name) as (buffer, starts):
            failures = decode_images(
                self.image, buffer, starts, spans.lengths[rows], target, draws, name=str, remark=remark
            )
        for index, error in failures:
            columns.note_bad(part.chunk_row(int(have[index])), self.name, error)
        if target is not out:
            out[have] = target


@dataclass(frozen=True, kw_only=True)
class FreeImageOutput(Output):
    """Images of their own sizes: a list of tensors a batch, with None where one is missing."""

    kind: ClassVar[str] = "images"
    is_decoded: ClassVar[bool] = True
    releases_gil: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = "Image(size=...)} makes them one size"
    missing_cure: ClassVar[str] = "Optional(Image(...))"

    image: Image

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. A missing image is None."""
        return self._without_default(default, "None in a list of images; Image(size=...) has room for one")

    def description(self) -> str:
        """Kind, dtype and settings."""
        return f"{super().description()} {self.image}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: how large a batch's slot is, the images' headers say."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded batch by batch. Those of a batch share a slot."""
        columns.note_missing(self.name, self.lacking)
        stored = columns.stored_values(self.name)
        first, specs = 0, list[Image | None]()

        def spec_of(data: NDArray[np.uint8], row: int) -> Image:
            return sized(self.image, data, columns)

        def ahead(size: int) -> int:
            nonlocal first, specs
            batch = stored[first : first + size]
            first += size
            specs = [columns.decoded(self.name, value, spec_of) for value in batch]
            return rounded_bytes(image_bytes(specs))

        def each(row: int) -> Tensor | None:
            image: Tensor | None = columns.decoded(
                self.name, stored[row], partial(decode_alone, columns, self.name, self.image)
            )
            return image

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for batch in split_list(stored, sizes):
                yield self._decode(columns, batch, specs)

        return BuiltColumn(split=values, ahead=ahead, each=each)

    def _decode(
        self, columns: ChunkColumns, batch: Sequence[StoredValue | None], specs: Sequence[Image | None]
    ) -> list[Tensor | None]:
        """The images of a batch."""
        slot = columns.slot_of_batch(image_bytes(specs)).view(self.dtype)
        used, images = 0, list[Tensor | None]()
        for value, spec in zip(batch, specs, strict=True):
            if spec is None:
                images.append(None)
                continue
            out = slot[used : used + math.prod(spec.shape)].reshape(spec.shape)
            used += out.size
            decode = partial(decode_into, out, columns, self.name, spec, np.zeros(1, np.int64))
            images.append(columns.decoded(self.name, value, decode))
        return images


def part_size(num_images: int) -> int:
    """Images that one task decodes: two tasks a core, so that all of them share a batch and end together."""
    shared = num_images // (2 * len(os.sched_getaffinity(0)))
    return min(max(shared, _LEAST_PART), _MOST_PART)


def decode_into(
    out: NDArray[Any],
    columns: ChunkColumns,
    column: str,
    spec: Image,
    item: NDArray[np.int64],
    data: NDArray[np.uint8],
    row: int,
) -> Tensor:
    """Decode an image of a row of the chunk; `item`: which of its sample's it is, int64 [1]."""
    draws = None
    if spec.random:
        window, window_row = columns.rows.find(row)
        draws = columns.randomness.draws(window, np.array([window_row]), item)

    def remark(_: int, text: str) -> None:
        columns.remark(row, column, text)

    return torch.from_numpy(decode_image(spec, data, draws, out=out, remark=remark))


def sized(image: Image, data: NDArray[np.uint8], columns: ChunkColumns, used_bytes: int = 0) -> Image:
    """An image's own size. Raises `MemoryLimitError` if its sample, with `used_bytes` more, cannot fit."""
    spec = of_own_size(image, data)
    columns.check_fits(used_bytes + image_bytes([spec]))
    return spec


def decode_alone(
    columns: ChunkColumns,
    column: str,
    image: Image,
    data: NDArray[np.uint8],
    row: int,
    number: int = 0,
    used_bytes: int = 0,
) -> Tensor:
    """Decode an image of its own size into memory of its own."""
    spec = sized(image, data, columns, used_bytes)
    out = np.empty(spec.shape, spec.dtype)
    return decode_into(out, columns, column, spec, np.array([number]), data, row)


def _fill(
    columns: ChunkColumns,
    part: WindowPart,
    out: NDArray[Any],
    write: Callable[[NDArray[Any]], None],
) -> None:
    """Let `write` fill the rows of a part: in place where they follow one another, else through a copy."""
    if isinstance(part.chunk_rows, slice):
        write(out[part.chunk_rows])
        return
    nbytes = len(part.rows) * (out.nbytes // max(1, len(out)))
    own = columns.arena.lease(nbytes or 1)[:nbytes].view(out.dtype).reshape(len(part.rows), *out.shape[1:])
    write(own)
    out[part.chunk_rows] = own


def image_bytes(specs: Sequence[Image | None]) -> int:
    """Bytes of images with sizes, those that are None left out."""
    return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs if spec is not None)
