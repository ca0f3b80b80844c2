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
from prefetch.store.reader import Awaited, StoreReader
from sharding.blocks import Block, Format, Shard
from sharding.cached_property import cached_property
from sharding.catalog.table import Catalog

_SOURCE_SHIFT = 44  # 2**44 samples a source


class Traffic:
    """Bytes moved so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both counts
        self.read_bytes = 0
        self.decoded_bytes = 0

    def add(self, read_bytes: int, decoded_bytes: int) -> None:
        """Count one block."""
        with self._lock:
            self.read_bytes += read_bytes
            self.decoded_bytes += decoded_bytes


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
    def parts(self) -> list[StagedOutput]:
        """The outputs of whose long values only parts are read, where the format tells where values lie.

        None where a cache keeps blocks: it keeps them whole.
        """
        return [] if self.cache else [output for output in self.outputs if output.parts_rule is not None]

    @cached_property
    def whole_columns(self) -> set[str]:
        """Columns whose values are read whole by some output."""
        return {name for output in self.outputs if output not in self.parts for name in output.sources}

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
