"""The read-ahead of a session: how far it reads and builds, all numbers in one value.

They follow from the memory limit, the size of a batch and whether shards are local, and are fixed for a
session. What moves while it runs starts here, and is moved by `prefetch.control`: the batches held ready
(`depth`) and the bytes in flight.

Windows (`sharding.plan.window_size`) and packing windows bound the read-ahead, too, but they are part of the
order, and ranks of unlike machines must agree on it: they follow from the limit as the user gave it, never
from the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefetch.control.depth import AdaptiveDepth, Decision, DepthPolicy, FixedDepth, fixed_depth
from prefetch.engine.builds import chunks_ahead
from prefetch.memory.arena import rounded_bytes

CHUNK_BYTES = 8 << 20
"""Output of one chunk, once the stream runs: enough that its Python cost vanishes."""
_COPIED_CHUNK_SAMPLES, _COPIED_CHUNK_BATCHES = 1 << 14, 1 << 10
"""The same where batches are copies alone: nothing of it is held, and Python is all that it costs."""
_JOB_BYTES, _JOBS_IN_LIMIT = 2 << 20, 256
"""Output of one job of copies, and its part of the memory limit: some of them stay in a processor's cache."""
_JOBS_READY, _MOST_JOBS_READY, _READY_BYTES, _READY_IN_LIMIT = 4, 64, 32 << 20, 8
"""Jobs that lie ready: four to 64, in so many bytes and such a part of the limit, but one at least."""
_CHUNKS_IN_LIMIT = 32
"""A chunk is no more than this part of the memory limit."""
MAX_CHUNK_BATCHES = 128
HAND_OVER_S = 0.02
"""Seconds of building after which what is finished of a chunk is delivered: long for a delivery."""
_PROCESS_CHUNK_SAMPLES = 128
"""Samples that a process builds at a time, at least: the way there and back costs as much as a few."""
_BUILDER_CHUNKS_IN_LIMIT = 20
"""Chunks of each builder that fit the memory limit: it has two, finished ones wait behind one that takes
longer, and what a transform makes of them may be larger than what is stored."""
_FOUND_CHUNK_SAMPLES = 256
"""Samples that a thread makes at a time where lengths are measured: all share an awaited packing window."""
_CHARGE_BYTES = 1 << 20
_CHARGES_IN_LIMIT = 256
"""Parts of the memory limit in which what the user's functions made is charged, or batch by batch."""
WINDOWS_OPEN = 3
"""Windows a source: one drained, one staged, one being read."""
LOCAL_READERS, REMOTE_READERS = 2, 48
"""Threads that read, at most; how many read at a time is for the in-flight control to say."""
_START_IN_FLIGHT = 64 << 20
_START_TOGETHER = 16 << 20
"""Bytes of all nodes of a job. One that begins with too much delays its own second window only; several
delay each other's first batch (`benchmarks.lab.fair_share`)."""
_LEAST_START = 4 << 20
_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """The numbers of one session."""

    num_readers: int
    """Threads that read, at most: local files are mapped, or read within milliseconds; of remote ones, bytes
    in flight decide how many read at a time."""
    max_windows: int
    """Windows that are open at a time: of each source one drained, one staged, one being read."""
    batches_per_chunk: int
    """Batches built together at most, once the stream runs; fewer where they take long (`ChunkTime`)."""
    batches_per_job: int
    """Batches that lie in one slot, where batches are copies alone."""
    job_bytes: int
    """The bytes of these batches."""
    jobs_ready: int
    """Jobs of copies that lie ready at most, beside those that run."""
    depth: DepthPolicy
    """Batches held ready, as it goes; never fewer than three chunks."""
    output_bytes: int
    """Credits that windows leave free for batches: of three chunks, in at most a quarter of the limit, and of
    one at least."""
    mapped_bytes: int
    """Bytes of mapped files that no window uses and that stay mapped, of each source: of all together a
    quarter of the limit or of this rank's part of the machine."""
    charge_bytes: int
    """Bytes that the user's functions may make before they are charged."""
    in_flight_bytes: int
    """Bytes in flight at a store at first, of this node."""


