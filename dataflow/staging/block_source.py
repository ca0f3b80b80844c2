"""A dataset resolved for reading: what to read, with what, into what; and how many bytes were moved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataflow.staging.columns import StagedOutput
from dataflow.staging.locator import ValueLocator
from prefetch.counts import NO_FAULTS, ReadStats
from prefetch.memory.mapping import Mappings, can_map
from prefetch.store.reader import StoreReader
from sharding.blocks import Block, Format, Shard
from sharding.cached_property import cached_property
from sharding.catalog.table import Catalog
from sharding.errors import ShardChangedError, ShardReadError
from sharding.printable import printable
from sharding.spans import Bytes, Ints

if TYPE_CHECKING:
    from dataflow.decode.rules import ReadBytes
    from prefetch.control.gate import ReadGate
    from prefetch.control.pause import ReadPause
    from prefetch.memory.arena import Arena
    from prefetch.store.ranges import Awaited
    from sharding.catalog.reading import ColumnReader


_log = logging.getLogger("dataflow")
SOURCE_SHIFT = 44  # 2**44 samples a source


class Traffic:
    """Bytes moved so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self.read_bytes = 0
        self.decoded_bytes = 0
        self.faults = NO_FAULTS
        """Faults of readers elsewhere; those here count theirs."""

    def add(self, read_bytes: int, decoded_bytes: int, faults: ReadStats = NO_FAULTS) -> None:
        """Count one block, or what was read elsewhere."""
        with self._lock:
            self.read_bytes += read_bytes
            self.decoded_bytes += decoded_bytes
            if faults is not NO_FAULTS:
                self.faults += faults

    def take(self) -> tuple[int, int]:
        """Bytes read and decoded since the last call, for another account."""
        with self._lock:
            taken = self.read_bytes, self.decoded_bytes
            self.read_bytes = self.decoded_bytes = 0
        return taken


