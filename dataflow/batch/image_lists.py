"""Columns of lists of encoded images: all images of a batch in one tensor, or each of its own size.

The images of a chunk are numbered through in the order of its rows. They are decoded straight into the slot,
in parts that run in parallel, whichever samples they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.columns import ChunkColumns, ChunkRows, StoredValue, WindowPart
from dataflow.batch.images import decode_into, image_bytes, part_size
from dataflow.batch.output import BuiltColumn, Output
from dataflow.decode.image import Image, decode_images, of_own_size
from dataflow.ragged import Ragged
from dataflow.staging.columns import StagedSpans
from prefetch.memory.arena import rounded_bytes
from sharding.byte_lists import list_counts, list_items
from sharding.errors import SampleError

_FIRST = np.zeros(1, np.int64)


@dataclass(frozen=True)
class _PartImages:
    """The images of the rows of a part, one after the other."""

    part: WindowPart
    row: NDArray[np.int64]
    """[images] index of its row in the part."""
    number: NDArray[np.int64]
    """[images] which of its sample's images it is."""
    places: StagedSpans
    """[images] where each lies."""
    target: NDArray[np.int64]
    """[images] its place among the images of the chunk; ascends."""


@dataclass(frozen=True, kw_only=True)
class ImageListOutput(Output):
    """Images of one size, any number of them a sample: a `Ragged` a batch, values [images, *image.shape]."""

    kind: ClassVar[str] = "image lists"
    is_view: ClassVar[bool] = True
    is_decoded: ClassVar[bool] = True
    releases_gil: ClassVar[bool] = True

    image: Image

    def description(self) -> str:
        """Kind, dtype, shape and settings."""
        return f"{super().description()} {self.image}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of all images, whose number the lists say."""
        return rounded_bytes(int(self._counts(rows).sum()) * image_bytes([self.image]))

    def _counts(self, rows: ChunkRows) -> NDArray[np.int64]:
        """How many images each row of the chunk has, int64 [rows]."""
        counts = np.zeros(rows.num_rows, np.int64)
        for part in rows.parts:
            buffer, starts, have = _lists(part, self.name)
            of_part = np.zeros(len(part.rows), np.int64)
            of_part[have] = list_counts(buffer, starts)
            counts[part.chunk_rows] = of_part
        return counts

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded in parts of a few."""
        columns.note_missing(self.name)
        offsets = np.append(0, np.cumsum(self._counts(columns.rows)))
        total, each = int(offsets[-1]), image_bytes([self.image])
        out = columns.slot(total * each).view(self.dtype).reshape(total, *self.shape)
        most, tasks = part_size(total), list[Callable[[], None]]()
        for part in columns.rows.parts:
            images = _images_of(part, self.name, offsets)
            for start in range(0, len(images.row), most):
                few = slice(start, min(start + most, len(images.row)))
                tasks.append(partial(self._decode, columns, images, few, out))
        return BuiltColumn(split=partial(_split, out, offsets), decodes=tasks)

    def _decode(self, columns: ChunkColumns, images: _PartImages, few: slice, out: NDArray[Any]) -> None:
        """Decode a few images of a part into their places, and note those that cannot be."""
        part, rows, target = images.part, images.row[few], images.target[few]
        draws = None
        if self.image.random:
            draws = columns.randomness.draws(part.window, part.rows[rows], images.number[few])
        follow = int(target[-1]) - int(target[0]) + 1 == len(target)  # else rows of other windows lie between
        own = out[target[0] : target[-1] + 1] if follow else np.empty_like(out[target])
        at = np.arange(few.start, few.stop)
        with part.window.values_of(images.places, at, self.name) as (buffer, starts):
            lengths = images.places.lengths[few]
            failures = decode_images(self.image, buffer, starts, lengths, own, draws, name=str)
        for index, error in failures:
            number = int(images.number[few][index])
            columns.note_bad(part.chunk_row(int(rows[index])), self.name, _of_image(error, number))
        if not follow:
            out[target] = own


@dataclass(frozen=True, kw_only=True)
class FreeImageListOutput(Output):
    """Images of their own sizes: a list of lists of tensors a batch."""

    kind: ClassVar[str] = "lists of images"
    is_decoded: ClassVar[bool] = True
    releases_gil: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = ""

    image: Image

    def description(self) -> str:
        """Kind, dtype and settings."""
        return f"{super().description()} {self.image}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: how large a batch's slot is, the images' headers say."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded batch by batch. Those of a batch share a slot."""
        columns.note_missing(self.name)
        stored = columns.stored_values(self.name)
        first, batch, specs = 0, list[list[StoredValue]](), list[list[Image | None]]()

        def ahead(size: int) -> int:
            nonlocal first, batch, specs
            batch = [_items(value) for value in stored[first : first + size]]
            first += size
            specs = [
                [
                    self._each(columns, item, number, lambda data, row: of_own_size(self.image, data))
                    for number, item in enumerate(items)
                ]
                for items in batch
            ]
            return rounded_bytes(sum(map(image_bytes, specs)))

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for _ in sizes:
                yield self._decode(columns, batch, specs)

        return BuiltColumn(split=values, ahead=ahead)

    def _each(self, columns: ChunkColumns, item: StoredValue, number: int, decode: Callable[..., Any]) -> Any:
        """What `decode` makes of an image; None where it is bad, which is noted."""

        def named(data: NDArray[np.uint8], row: int) -> Any:
            try:
                return decode(data, row)
            except SampleError as error:
                raise _of_image(error, number) from error.__cause__

        return columns.decoded(self.name, item, named)

    def _decode(
        self,
        columns: ChunkColumns,
        batch: Sequence[Sequence[StoredValue]],
        specs: Sequence[Sequence[Image | None]],
    ) -> list[list[Tensor | None]]:
        """The images of a batch."""
        slot = columns.slot_of_batch(sum(map(image_bytes, specs))).view(self.dtype)
        used, samples = 0, list[list[Tensor | None]]()
        for items, own in zip(batch, specs, strict=True):
            samples.append([])
            for number, (item, spec) in enumerate(zip(items, own, strict=True)):
                image = None
                if spec is not None:
                    out = slot[used : used + math.prod(spec.shape)].reshape(spec.shape)
                    used += out.size
                    decode = partial(decode_into, out, columns, spec, np.array([number]))
                    image = self._each(columns, item, number, decode)
                samples[-1].append(image)
        return samples


