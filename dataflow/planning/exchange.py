"""The exchange between ranks of samples that they have made: of lengths, then of the samples themselves.

All ranks of the job take part, in a gloo group of their own: what is exchanged lies in host memory, and the
job's own group is the training code's. Each exchange is made by the thread that asks for batches, before a
batch whose number is the same on all ranks: so ranks that stop at the same batch have exchanged the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dataflow.batch.measured import MeasuredSamples
from sharding.errors import DataflowError
from sharding.spans import Ints


class NotHeldError(Exception):
    """Says to the loader that samples which wait to be planned do not fit its limit, or another rank's."""


class LengthExchange:
    """The exchange between the ranks of one loader. Making it is a collective, as every method is.

    Args:
        shard_index: this rank's in the plan; those of a replica group share one, and get the same samples.
        timeout_s: how long it waits for other ranks.

    Raises `DataflowError`, here and later, where ranks do not come in time.
    """

    def __init__(self, shard_index: int, timeout_s: float) -> None:
        self._rank = dist.get_rank()
        with _named_failures():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            shard_indices = self._gathered(shard_index)
        # Finders are numbered by shard index, so that they read what they will mostly be asked for by lanes.
        self._ranks = sorted(range(len(shard_indices)), key=lambda rank: (shard_indices[rank], rank))
        self.shard_indices = [shard_indices[rank] for rank in self._ranks]
        """The shard index of each producer."""
        self.producer = self._ranks.index(self._rank)
        """The number of this rank among the producers."""

    @property
    def num_producers(self) -> int:
        """All ranks of the job."""
        return len(self._ranks)

    def agreed(self, text: str) -> bool:
        """Return whether all ranks say the same."""
        with _named_failures():
            return len({*self._gathered(text)}) == 1

    def lengths(self, own: Ints | Exception) -> list[Ints]:
        """The lengths that each producer has measured; an error ends the loop on all ranks.

        Raises the own error, `DataflowError` for that of another rank, `NotHeldError` where that is all.
        """
        failure = f"{type(own).__name__}: {own}" if isinstance(own, Exception) else ""
        message = None if isinstance(own, NotHeldError) else failure or own
        with _named_failures():
            gathered = self._gathered(message)
        if isinstance(own, Exception) and not isinstance(own, NotHeldError):
            raise own
        for rank, other in enumerate(gathered):
            if isinstance(other, str):
                raise DataflowError(f"rank {rank} could not make its samples: {other}")
        if any(other is None for other in gathered):  # all ranks make samples twice, from the same batch on
            raise NotHeldError
        return [gathered[rank] for rank in self._ranks]

    def samples(self, for_makers: Sequence[MeasuredSamples]) -> list[MeasuredSamples]:
        """Give each producer what is for it; what all have for this one."""
        local_samples = for_makers[self.producer]
        parcels = [b""] * self.num_producers
        for rank, samples in zip(self._ranks, for_makers, strict=True):
            if rank != self._rank and len(samples):
                parcels[rank] = pickle.dumps(samples, protocol=5)
        sizes = [len(parcel) for parcel in parcels]
        with _named_failures():
            incoming = torch.empty(self.num_producers, dtype=torch.int64)
            dist.all_to_all_single(incoming, torch.tensor(sizes), group=self._group)
            sizes_in = [int(size) for size in incoming]
            received = torch.empty(sum(sizes_in), dtype=torch.uint8)
            sent = torch.frombuffer(bytearray(b"".join(parcels) or b"\0"), dtype=torch.uint8)[: sum(sizes)]
            dist.all_to_all_single(received, sent, sizes_in, sizes, group=self._group)
        parts = [part.numpy() for part in received.split(sizes_in)]
        # What other ranks of this job have pickled: nothing here was read from a dataset as it is.
        return [local_samples, *(pickle.loads(part.data) for part in parts if len(part))]

    def _gathered(self, message: Any) -> list[Any]:
        every = [message] * dist.get_world_size()
        dist.all_gather_object(every, message, self._group)
        return every


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DataflowError(
            "the ranks could not exchange the lengths of their samples: all of them must make the loader, "
            "and take equally many batches of it"
        ) from error
