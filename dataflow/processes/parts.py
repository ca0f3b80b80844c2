"""The samples of a slow batch, made by several processes, as threads do (`dataflow.batch.sharing`).

A process makes those of some rows, a *part*, and what it made goes by the training process to the one that
makes the batch. That one makes what a part left out: samples that fail, or that a pickle might change. Where
samples take no time, or are large, each process builds batches of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from dataflow.batch.builder import BatchBuilder, BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.batch.samples import drop_rows, samples_of
from dataflow.batch.sharing import Finishing
from dataflow.outputs.columns import ChunkRows
from prefetch.errors import EngineClosedError
from prefetch.ipc.payload import pack
from prefetch.memory.open_files import StaleFileError
from prefetch.work import PartialChunk
from sharding.errors import SampleError

SAMPLE_S = 0.02
"""Seconds that a sample takes at least where several processes make those of a batch."""
_MOST_RATE = 20e6
"""Bytes of samples that a process makes in a second, at most: each is copied four times."""
_PARTS = 4
"""Parts of a batch for each builder: the batch is made by one that may be at another part."""
_FORGETS = 4
"""The mean of what samples take moves by such a part with each batch or part."""
_DEEPEST = 8
_ATOMS = (type(None), bool, int, float, complex)


def plain_bytes(value: Any, depth: int = _DEEPEST) -> float:
    """Return the bytes of tensors, arrays and texts in a value; infinite if a pickle might change it."""
    kind = type(value)
    if kind is torch.Tensor:
        is_plain = value.layout is torch.strided and value.is_cpu and not (value.is_conj() or value.is_neg())
        odd = value.requires_grad or value.is_quantized or value.is_nested or value.__dict__
        return value.nbytes if is_plain and not odd else math.inf
    if kind is np.ndarray:
        odd = value.dtype.hasobject or value.dtype.metadata or min(value.strides, default=0) < 0
        return math.inf if odd else value.nbytes
    if kind in (str, bytes):
        return len(value)
    if kind in (dict, list, tuple) and depth:
        parts = [*value, *value.values()] if kind is dict else value
        return sum(plain_bytes(part, depth - 1) for part in parts)
    is_atom = kind in _ATOMS or issubclass(kind, np.number | np.bool_)
    return 0 if is_atom else math.inf


def sharing_s(sample: Any, sample_s: float) -> float:
    """Return the seconds that a sample took, if others may make such samples; 0: they may not."""
    return sample_s if sample_s >= SAMPLE_S / 2 and plain_bytes(sample) <= _MOST_RATE * sample_s else 0.0


class MadePart(NamedTuple):
    """Samples that a builder made of a part."""

    memory: NDArray[np.uint8] | None
    """The samples, packed; None: who makes the batch makes them, and shows why."""
    layout: tuple[int, int, int]
    """The layout that `unpack` needs."""
    sample_s: float
    """See `sharing_s`."""
    build_s: float
    cpu_s: float = 0.0


class _PartBuilder(BatchBuilder):
    """A chunk that is one batch, of whose samples some are made; the batch is never finished."""

    def delivered(self, number: int, batch: dict[str, Any], row: int, size: int) -> Finishing[Delivered]:
        """Stand still where the batch would be finished, with its columns."""
        self._values = batch
        yield PartialChunk()
        raise AssertionError

    def begun(self) -> Generator[PartialChunk[Delivered]]:
        """Come to where samples are made, which go when what is returned does."""
        for decode in self.begin():
            decode()
        finishing = self.finish()
        while next(finishing).slot_bytes:  # told before the batch
            pass
        return finishing

    def samples(self, rows: range) -> dict[int, Any]:
        """Samples by row of the chunk, but for those that fail, are odd, or that no pickle may carry."""
        assert self.columns is not None
        keep = np.array([row for row in rows if row not in self.columns.bad], np.int64)
        batch_samples = samples_of(drop_rows(self._values, keep), self.settings.outputs, len(keep))
        samples = dict[int, Any]()
        for index, (row, origin) in enumerate(zip(keep.tolist(), self.rows.find_all(keep), strict=True)):
            sample, reason, _ = self._one(batch_samples, index, *origin, row)
            if not reason and math.isfinite(plain_bytes(sample)):
                samples[row] = sample
        for row, _, _ in self.columns.remarks:  # who makes the batch counts them
            samples.pop(row, None)
        return samples


class PartMaker:
    """Makes samples of chunks that are one batch each, for whoever makes that.

    `rows_of` gives the rows of a chunk, as `ChunkInputs.rows`.
    """

    def __init__(self, context: BuildContext, rows_of: Callable[..., ChunkRows]) -> None:
        # Whether a sample is left out decides who makes the batch.
        self._context, self._rows_of = structs.replace(context, on_bad=lambda error: True), rows_of
        self._begun: tuple[int, _PartBuilder, object] | None = None
        """The number of the chunk that it is at."""

    def forget(self) -> None:
        """Let go of the chunk that it is at."""
        self._begun = None

    def make(self, number: int, chunk: Any, rows: range, *where: Any) -> MadePart:
        """Make some samples of a chunk. Raises only what ends the builder or the way there."""
        began_s = self._context.now()
        try:
            if self._begun is None or self._begun[0] != number:
                self.forget()
                chunk_rows = self._rows_of(number, _no_error, chunk, *where)
                builder = _PartBuilder(self._context, chunk.plan, chunk_rows)
                self._begun = number, builder, builder.begun()
            samples = self._begun[1].samples(rows)
            build_s = self._context.now() - began_s
            packed = pack(samples, by_value=False)
            memory = self._context.arena.lease(packed.nbytes)
            packed.copy_to(memory.__array_interface__["data"][0])
        except (EngineClosedError, StaleFileError):
            raise
        except Exception:  # who makes the batch gets it, too, and says of which sample
            self.forget()
            return MadePart(None, (0, 0, 0), 0.0, 0.0)
        sample_s = sharing_s(next(iter(samples.values())), build_s / len(rows)) if samples else 0.0
        return MadePart(memory[: packed.nbytes], packed.layout, sample_s, build_s)


def _no_error(row: int, reason: str, column: str | None, stage: str) -> SampleError:
    """An error of a sample that nobody sees: who makes the batch finds the same, and names it."""
    return SampleError("", reason, stage=stage)


class Sharing:
    """Decides into how many parts a batch goes, by what samples took. Used by one thread."""

    def __init__(self) -> None:
        self._sample_s: float | None = None
        self._is_on = False

    def note(self, sample_s: float) -> None:
        """Samples of a batch or of a part took so long each; 0: they are not shared."""
        before_s = sample_s if self._sample_s is None else self._sample_s
        self._sample_s = before_s + (sample_s - before_s) / _FORGETS
        self._is_on = self._sample_s >= (SAMPLE_S / 2 if self._is_on else SAMPLE_S)

    def parts(self, num_rows: int, num_builders: int) -> list[range]:
        """The rows of each part of a batch; none: one builder makes it all."""
        if not self._is_on or num_builders < 2 or num_rows < 2:
            return []
        size = math.ceil(num_rows / (_PARTS * num_builders))
        return [range(num_rows)[first : first + size] for first in range(0, num_rows, size)]
