"""Columns of encoded images: how they are decoded, and how those of a batch share a slot."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.image import Image, decode_image, decode_images, of_own_size
from dataflow.decode.values import Draws, check_fits
from dataflow.outputs.columns import ChunkColumns
from dataflow.outputs.decoded import DecodedOutput, Failures, NoteWarning
from dataflow.outputs.output import BuiltColumn, split_list
from prefetch.memory.arena import rounded_bytes
from sharding.spans import Bytes

_LEAST_PART, _MOST_PART = 8, 32
"""Images decoded by one task: their Python costs as much for 8 as for 16."""
_NO_SLOT = np.empty(0, np.uint8)


def image_output(name: str, sources: tuple[str, ...], rule: Image, **what: Any) -> ImageOutput:
    """The output of a rule for images; `what`: of lists of them, as fields of `DecodedOutput`."""
    shape = () if rule.size is None else rule.shape
    return ImageOutput(name=name, sources=sources, dtype=rule.dtype, shape=shape, image=rule, **what)


@dataclass(frozen=True, kw_only=True)
class ImageOutput(DecodedOutput):
    """Images of one size, or each of its own."""

    kinds: ClassVar[tuple[str, str, str, str]] = ("image", "images", "image lists", "lists of images")
    instead: ClassVar[str] = "None in a list of images; Image(size=...) has room for one"
    releases_gil: ClassVar[bool] = True

    image: Image

    @property
    def is_sized(self) -> bool:
        """See `DecodedOutput`."""
        return self.image.size is not None

    @property
    def is_random(self) -> bool:
        """See `DecodedOutput`."""
        return self.image.random

    @property
    def one_shape_cure(self) -> str:
        """See `Output`."""
        return "" if self.is_sized or self.is_list else "Image(size=...)} makes them one size"

    @property
    def missing_cure(self) -> str:
        """See `Output`."""
        if self.is_list:
            return super().missing_cure
        return "Optional(Image(...), mask=True)" if self.is_sized else "Optional(Image(...))"

    def description(self) -> str:
        """Kind, dtype, shape and settings."""
        return f"{super().description()} {self.image}"

    def part_size(self, num_values: int) -> int:
        """Images that a task decodes: two tasks a core, so that all share a batch and end together."""
        return min(max(num_values // (2 * len(os.sched_getaffinity(0))), _LEAST_PART), _MOST_PART)

    def decode_few(
        self,
        columns: ChunkColumns,
        encoded: Sequence[Bytes],
        out: Sequence[NDArray[Any]],
        draws: Draws | None,
        remark: NoteWarning,
    ) -> Failures:
        """See `DecodedOutput`."""
        return decode_images(self.image, encoded, out, draws, remark=remark)

    def build_free(self, columns: ChunkColumns) -> BuiltColumn:
        """Images decoded batch by batch. Those of a batch share a slot."""
        images = _ImagesOfOwnSize(self, columns)
        return BuiltColumn(split=images.values, ahead=images.ahead, each=images.each)


class _ImagesOfOwnSize:
    """The images of a chunk, whose headers say how large a batch's slot is."""

    def __init__(self, output: ImageOutput, columns: ChunkColumns) -> None:
        self._output, self._columns, self._stored = output, columns, output.stored(columns)
        self._num_sized = 0
        """Rows whose headers were read."""
        self._specs = deque[Image | None]()
        """The sizes of the batch's images to come; None of a bad one."""
        self._slot_bytes = 0
        self._slot = _NO_SLOT
        """The slot that they go to."""

    def ahead(self, size: int) -> int:
        """Read the headers of the next batch's images; gives the bytes of its slot."""
        output, first = self._output, self._num_sized
        self._num_sized += size
        for stored in self._stored[first : self._num_sized]:
            specs = output.made(self._columns, stored, _Sizes(output, self._columns).sized)
            if output.is_list:
                self._specs += specs
            elif stored is not None:
                self._specs.append(specs)
        self._slot_bytes = sum(map(_bytes_of, self._specs))
        return rounded_bytes(self._slot_bytes)

    def values(self, sizes: Sequence[int]) -> Iterator[list[Any]]:
        """The images of each batch, whose headers were read before."""
        for batch in split_list(self._stored, sizes):
            yield self._decode(batch)  # no name for it here: its slot is given back when it dies

    def each(self, row: int) -> Any:
        """The images of a row, decoded into memory of their own."""
        sizes = _Sizes(self._output, self._columns)

        def decode(data: Bytes, row: int, number: int = 0) -> Tensor:
            spec = sizes.sized(data, row, number)
            return self._decoded(spec, np.empty(spec.shape, spec.dtype), data, row, number)

        return self._output.made(self._columns, self._stored[row], decode)

    def _decode(self, batch: Sequence[Any]) -> list[Any]:
        self._slot = self._columns.slot_of_batch(self._slot_bytes)
        images = [self._output.made(self._columns, stored, self._next) for stored in batch]
        self._slot = _NO_SLOT
        return images

    def _next(self, data: Bytes, row: int, number: int = 0) -> Tensor | None:
        spec = self._specs.popleft()
        if spec is None:
            return None
        nbytes = _bytes_of(spec)
        memory, self._slot = self._slot[:nbytes], self._slot[nbytes:]
        return self._decoded(spec, memory.view(spec.dtype).reshape(spec.shape), data, row, number)

    def _decoded(self, spec: Image, out: NDArray[Any], data: Bytes, row: int, number: int) -> Tensor:
        columns, name = self._columns, self._output.name
        draws = self._output.draws(columns, row, number)

        def remark(_: int, text: str) -> None:
            columns.remark(row, name, text)

        return torch.from_numpy(decode_image(spec, data, draws, out=out, remark=remark))


class _Sizes:
    """The sizes of one sample's images, which have to fit together."""

    def __init__(self, output: ImageOutput, columns: ChunkColumns) -> None:
        self._image, self._columns, self._used_bytes = output.image, columns, 0

    def sized(self, data: Bytes, row: int, number: int = 0) -> Image:
        """An image's own size. Raises `MemoryLimitError` if its sample cannot fit."""
        spec = of_own_size(self._image, data)
        used_bytes = self._used_bytes + _bytes_of(spec)
        check_fits(used_bytes, self._columns.sample_bytes)
        self._used_bytes = used_bytes
        return spec


def _bytes_of(spec: Image | None) -> int:
    """Bytes of an image with a size."""
    return 0 if spec is None else math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