class SourceCache(Struct, frozen=True):
    """A cache as one source sees it. Thread-safe."""

    begins: Callable[[int, int], None]
    """`SourceUse.begins`: a window of an epoch is going to be read; one thread at a time. Cheap."""
    read_into: Callable[..., None]
    """The method `BlockCache.read_into`, which reads through the cache."""


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """A dataset resolved for reading: what to read, with what, into what."""

    catalog: Catalog
    format: Format
    reader: StoreReader
    outputs: Sequence[StagedOutput]
    mappings: Mappings = field(default_factory=Mappings, compare=False)
    traffic: Traffic = field(default_factory=Traffic)
    gate: ReadGate | None = field(default=None, compare=False)
    """Says how many reads may run; None: as many as there are threads."""
    pause: ReadPause | None = field(default=None, compare=False)
    """Asks reads to wait for gradients; None: never."""
    cache: SourceCache | None = field(default=None, compare=False)
    all_columns: bool = False
    """True if every column was asked for, so that one of a type we cannot deliver is an error."""
    number: int = 0
    """Index of it among a mixture's sources."""
    matches: Sequence[SourceBeside] = ()
    """Datasets that are joined to it."""
    reads_whole: bool = False
    """True if values are read whole where parts would do: what joined samples draw is not known then."""
    may_map: bool = True
    """True if local files are mapped where that saves a copy."""
    file_indexes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Indexes of other files that outputs keep while it is read; see `StagedOutput.cut`."""
    _readers: dict[tuple[str, ...], ColumnReader] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _locates: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def locator(self) -> ValueLocator:
        """Return where values lie in the stored bytes, where the format can tell."""
        return ValueLocator(self.catalog, self.format, self.columns)

    def read_into(
        self,
        shard: Shard,
        offset: int,
        out: Bytes,
        *,
        checksum: int | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        """Do what `StoreReader.read_into` does: from the cache, or when the gate says so."""

        def fetch() -> None:
            pause = nullcontext() if self.pause is None else self.pause.read()
            with pause, nullcontext() if self.gate is None else self.gate.read(out.nbytes):
                try:
                    self.reader.read_into(shard, offset, out, checksum=checksum, awaited=awaited)
                except (ShardReadError, ShardChangedError) as error:
                    is_gone = isinstance(error, ShardChangedError) or error.reason.startswith("no such file")
                    if self.format.if_changed and is_gone:
                        error.add_note(self.format.if_changed)
                    raise

        if self.cache is None:
            fetch()
        else:
            self.cache.read_into(shard, offset, out, fetch, checksum=checksum)

    @cached_property
    def clips(self) -> list[StagedOutput]:
        """The outputs whose values are cut out of other files."""
        return [output for output in self.outputs if output.clip_bytes is not None]

    def reading(self, shard: Shard, *, awaited: Awaited | None, first: int = 0) -> ReadBytes:
        """Return what reads, and counts, bytes of a shard from its byte `first` on."""

        def read(offset: int, nbytes: int) -> Bytes:
            out = np.empty(nbytes, np.uint8)
            self.read_into(shard, first + offset, out, awaited=awaited)
            self.traffic.add(nbytes, 0)
            return out

        return read

    @cached_property
    def parts(self) -> list[StagedOutput]:
        """The outputs of whose long values only parts are read, where the format tells where values lie.

        None where a cache keeps blocks: it keeps them whole.
        """
        if self.cache or self.reads_whole:
            return []
        return [output for output in self.outputs if output.parts_rule is not None]

    @cached_property
    def whole_columns(self) -> set[str]:
        """Columns whose values are read whole by some output."""
        return {name for output in self.outputs if output not in self.parts for name in output.sources}

    @cached_property
    def columns(self) -> list[str]:
        """Dataset columns that the outputs need, "__url__" aside."""
        names = [s for output in self.outputs for s in output.sources if s != "__url__"]
        return list(dict.fromkeys(names))

    @cached_property
    def column_reader(self) -> ColumnReader:
        """Decodes those columns of whole blocks."""
        from sharding.catalog.reading import ColumnReader

        return ColumnReader(self.catalog, self.format, self.columns, with_all=self.all_columns)

    def reader_of(self, columns: Sequence[str]) -> ColumnReader:
        """Decodes these columns of whole blocks."""
        from sharding.catalog.reading import ColumnReader

        key = tuple(columns)
        if key not in self._readers:
            self._readers[key] = ColumnReader(self.catalog, self.format, key)
        return self._readers[key]

    def read_table(self, block: Block, columns: Sequence[str]) -> pa.Table:
        """Some columns of a block of a tabular format, as `ColumnReader.table`; only their bytes are read."""
        reader = self.reader_of(columns)
        return reader.table(block, reader.read(block, self.read_into))

    def read_block(self, block: Block) -> memoryview:
        """The stored bytes of a block, which are held to its checksum, where it has one."""
        data = np.empty(block.length, np.uint8)
        self.read_into(block.shard, block.offset, data, checksum=block.checksum)
        return data.data

    @property
    def first_number(self) -> int:
        """The number of its first sample: its random numbers depend on no other source's size."""
        return self.number << SOURCE_SHIFT

    @cached_property
    def _has_others(self) -> bool:
        return any(spec.kind == "other" for schema in self.catalog.schemas for spec in schema.values())

    def locates(self, blocks: Ints) -> bool:
        """Return whether values of all these blocks lie in the stored bytes: not so in compressed shards.

        Nor where a column is asked for that nothing delivers: whoever decodes the block says so.
        """
        if self.all_columns and self._has_others:
            return False
        shards, first = np.unique(self.catalog.blocks.shard[blocks], return_index=True)
        for shard, number in zip(shards.tolist(), blocks[first].tolist(), strict=True):
            if shard not in self._locates:
                spans = self.format.locate(self.catalog.block(number), self.columns)
                self._locates[shard] = spans is not None
        return all(map(self._locates.__getitem__, shards.tolist()))

    @cached_property
    def maps(self) -> bool:
        """Return whether windows may be mapped: local files whose values lie in the stored bytes.

        Blocks with checksums are read, because all their bytes must be seen before any is used; and so are
        values of which parts will do.
        """
        if not self.may_map or self.catalog.checksums is not None or self.parts:
            return False
        first = np.flatnonzero(self.catalog.blocks.num_samples)[:1]
        return can_map(self.catalog.shard(0).url) and self.locates(first)

    def blocks(self, numbers: Ints) -> list[Block]:
        """The blocks of these numbers."""
        return [self.catalog.block(number) for number in numbers.tolist()]


class StagerBeside(Protocol):
    """Opens what windows need of a dataset beside theirs. Thread-safe."""

    def joined(self, own: Any, rows: Ints, stagers: Sequence[Any]) -> Any:
        """A window, and what these stagers, of which this is one, bring for some rows; -1 is none."""
        ...


class SourceBeside(Protocol):
    """A dataset joined to another, whose samples bring its columns along."""

    @property
    def source(self) -> BlockSource:
        """Return what is read of it."""
        ...

    def shared(self, source: BlockSource, *, keeps: bool) -> SourceBeside:
        """Return it with a source that shares what all do; `keeps`: its blocks stay once they were read."""
        ...

    def stager(self, arena: Arena, *, num_readers: int = 1, keep_blocks: int = 0) -> StagerBeside:
        """Return what opens it; `keep_blocks`: so many of those that are decoded whole stay for later."""
        ...


def warn_of_wait(line: str) -> None:
    """Tell whoever waits for a sample: nobody else would say for what."""
    _log.warning("%s", printable(line))
