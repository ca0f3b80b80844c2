"""A dataset resolved for reading: what to read, with what, into what; and how many bytes were moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.columns import StagedOutput
from dataflow.staging.places import ValuePlaces
from prefetch.control.gate import ReadGate
from prefetch.control.pause import ReadPause
from prefetch.memory.mapping import Mappings
from prefetch.store.reader import NO_FAULTS, Awaited, ReadStats, StoreReader
from sharding.blocks import Block, Format, Shard
from sharding.cached_property import cached_property
from sharding.catalog.table import Catalog

_SOURCE_SHIFT = 44  # 2**44 samples a source


class Traffic:
    """Bytes moved so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self.read_bytes = 0
        self.decoded_bytes = 0
        self.faults = NO_FAULTS
        """Of readers elsewhere; those here count theirs."""

    def add(self, read_bytes: int, decoded_bytes: int, faults: ReadStats = NO_FAULTS) -> None:
        """Count one block, or what was read elsewhere."""
        with self._lock:
            self.read_bytes += read_bytes
            self.decoded_bytes += decoded_bytes
            self.faults += faults

    def take(self) -> tuple[int, int]:
        """Bytes read and decoded since the last call, for another account."""
        with self._lock:
            taken = self.read_bytes, self.decoded_bytes
            self.read_bytes = self.decoded_bytes = 0
        return taken


@dataclass(frozen=True)
class SourceCache:
    """A cache as one source sees it. Thread-safe."""

    begins: Callable[[int, int], None]
    """`SourceUse.begins`: a window of an epoch is going to be read; one thread at a time. Cheap."""
    read_into: Callable[..., None]
    """`BlockCache.read_into`."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset resolved for reading: what to read, with what, into what."""

    catalog: Catalog
    format: Format
    reader: StoreReader
    outputs: Sequence[StagedOutput]
    mappings: Mappings = field(compare=False)
    traffic: Traffic = field(default_factory=Traffic)
    gate: ReadGate | None = field(default=None, compare=False)
    """Says how many reads may run; None: as many as there are threads."""
    pause: ReadPause | None = field(default=None, compare=False)
    """Asks reads to wait for gradients; None: never."""
    cache: SourceCache | None = field(default=None, compare=False)
    all_columns: bool = False
    """Whether every column was asked for, so that one of a type we cannot deliver is an error."""
    number: int = 0
    """Which of a mixture's sources it is."""
    _locates: dict[str, bool] = field(default_factory=dict, compare=False)

    @cached_property
    def places(self) -> ValuePlaces:
        """Where values lie in the stored bytes, where the format can tell."""
        return ValuePlaces(self.catalog, self.format, self.columns)

    def read_into(
        self,
        shard: Shard,
        offset: int,
        out: NDArray[np.uint8],
        *,
        checksum: int | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        """What `StoreReader.read_into` does: from the cache, or when the gate says so."""

        def fetch() -> None:
            pause = nullcontext() if self.pause is None else self.pause.read()
            with pause, nullcontext() if self.gate is None else self.gate.read(out.nbytes):
                self.reader.read_into(shard, offset, out, checksum=checksum, awaited=awaited)

        if self.cache is None:
            fetch()
        else:
            self.cache.read_into(shard, offset, out, fetch, checksum=checksum)

    @cached_property
    def columns(self) -> list[str]:
        """Dataset columns that the outputs need, "__url__" aside."""
        names = [s for output in self.outputs for s in output.sources if s != "__url__"]
        return list(dict.fromkeys(names))

    @property
    def first_number(self) -> int:
        """What its samples are numbered from: their random numbers depend on no other source's size."""
        return self.number << _SOURCE_SHIFT

    def locates(self, block: Block) -> bool:
        """Whether values of this block's shard lie in the stored bytes: not so in compressed shards."""
        locates = self._locates.get(block.shard.url)
        if locates is None:
            locates = self.format.locate(block, self.columns) is not None
            self._locates[block.shard.url] = locates
        return locates
