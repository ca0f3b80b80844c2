"""Batches gathered from staged windows into slots of the arena.

A chunk is a few consecutive batches of one rank, built together: one slot, one gather and one split a
column, however many batches it holds; so the Python cost is paid per chunk. Every batch is a dict of
views of the chunk's slots, and a slot comes back when the last of its views dies.

Fixed-size rows are gathered by one `index_select` over a strided view of all memory between them (its rows
may overlap), ragged rows by one vectorised copy. Images are decoded straight into their
rows of the slot, in parts that run in parallel.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.gather import Take, gather, load, take_rows, widen
from dataflow.batch.held_bytes import Ranges
from dataflow.batch.samples import collate_objects
from dataflow.batch.splitting import Built, split_list, split_ragged, split_rows
from dataflow.decode.crop import Draws
from dataflow.decode.image import Image, decode_image, decode_images, of_own_size
from dataflow.decode.outputs import MISSING, Output
from dataflow.staging.columns import Grid, StagedArray, StagedSpans, lowest_bit
from dataflow.staging.window import StagedWindow
from prefetch.errors import EngineClosedError
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.iovec import copy_mapped, copy_spans
from sharding.errors import SampleError, ShardReadError
from sharding.order.keyed import uniform

Array = NDArray[Any]
_IMAGE_PART = 8
"""Images decoded by one task: small enough to share a batch among threads."""
_LOADED_BYTES = 32 << 10
"""Values of this size on average are loaded: that costs 1 us a value, the kernel more for its pages."""


@dataclass(frozen=True)
class Run:
    """The rows of a chunk that come from one window."""

    window: StagedWindow
    rows: NDArray[np.int64]
    """[n] rows of the window."""
    places: slice | NDArray[np.int64]
    """The rows of the chunk that they fill, ascending; a slice where they follow one another."""

    def place(self, at: int) -> int:
        """The row of the chunk that `rows[at]` fills."""
        return self.places.start + at if isinstance(self.places, slice) else int(self.places[at])

    def part(self, start: int, stop: int) -> Run:
        """Some of its rows."""
        if isinstance(self.places, slice):
            first, last = self.places.start + start, min(self.places.start + stop, self.places.stop)
            return Run(self.window, self.rows[start:stop], slice(first, last))
        return Run(self.window, self.rows[start:stop], self.places[start:stop])


@dataclass(frozen=True)
class Randomness:
    """What random augmentation is a function of, beside the sample."""

    seed: int
    epoch: int

    def epoch_of(self, window: StagedWindow) -> int:
        """The epoch that counts for samples of a window: a sample may come twice in one of a mixture."""
        return self.epoch if window.source_epoch is None else window.source_epoch


@dataclass(frozen=True)
class Cut:
    """Of some columns only pieces of the values are wanted, [rows] each; all in elements."""

    columns: Sequence[str]
    """The first is the one that the plan's lengths are of."""
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    whole: NDArray[np.int64]
    """The whole value's, as the plan knows it."""

    def apply(self, pieces: NDArray[np.int64], itemsize: int) -> NDArray[np.int64]:
        """Make pieces of whole values ([rows, 2] address and bytes), and tell the rows of another length."""
        wrong = np.flatnonzero(pieces[:, 1] != self.whole * itemsize)
        pieces[:, 0] += self.begin * itemsize
        pieces[:, 1] = self.length * itemsize
        pieces[wrong, 1] = 0
        return wrong


_Stored = tuple[NDArray[np.uint8], Run, int] | None
"""A row's stored bytes, its run and its place there; None where it has no value."""


