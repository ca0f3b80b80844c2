"""Columns of lists of encoded images: all images of a batch in one tensor, or each of its own size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.image import Image, decode_images
from dataflow.outputs.columns import ChunkColumns, ChunkRows, StoredValue
from dataflow.outputs.images import decode_alone, decode_into, image_bytes, part_size, sized
from dataflow.outputs.lists import ListOutput, PartItems, of_item
from dataflow.outputs.output import BuiltColumn
from dataflow.ragged import Ragged
from prefetch.memory.arena import rounded_bytes


@dataclass(frozen=True, kw_only=True)
class ImageListOutput(ListOutput):
    """Images of one size, any number of them a sample: a `Ragged` a batch, values [images, *image.shape]."""

    kind: ClassVar[str] = "image lists"
    is_view: ClassVar[bool] = True
    releases_gil: ClassVar[bool] = True

    image: Image
    mean_items: int = field(default=1, compare=False)
    """Images of a sample, about."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the images of one row, about: by it is decided how far ahead batches are made."""
        return self.mean_items * image_bytes([self.image])

    def description(self) -> str:
        """Kind, dtype, shape and settings."""
        return f"{super().description()} {self.image}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of all images, whose number the lists say."""
        return rounded_bytes(int(self.counts(rows).sum()) * image_bytes([self.image]))

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded straight into the slot, in parts of a few, whichever samples they belong to."""
        self.note_missing(columns)
        offsets = np.append(0, np.cumsum(self.counts(columns.rows)))
        total = int(offsets[-1])
        out = columns.slot(total * image_bytes([self.image])).view(self.dtype).reshape(total, *self.shape)
        most, tasks = part_size(total), list[Callable[[], None]]()
        for part in columns.rows.parts:
            items = self.items(part, offsets)
            for start in range(0, len(items.row), most):
                few = slice(start, min(start + most, len(items.row)))
                tasks.append(partial(self._decode, columns, items, few, out))
        return BuiltColumn(split=partial(_split, out, offsets), decodes=tasks)

    def _decode(self, columns: ChunkColumns, items: PartItems, few: slice, out: NDArray[Any]) -> None:
        """Decode a few images of a part into their places, and note those that cannot be."""
        part, rows, target = items.part, items.row[few], items.target[few]
        window, owners = part.window, part.rows[rows]
        draws = None
        if self.image.random:
            draws = columns.randomness.draws(window, owners, items.number[few])
        own = out[target[0] : target[-1] + 1]
        follow = len(own) == len(target)
        if not follow:  # images of other windows lie between
            own = np.empty_like(out[target])
        at, lengths = np.arange(few.start, few.stop), items.places.lengths[few]

        def remark(index: int, text: str) -> None:
            columns.remark(part.chunk_row(int(rows[index])), self.name, text)

        with window.values_of(items.places, at, self.name, owners) as (buffer, starts):
            failures = decode_images(self.image, buffer, starts, lengths, own, draws, name=str, remark=remark)
        for index, error in failures:
            named = of_item(error, int(items.number[few][index]))
            columns.note_bad(part.chunk_row(int(rows[index])), self.name, named)
        if not follow:
            out[target] = own


@dataclass(frozen=True, kw_only=True)
class FreeImageListOutput(ListOutput):
    """Images of their own sizes: a list of lists of tensors a batch."""

    kind: ClassVar[str] = "lists of images"
    releases_gil: ClassVar[bool] = True

    image: Image

    def description(self) -> str:
        """Kind, dtype and settings."""
        return f"{super().description()} {self.image}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: how large a batch's slot is, the images' headers say."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded batch by batch. Those of a batch share a slot."""
        self.note_missing(columns)
        stored = self.stored_items(columns)
        first, batch, specs = 0, list[list[StoredValue]](), list[list[Image | None]]()

        def ahead(size: int) -> int:
            nonlocal first, batch, specs
            batch = stored[first : first + size]
            first += size
            specs = [self._specs(columns, items) for items in batch]
            return rounded_bytes(sum(map(image_bytes, specs)))

        def each(row: int) -> list[Tensor | None]:
            used_bytes = 0

            def decode(number: int, data: NDArray[np.uint8], row: int) -> Tensor:
                nonlocal used_bytes
                image = decode_alone(columns, self.name, self.image, data, row, number, used_bytes)
                used_bytes += image.nbytes
                return image

            return self.each(columns, stored[row], decode)

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for _ in sizes:
                yield self._decode(columns, batch, specs)

        return BuiltColumn(split=values, ahead=ahead, each=each)

    def _specs(self, columns: ChunkColumns, items: Sequence[StoredValue]) -> list[Image | None]:
        """The sizes of a sample's images, by their headers."""
        used_bytes = 0

        def spec_of(number: int, data: NDArray[np.uint8], row: int) -> Image:
            nonlocal used_bytes
            spec = sized(self.image, data, columns, used_bytes)
            used_bytes += image_bytes([spec])
            return spec

        return self.each(columns, items, spec_of)

    def _decode(
        self,
        columns: ChunkColumns,
        batch: Sequence[Sequence[StoredValue]],
        specs: Sequence[Sequence[Image | None]],
    ) -> list[list[Tensor | None]]:
        """The images of a batch."""
        slot, used = columns.slot_of_batch(sum(map(image_bytes, specs))).view(self.dtype), 0
        samples = []
        for items, own in zip(batch, specs, strict=True):

            def decode(number: int, data: NDArray[np.uint8], row: int, own: Any = own) -> Tensor | None:
                nonlocal used
                spec = own[number]
                if spec is None:
                    return None
                out = slot[used : used + math.prod(spec.shape)].reshape(spec.shape)
                used += out.size
                return decode_into(out, columns, self.name, spec, np.array([number]), data, row)

            samples.append(self.each(columns, items, decode))
        return samples


def _split(out: NDArray[Any], offsets: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[Ragged]:
    """The images of each batch; offsets count from the batch's own first image."""
    row = 0
    for size in sizes:
        own = offsets[row : row + size + 1]
        yield Ragged(torch.from_numpy(out[int(own[0]) : int(own[-1])]), torch.from_numpy(own - own[0]))
        row += size
