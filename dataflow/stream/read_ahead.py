"""The read-ahead of a session: how far it reads and builds, all numbers in one value, each with its reason.

They follow from the memory limit, the size of a batch and whether shards are local, and are fixed for a
session. What moves while it runs starts here, and is moved by `prefetch.control`: the batches held ready
(`depth`) and the bytes in flight.

Windows (`sharding.plan.window_size`) and megabatches bound the read-ahead, too, but they are part of the
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
"""Samples that a thread makes at a time where lengths are measured: all share an awaited megabatch."""
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

    num_readers: Decision
    """Threads that read, at most."""
    max_windows: Decision
    """Windows that are open at a time."""
    batches_per_chunk: Decision
    """Batches built together at most, once the stream runs; fewer where they take long (`ChunkTime`)."""
    batches_per_job: Decision
    """Batches that lie in one slot, where batches are copies alone."""
    job_bytes: Decision
    """The bytes of these batches."""
    jobs_ready: Decision
    """Jobs of copies that lie ready at most, beside those that run."""
    depth: DepthPolicy
    """Batches held ready, as it goes; never fewer than three chunks."""
    output_bytes: Decision
    """Credits that windows leave free for batches."""
    mapped_bytes: Decision
    """Bytes of mapped files that no window uses and that stay mapped, of each source."""
    charge_bytes: Decision
    """Bytes that the user's functions may make before they are charged."""
    in_flight_bytes: Decision
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
    num_makers: int = 0,
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
        num_makers: builders that make samples whose lengths are to be measured.
        depth: the user's; None: four batches over local shards, else what waits and lead times ask for.
    """
    nbytes = min(CHUNK_BYTES, memory_limit // _CHUNKS_IN_LIMIT)
    batches = max(1, min(MAX_CHUNK_BATCHES, nbytes // batch_bytes))
    chunk = Decision(batches, f"{nbytes:,} bytes of batches of {batch_bytes:,}")
    if num_builders := num_processes or num_threads:
        part = memory_limit // (_BUILDER_CHUNKS_IN_LIMIT * num_builders)
        most = max(1, min(chunk.value, part // batch_bytes))
        chunk = Decision(most, f"{part:,} bytes a builder, or {chunk.reason}")
    if copies_only:
        batches = max(chunk.value, min(_COPIED_CHUNK_SAMPLES // batch_samples, _COPIED_CHUNK_BATCHES))
        chunk = Decision(batches, f"{_COPIED_CHUNK_SAMPLES:,} samples, or {chunk.reason}")
    elif in_consumer:
        chunk = Decision(1, "built when it is asked for")
    elif num_processes:
        most = min(chunk.value, -(-_PROCESS_CHUNK_SAMPLES // batch_samples))
        chunk = Decision(most, f"{_PROCESS_CHUNK_SAMPLES} samples a process, or {chunk.reason}")
    elif num_makers:
        batches = max(1, min(chunk.value, _FOUND_CHUNK_SAMPLES // batch_samples))
        chunk = Decision(batches, f"{_FOUND_CHUNK_SAMPLES} samples a builder, or {chunk.reason}")
    nbytes = min(_JOB_BYTES, memory_limit // _JOBS_IN_LIMIT)
    batches = min(chunk.value, max(1, nbytes // batch_bytes))
    job = Decision(batches, f"{nbytes:,} bytes of batches of {batch_bytes:,}, or one batch")
    ready = _jobs_ready(job.value * batch_bytes, memory_limit)
    # What a chunk is credited for.
    chunk_bytes = rounded_bytes((ready.value * job.value if copies_only else chunk.value) * batch_bytes)
    if is_local:
        readers = Decision(LOCAL_READERS, "local files are mapped, or read within milliseconds")
    else:
        readers = Decision(REMOTE_READERS, "the most; bytes in flight decide how many read at a time")
    if depth is None:
        # Local values are mapped or read within milliseconds: four batches never ran dry there.
        limit_bytes = memory_limit // 2
        depth = fixed_depth(_DEPTH) if is_local else AdaptiveDepth(start=_DEPTH, limit_bytes=limit_bytes)
    output_bytes = max(chunk_bytes, min(3 * chunk_bytes, memory_limit // 4))
    return ReadAhead(
        num_readers=readers,
        max_windows=Decision(
            WINDOWS_OPEN * num_sources, "one drained, one staged, one being read of each source"
        ),
        batches_per_chunk=chunk,
        batches_per_job=job,
        job_bytes=Decision(job.value * batch_bytes, job.reason),
        jobs_ready=ready,
        depth=_at_least(depth, chunks_ahead(max(num_builders, num_makers)) * chunk.value),
        output_bytes=Decision(output_bytes, "three chunks, in at most a quarter of the limit; at least one"),
        mapped_bytes=Decision(
            max(memory_limit, machine_bytes) // 4 // num_sources,
            "a quarter of the limit or of this rank's part of the machine, of all sources",
        ),
        charge_bytes=Decision(
            min(_CHARGE_BYTES, memory_limit // _CHARGES_IN_LIMIT), "1 MiB, or 1/256 of the limit if less"
        ),
        in_flight_bytes=start_in_flight(num_nodes),
    )


def start_in_flight(num_nodes: int) -> Decision:
    """Bytes that each node of a job has in flight at first."""
    if num_nodes == 1:
        return Decision(_START_IN_FLIGHT, "a node alone")
    return Decision(max(_LEAST_START, _START_TOGETHER // num_nodes), f"{num_nodes} nodes begin together")


def _jobs_ready(job_bytes: int, memory_limit: int) -> Decision:
    nbytes = min(max(_READY_BYTES, _JOBS_READY * job_bytes), memory_limit // _READY_IN_LIMIT)
    jobs = max(1, min(nbytes // job_bytes, _MOST_JOBS_READY))
    return Decision(
        jobs, f"{nbytes:,} bytes of jobs of {job_bytes:,}, at most {_MOST_JOBS_READY}, or one job"
    )


def _at_least(depth: DepthPolicy, batches: int) -> DepthPolicy:
    """A depth in whole chunks: fewer than three, or two a builder, would leave builders without work."""

    def raised(decision: Decision) -> Decision:
        if decision.value >= batches:
            return decision
        return Decision(batches, f"{decision.reason}; raised to as many as builders need")

    if isinstance(depth, FixedDepth):
        return FixedDepth(raised(depth.decision))
    return lambda seen: raised(depth(seen))