class ColumnBuilder:
    """Builds the columns of one chunk. Used by one chunk; parts of it by several threads."""

    def __init__(
        self,
        arena: Arena,
        runs: Sequence[Run],
        num_rows: int,
        randomness: Randomness,
        on_return: Callable[[int], Callable[[], None]] | None,
        cut: Cut | None = None,
        *,
        may_load: bool,
        closing: threading.Event,
    ) -> None:
        """`may_load`: whether values of all windows may be touched where they lie, until `build` returns."""
        self._closing = closing
        self._may_load = may_load
        self._arena, self._runs, self._num_rows = arena, runs, num_rows
        self._randomness, self._cut = randomness, cut
        self._on_return = on_return
        self._lock = threading.Lock()  # guards bad
        self.bad: dict[int, SampleError] = {}
        """Row of the chunk -> what is wrong with it."""
        self.leased_bytes = 0
        """Of slots within the chunk's credits."""
        self.slots = Ranges()
        """All slots: what lies there has credits."""

    def build(self, output: Output) -> Built:
        """Gather one column, or prepare the parts that will."""
        cut = self._cut if self._cut is not None and output.name in self._cut.columns else None
        if cut is not None and output.kind in ("array", "spans"):
            wrong = np.flatnonzero(cut.whole != output.shape[0])
            self._note_lengths(cut, wrong, np.full(self._num_rows, output.shape[0]), output)
        if output.kind == "array":
            return self._array(output)
        self._note_missing(output)
        build = {
            "spans": self._spans,
            "ragged": self._ragged,
            "pad": self._ragged,
            "image": self._image,
            "images": self._free_images,
            "objects": self._objects,
        }[output.kind]
        return build(output)

    def slot(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the batch, given back when its last view dies."""
        return self._slot(max(1, nbytes))[:nbytes]

    def _slot(self, nbytes: int) -> NDArray[np.uint8]:
        self.leased_bytes += rounded_bytes(nbytes)
        return self._leased(nbytes)

    def _leased(self, nbytes: int) -> NDArray[np.uint8]:
        size = rounded_bytes(nbytes)
        slot = self._arena.lease(nbytes, self._on_return(size) if self._on_return else None)
        self.slots.add(slot.__array_interface__["data"][0], nbytes)
        return slot

    def _fixed_slot(self, output: Output) -> Array:
        nbytes = self._num_rows * output.row_bytes
        return self._slot(nbytes)[:nbytes].view(output.dtype).reshape(self._num_rows, *output.shape)

    def _note_bad(self, run: Run, at: int, output: Output, reason: str, cause: Exception | None) -> None:
        error = run.window.sample_error(int(run.rows[at]), reason, output.name)
        error.__cause__ = cause
        with self._lock:
            self.bad.setdefault(run.place(at), error)

    def _note_missing(self, output: Output) -> None:
        for run in self._runs:
            spans = _spans_of(run, output)
            if not spans.has_missing:
                continue
            lengths = spans.lengths[run.rows]
            for at in np.flatnonzero(lengths < 0).tolist():
                self._note_bad(run, at, output, MISSING, None)

    # ---- fixed rows ---------------------------------------------------------------------------------

    def _array(self, output: Output) -> Built:
        out = self._fixed_slot(output)
        for run in self._runs:
            staged = run.window.staged[output.name]
            assert isinstance(staged, StagedArray)
            self._into(run, out, partial(take_rows, staged.values, run.rows))
            if staged.bad:
                for at in np.flatnonzero(np.isin(run.rows, list(staged.bad))).tolist():
                    self._note_bad(run, at, output, staged.bad[int(run.rows[at])], None)
        return split_rows(out)

    def _spans(self, output: Output) -> Built:
        out = self._fixed_slot(output)
        take = self._take_of_all(output)
        if take is not None:
            self._fill(output, take, out)
            return split_rows(out)
        for run in self._runs:
            self._into(run, out, partial(self._fill, output, partial(_take_spans, run, output)))
        return split_rows(out)

    def _fill(self, output: Output, take: Take, out: Array) -> None:
        if output.source_dtype == output.dtype:
            take(0, len(out), out)
        else:
            widen(output, take, out)

    def _take_of_all(self, output: Output) -> Take | None:
        """How to take rows of any window in the order of the chunk; None: window by window."""
        staged = [_spans_of(run, output) for run in self._runs]
        if not all(spans.uniform_bytes == output.source_row_bytes for spans in staged):
            return None
        if self._may_load:
            return partial(gather, *self._joined_grid(staged, output.source_row_bytes))
        if not all(run.window.mapped for run in self._runs):
            return None
        pieces = np.empty((self._num_rows, 2), np.int64)
        for run, spans in zip(self._runs, staged, strict=True):
            pieces[run.places] = spans.pieces[run.rows]
        return partial(self._copy_rows, pieces, output)

    def _joined_grid(self, staged: Sequence[StagedSpans], row_bytes: int) -> tuple[Tensor, Tensor]:
        """One view of the memory of all windows, and which of its rows each row of the chunk is."""
        if len(staged) == 1:
            grid = staged[0].grid
            return grid.view, torch.from_numpy(grid.places[self._runs[0].rows])
        grids = [spans.grid for spans in staged]
        base = min(grid.base for grid in grids)
        step = lowest_bit(functools.reduce(int.__or__, (g.step | (g.base - base) for g in grids)))
        places = np.empty(self._num_rows, np.int64)
        for run, grid in zip(self._runs, grids, strict=True):
            places[run.places] = grid.places[run.rows] * (grid.step // step) + (grid.base - base) // step
        return Grid.of(base, step, places, row_bytes).view, torch.from_numpy(places)

    def _copy_rows(
        self, pieces: NDArray[np.int64], output: Output, start: int, stop: int, out: Array
    ) -> None:
        done = start + copy_mapped(
            pieces[start:stop], out.reshape(-1).view(np.uint8), output.source_row_bytes
        )
        if done < stop:
            raise self._truncated(done, output)

    def _into(self, run: Run, out: Array, fill: Callable[[Array], None]) -> None:
        """Let `fill` write the rows of a run: in place where they follow one another, else through a copy."""
        if isinstance(run.places, slice):
            fill(out[run.places])
            return
        nbytes = len(run.rows) * (out.nbytes // max(1, len(out)))
        part = self._arena.lease(nbytes or 1)[:nbytes].view(out.dtype).reshape(len(run.rows), *out.shape[1:])
        fill(part)
        out[run.places] = part

    # ---- variable rows --------------------------------------------------------------------------------

    def _ragged(self, output: Output) -> Built:
        pieces = np.empty((self._num_rows, 2), np.int64)
        for run in self._runs:
            pieces[run.places] = _spans_of(run, output).pieces[run.rows]
        if self._cut is not None and output.name in self._cut.columns:
            item = np.dtype(output.source_dtype).itemsize
            have = pieces[:, 1] // item
            self._note_lengths(self._cut, self._cut.apply(pieces, item), have, output)
        lengths = pieces[:, 1]
        nbytes = int(lengths.sum())
        out = self._slot(max(1, nbytes))[:nbytes]
        self._copy(pieces, out, output)
        values = torch.from_numpy(out.view(output.source_dtype))
        return Built(lambda sizes: split_ragged(values, lengths, sizes, output))

    def _note_lengths(
        self, cut: Cut, wrong: NDArray[np.int64], have: NDArray[np.int64], output: Output
    ) -> None:
        """Note the rows whose value is not as long as the plan says."""
        if not len(wrong):
            return
        lead = cut.columns[0]
        for run in self._runs:
            places = np.arange(self._num_rows)[run.places]
            for at in np.flatnonzero(np.isin(places, wrong)).tolist():
                row = int(places[at])
                if output.name == lead:  # where its length is wrong, its companions' only seem to be
                    self.bad.pop(row, None)
                source = "lengths= says" if output.name == lead else f"{lead!r} holds"
                reason = f"holds {have[row]} elements, but {source} {cut.whole[row]}"
                self._note_bad(run, at, output, reason, None)

    def _copy(self, pieces: NDArray[np.int64], out: NDArray[np.uint8], output: Output) -> None:
        """Copy the values of all rows, one after the other."""
        if self._may_load and out.nbytes >= _LOADED_BYTES * len(pieces):
            load(pieces[pieces[:, 1] > 0], out)
            return
        if not any(run.window.mapped for run in self._runs):
            copy_spans(pieces[:, 0], pieces[:, 1], out)
            return
        done = copy_mapped(pieces, out)
        if done < len(pieces):
            raise self._truncated(done, output)

    def _truncated(self, row: int, output: Output) -> ShardReadError:
        """The error of a row of the chunk whose bytes are gone."""
        for run in self._runs:
            places = np.arange(self._num_rows)[run.places]
            for at in np.flatnonzero(places == row).tolist():
                return run.window.truncated(int(run.rows[at]), output.name)
        raise AssertionError(f"row {row} is in no window")

    def _stored(self, output: Output) -> list[_Stored]:
        """The stored values of all rows."""
        stored: list[_Stored] = [None] * self._num_rows
        for run in self._runs:
            spans = _spans_of(run, output)
            buffer, starts = run.window.buffer_of(spans, run.rows, output.name)
            ends = starts + spans.lengths[run.rows]
            for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                if end >= start:
                    stored[run.place(at)] = buffer[start:end], run, at
        return stored

    def _made(self, output: Output, one: _Stored, make: Callable[[NDArray[np.uint8], Run, int], Any]) -> Any:
        """What `make` makes of a stored value; None where it is missing or bad, which is noted."""
        if one is None:
            return None
        raise_if_closing(self._closing)
        try:
            return make(*one)
        except Exception as error:
            self._note_bad(one[1], one[2], output, _reason(error), error)
            return None

    def _objects(self, output: Output) -> Built:
        """Python values, one by one: they are Python objects in the batch anyway."""
        convert, stored = output.convert, self._stored(output)
        assert convert is not None

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for part in split_list(stored, sizes):
                yield collate_objects(
                    [self._made(output, one, lambda data, *_: convert(data.tobytes())) for one in part]
                )

        return Built(values)

    # ---- images ---------------------------------------------------------------------------------------

    def _free_images(self, output: Output) -> Built:
        """Images of their own sizes. Those of a batch share a slot: how large it is, their headers say."""
        image, stored = cast(Image, output.image), self._stored(output)
        first, specs = 0, list[Image | None]()

        def ahead(size: int) -> int:
            nonlocal first, specs
            part = stored[first : first + size]
            first += size
            specs = [self._made(output, one, lambda data, *_: of_own_size(image, data)) for one in part]
            return rounded_bytes(_image_bytes(specs))

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for part in split_list(stored, sizes):
                yield self._images_of(output, part, specs)

        return Built(values, ahead=ahead)

    def _images_of(self, output: Output, part: Sequence[_Stored], specs: Sequence[Image | None]) -> Any:
        """The images of a batch: one tensor where all have one size, else a list."""
        nbytes = _image_bytes(specs)
        slot, place, images = self._leased(nbytes or 1), 0, list[Tensor | None]()
        for one, spec in zip(part, specs, strict=True):
            if spec is None:
                images.append(None)
                continue
            out = slot[place : place + math.prod(spec.shape)].reshape(spec.shape)
            place += out.nbytes

            def decode(
                data: NDArray[np.uint8], run: Run, at: int, spec: Image = spec, out: Array = out
            ) -> Tensor:
                draws = self._draws(output, run.window, run.rows[at : at + 1])
                return torch.from_numpy(decode_image(spec, data, draws, out=out))

            images.append(self._made(output, one, decode))
        shapes = {None if image is None else image.shape for image in images}
        if len(shapes) > 1 or None in shapes:
            return images
        shape = cast(Tensor, images[0]).shape
        return torch.from_numpy(slot[:nbytes].reshape(len(images), *shape))

    def _image(self, output: Output) -> Built:
        out = self._fixed_slot(output)
        parts: list[Callable[[], None]] = []
        for run in self._runs:
            for start in range(0, len(run.rows), _IMAGE_PART):
                part = run.part(start, start + _IMAGE_PART)
                decode = partial(self._decode_part, output, part)
                parts.append(partial(self._into, part, out, decode))
        built = split_rows(out)
        built.parts = parts
        return built

    def _decode_part(self, output: Output, run: Run, out: Array) -> None:
        assert output.image is not None
        spans = _spans_of(run, output)
        buffer, starts = run.window.buffer_of(spans, run.rows, output.name)
        lengths = spans.lengths[run.rows]
        have = np.flatnonzero(lengths >= 0)
        rows = run.rows
        if len(have) < len(lengths):
            whole, out = out, np.empty_like(out[have])
            starts, lengths, rows = starts[have], lengths[have], rows[have]
        draws = self._draws(output, run.window, rows)
        failed = decode_images(output.image, buffer, starts, lengths, out, draws, name=str)
        for at, error in failed:
            self._note_bad(run, int(have[at]), output, _reason(error), error)
        if len(have) < len(run.rows):
            whole[have] = out

    def _draws(self, output: Output, window: StagedWindow, rows: NDArray[np.int64]) -> Draws | None:
        assert output.image is not None
        if not output.image.random:
            return None
        samples = window.sample_numbers(rows)
        seed, epoch = self._randomness.seed, self._randomness.epoch_of(window)
        return lambda k: uniform(seed, epoch, samples, k)


def raise_if_closing(closing: threading.Event) -> None:
    """Raise `EngineClosedError` if nobody wants what is being built."""
    if closing.is_set():
        raise EngineClosedError("the loader was closed while the batch was built")


def _image_bytes(specs: Sequence[Image | None]) -> int:
    return sum(math.prod(spec.shape) for spec in specs if spec is not None)


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"


# ---- gathers, free functions: no state ----------------------------------------------------------------


def _spans_of(run: Run, output: Output) -> StagedSpans:
    staged = run.window.staged[output.name]
    assert isinstance(staged, StagedSpans)
    return staged


def _take_spans(whole: Run, output: Output, start: int, stop: int, out: Array) -> None:
    """Gather equally long spans, rows [start, stop) of a run, into `out` as they are stored."""
    run = whole.part(start, stop)
    out = out.reshape(-1).view(np.uint8).reshape(len(run.rows), -1)
    spans, row_bytes = _spans_of(run, output), output.source_row_bytes
    if spans.uniform_bytes == row_bytes:
        run.window.copy_values(spans, run.rows, out.reshape(-1), output.name)
        return
    lengths = spans.lengths[run.rows]
    wrong = np.flatnonzero((lengths >= 0) & (lengths != row_bytes))
    if len(wrong):
        reason = f"holds {lengths[wrong[0]]} bytes where every other sample holds {row_bytes}"
        raise run.window.sample_error(int(run.rows[wrong[0]]), reason, output.name)
    have = np.flatnonzero(lengths >= 0)  # the others are reported as bad rows
    if len(have) == len(lengths):
        run.window.copy_values(spans, run.rows, out.reshape(-1), output.name)
        return
    packed = np.empty((len(have), row_bytes), np.uint8)
    run.window.copy_values(spans, run.rows[have], packed.reshape(-1), output.name)
    out[have] = packed