def _lists(part: WindowPart, column: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Memory that holds the lists of a part, where each begins, and which rows of the part have one."""
    spans = part.spans(column)
    have = np.flatnonzero(spans.lengths[part.rows] >= 0)
    buffer, starts = part.window.buffer_of(spans, part.rows[have], column)
    return buffer, starts, have


def _images_of(part: WindowPart, column: str, offsets: NDArray[np.int64]) -> _PartImages:
    """The images of a part; `offsets`: of the rows of the chunk among all images."""
    buffer, list_starts, have = _lists(part, column)
    counts, starts, lengths = list_items(buffer, list_starts)
    row = np.repeat(have, counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk_rows = np.arange(len(offsets) - 1)[part.chunk_rows]
    places = StagedSpans(starts + buffer.__array_interface__["data"][0], lengths, [buffer])
    return _PartImages(part, row, number, places, offsets[chunk_rows[row]] + number)


def _items(value: StoredValue | None) -> list[StoredValue]:
    """The images of a stored list; none where it is missing, which is noted."""
    if value is None:
        return []
    data, row = value
    _, starts, lengths = list_items(data, _FIRST)
    items = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [(data[start : start + length], row) for start, length in items]


def _split(out: NDArray[Any], offsets: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[Ragged]:
    """The images of each batch; offsets count from the batch's own first image."""
    row = 0
    for size in sizes:
        own = offsets[row : row + size + 1]
        yield Ragged(torch.from_numpy(out[int(own[0]) : int(own[-1])]), torch.from_numpy(own - own[0]))
        row += size


def _of_image(error: Exception, number: int) -> SampleError:
    """The error of one image of a sample."""
    reason = error.reason if isinstance(error, SampleError) else str(error)
    named = SampleError("", f"image {number}: {reason}", stage="decode")
    named.__cause__ = error.__cause__
    return named