def choose_read_ahead(
    memory_limit: int,
    *,
    batch_bytes: int,
    is_local: bool,
    num_sources: int = 1,
    num_nodes: int = 1,
    depth: DepthPolicy | None = None,
    copies_only: bool = False,
    num_processes: int = 0,
    num_threads: int = 0,
    batch_samples: int = 1,
    in_consumer: bool = False,
    machine_bytes: int = 0,
    num_producers: int = 0,
) -> ReadAhead:
    """The numbers of a session that may hold `memory_limit` bytes.

    Args:
        memory_limit: bytes.
        batch_bytes: of one batch, about.
        is_local: whether no shard is behind a network.
        num_sources: datasets that are mixed.
        num_nodes: nodes of the job, which may begin together.
        copies_only: whether nothing runs between the stored bytes and a batch.
        num_processes: that build, or may; each has a chunk of its own.
        num_threads: likewise.
        batch_samples: of one batch.
        in_consumer: whether each batch is built when it is asked for.
        machine_bytes: this rank's share of the machine's memory.
        num_producers: builders that make samples whose lengths are to be measured.
        depth: the user's; None: four batches over local shards, else what waits and lead times ask for.
    """
    chunk = max(1, min(MAX_CHUNK_BATCHES, min(CHUNK_BYTES, memory_limit // _CHUNKS_IN_LIMIT) // batch_bytes))
    if num_builders := num_processes or num_threads:
        each = memory_limit // (_BUILDER_CHUNKS_IN_LIMIT * num_builders)
        chunk = max(1, min(chunk, each // batch_bytes))
    if copies_only:
        chunk = max(chunk, min(_COPIED_CHUNK_SAMPLES // batch_samples, _COPIED_CHUNK_BATCHES))
    elif in_consumer:
        chunk = 1
    elif num_processes:
        chunk = min(chunk, -(-_PROCESS_CHUNK_SAMPLES // batch_samples))
    elif num_producers:
        chunk = max(1, min(chunk, _FOUND_CHUNK_SAMPLES // batch_samples))
    job = min(chunk, max(1, min(_JOB_BYTES, memory_limit // _JOBS_IN_LIMIT) // batch_bytes))
    job_bytes = job * batch_bytes
    ready_bytes = min(max(_READY_BYTES, _JOBS_READY * job_bytes), memory_limit // _READY_IN_LIMIT)
    jobs_ready = max(1, min(ready_bytes // job_bytes, _MOST_JOBS_READY))
    # What a chunk is credited for.
    chunk_bytes = rounded_bytes((jobs_ready * job if copies_only else chunk) * batch_bytes)
    if depth is None:
        # Local values are mapped or read within milliseconds: four batches never ran dry there.
        limit_bytes = memory_limit // 2
        depth = fixed_depth(_DEPTH) if is_local else AdaptiveDepth(start=_DEPTH, limit_bytes=limit_bytes)
    return ReadAhead(
        num_readers=LOCAL_READERS if is_local else REMOTE_READERS,
        max_windows=WINDOWS_OPEN * num_sources,
        batches_per_chunk=chunk,
        batches_per_job=job,
        job_bytes=job_bytes,
        jobs_ready=jobs_ready,
        depth=_at_least(depth, chunks_ahead(max(num_builders, num_producers)) * chunk),
        output_bytes=max(chunk_bytes, min(3 * chunk_bytes, memory_limit // 4)),
        mapped_bytes=max(memory_limit, machine_bytes) // 4 // num_sources,
        charge_bytes=min(_CHARGE_BYTES, memory_limit // _CHARGES_IN_LIMIT),
        in_flight_bytes=start_in_flight(num_nodes),
    )


def start_in_flight(num_nodes: int) -> int:
    """Bytes that each node of a job has in flight at first."""
    return _START_IN_FLIGHT if num_nodes == 1 else max(_LEAST_START, _START_TOGETHER // num_nodes)


def _at_least(depth: DepthPolicy, batches: int) -> DepthPolicy:
    """A depth in whole chunks: fewer than three, or two a builder, would leave builders without work."""

    def raised(decision: Decision) -> Decision:
        if decision.value >= batches:
            return decision
        return Decision(batches, f"{decision.reason}; raised to as many as builders need")

    if isinstance(depth, FixedDepth):
        return FixedDepth(raised(depth.decision))
    return lambda seen: raised(depth(seen))
