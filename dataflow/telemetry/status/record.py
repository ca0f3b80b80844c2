"""The record that a training writes: what it runs, how far it is, its figures, and its last decisions.

It is JSON (msgspec's structs), behind a header with a sequence number and a checksum: whoever reads while it
is written sees that, and reads again. Readers leave out records of another `VERSION`.
"""

from __future__ import annotations

import zlib
from struct import Struct as Layout
from typing import Any, Literal

import msgspec

from dataflow.progress.observer import Role as Role

VERSION = 1
_MAGIC = b"dataflow"
_HEADER = Layout("<8sQII")
"""Magic, sequence number, bytes of the record, their checksum."""

PARTS = ("data", "peers", "compute", "exposed", "optimizer")
"""The parts of a window's time."""
COUNTS_OF_SCHEDULES = ("windows", "skipped_steps", "microbatches", "replays")
State = Literal["ready", "running", "ended", "failed", "closed"]
ProcessState = Literal["running", "ended", "died"]


class StatusDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that a loader or schedule took, and why."""

    at: float
    """Seconds since 1970 when it was first seen, to a second."""
    what: str
    """The figure that was decided on: "depth", "in_flight_limit", "window_blocks", "workers", "mode"."""
    value: Any
    """Its value from then on: a number or a text."""
    reason: str


class LoaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A loader of a training. Times are seconds since 1970."""

    name: str
    """The dataset's, or what `name=` says; unique among the loaders of its process."""
    role: Role
    state: State
    """"running": from a loop's begin to its end, or until it is left. With persistent workers one
    that is left by `break` stays "running" until the next. "failed": `error` says why."""
    rank: int
    world_size: int
    local_rank: int
    node: int
    epoch: int | None
    """The epoch of the loop begun last; None where that is not counted."""
    loop_batches: int
    """Batches handed out since that loop began."""
    loop_length: int | None
    """Batches that it has on this rank, which are fewer than an epoch's where a state was loaded; None: not
    known."""
    began_at: float
    """The time when the first loop began."""
    loop_began_at: float = 0.0
    """The time when the loop began last; 0: none did."""
    last_batch_at: float
    """The time when the last batch was handed out; 0: none was yet."""
    kind: str
    """The class of `stats`: "LoaderStats" or "WorkerStats"."""
    stats: dict[str, Any]
    """The value of `loader.stats().to_json()`; of "skipped" the last ten."""
    offset: dict[str, float]
    """By names of `stats().flat()`: what to add to counts, so that they go on where those of the training
    before this one (same name, role, rank and node) ended; a name that is not there: 0."""
    decisions: tuple[StatusDecision, ...] = ()
    """The last 16, the newest last."""
    error: str = ""


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `GradSchedule` of a training."""

    loader: str
    """The name of its loader; "": one that is not ours."""
    rank: int
    world_size: int
    node: int
    state: State
    strategy: str
    model: str
    """One of "plain", "DDP" and "FSDP2"."""
    windows: int
    """Windows that have ended."""
    steps: int
    """Optimizer steps."""
    skipped_steps: int
    """Windows without a step, as their gradient was not finite."""
    microbatches: int
    """Forward passes of this rank."""
    replays: int
    """Microbatches of weight zero among them, where ranks have different numbers."""
    seconds: dict[str, float]
    """Seconds of all windows by `PARTS`: "data" (waiting for the loader), "peers" (for the other
    ranks' counts), "compute", "exposed" (gradients on their way that nothing hides; slower ranks are in it; 0
    where it is not told apart from computing), "optimizer"."""
    window_s: float
    """Seconds of the last window."""
    totals: dict[str, float]
    """Weights of all windows over all ranks, by name: "microbatches", and those of `weights=`."""
    last_step_at: float
    """Seconds since 1970 when the last window ended; 0: none yet."""
    offset: dict[str, float] = {}
    """Numbers to add to `counts`, as for loaders; a name that is not there: 0."""
    decisions: tuple[StatusDecision, ...] = ()

    @property
    def counts(self) -> dict[str, float]:
        """The counts by name: "windows", ..., "part.data", ..., "weight.microbatches"."""
        counts = {name: float(getattr(self, name)) for name in COUNTS_OF_SCHEDULES}
        counts |= {f"part.{name}": value for name, value in self.seconds.items()}
        return counts | {f"weight.{name}": value for name, value in self.totals.items()}


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that trains: one page. Times are seconds since 1970."""

    version: int
    pid: int
    start_ticks: int
    """Clock ticks from the machine's start to the process's start: with `pid` they name one process."""
    boot_id: str
    """The kernel's id of this start of this machine."""
    host: str
    job: str
    """An id that the ranks of one job have in common."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    program: str
    """The name of the script, without arguments."""
    dataflow: str
    """The version of this package."""
    cores: float = 0.0
    """Cores of this rank: those that it may use, in equal parts where ranks share them; 0: not known."""
    began_at: float
    written_at: float
    state: ProcessState
    """"running"; "ended": it said so; "died": the process is gone without a word. Readers find that out."""
    error: str
    """The error that ended it, in one line; "": none."""
    endpoint: str = ""
    """The address at which its process, if it is the first of its node, serves metrics; "": none."""
    loaders: tuple[LoaderRecord, ...] = ()
    schedules: tuple[ScheduleRecord, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs and writes its page."""
        return self.state == "running"

    @property
    def last_batch_at(self) -> float:
        """The time of the last batch of any loader; 0: none yet."""
        return max((loader.last_batch_at for loader in self.loaders), default=0.0)


class _Versioned(msgspec.Struct):
    version: int


def to_page(record: TrainingRecord, sequence: int) -> bytes:
    """Return the bytes of a page."""
    body = msgspec.json.encode(record)
    return _HEADER.pack(_MAGIC, sequence, len(body), zlib.crc32(body)) + body


def from_page(page: bytes) -> TrainingRecord | None:
    """Return the record in a page; None: it was written meanwhile, is none, or is of another version."""
    try:
        record = msgspec.json.decode(_body_of(page), type=TrainingRecord)
    except (ValueError, RecursionError):
        return None
    return record if record.version == VERSION else None


def _body_of(page: bytes) -> bytes:
    """Return the JSON in a page; `ValueError`, which says why, if there is none."""
    if len(page) < _HEADER.size or not page.startswith(_MAGIC):
        raise ValueError("it is no page of a training")
    _, _, length, checksum = _HEADER.unpack_from(page)
    body = page[_HEADER.size : _HEADER.size + length]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise ValueError("it is damaged, or its disk was full")
    return body


def from_json(text: bytes) -> list[TrainingRecord]:
    """Return the records of a JSON list, as an endpoint serves them. `ValueError` if it is none."""
    try:
        return msgspec.json.decode(text, type=list[TrainingRecord])
    except RecursionError as error:
        raise ValueError("it is nested too deeply for records") from error


def newest_version(text: bytes) -> int:
    """Return the newest version of the records in a JSON list; 0: there are none."""
    try:
        return max((record.version for record in msgspec.json.decode(text, type=list[_Versioned])), default=0)
    except (ValueError, RecursionError):
        return 0


def why_unread(page: bytes) -> str:
    """Return why `from_page` finds no record in a page."""
    try:
        version = msgspec.json.decode(_body_of(page), type=_Versioned).version
    except (msgspec.MsgspecError, RecursionError):
        version = VERSION
    except ValueError as error:
        return str(error)
    if version == VERSION:
        return "it is damaged"
    cure = "upgrade here: pip install -U dataflow-loader" if version > VERSION else "upgrade the training's"
    return f"it was written by another dataflow (its version is {version}, this one reads {VERSION}); {cure}"
