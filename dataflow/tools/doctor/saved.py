"""The records that the ranks of a run left in a folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dataflow.telemetry.timing.data_stall import DataStallRecord
from dataflow.telemetry.timing.records import StepRecord

R = TypeVar("R", bound=StepRecord)
_SHOWN = 8
_NAME = re.compile(r"\d{6,}-(loop-|headspace-)?\d{3,}\.json")
"""Names as `timing.records.Recorder` and `timing.data_stall` give them: the folder may be a user's own, with
other files in it."""


@dataclass(frozen=True)
class SavedRecords(Generic[R]):
    """Records of one schedule or loader."""

    records: tuple[R, ...]
    """Records of the schedule with most windows, by rank; without one, of the loader with most batches (of
    those in whose loops an optimizer stepped, if any).

    Where no window and no step has ended: all, and none has windows.
    """
    notes: tuple[str, ...]
    """Notes on what is missing or could not be read."""


def record_files(folder: Path) -> list[Path]:
    """The files of a folder that ranks wrote of steps as they were."""
    return [path for path in all_files(folder) if "-headspace-" not in path.name]


def all_files(folder: Path) -> list[Path]:
    """The files of a folder that ranks wrote."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_records(folder: Path) -> SavedRecords[StepRecord]:
    """Read those of steps as they were."""
    return _read(record_files(folder), StepRecord)


def read_data_stall(folder: Path) -> SavedRecords[DataStallRecord]:
    """Read those of steps with a loader and without it."""
    return _read([path for path in all_files(folder) if path not in record_files(folder)], DataStallRecord)


def _read(files: Iterable[Path], record_type: type[R]) -> SavedRecords[R]:
    """Read them. A program may make several schedules, one after the other: the longest is taken."""
    schedules: dict[str, list[R]] = defaultdict(list)
    loops: dict[str, list[R]] = defaultdict(list)
    notes: list[str] = []
    without: list[R] = []
    for path in files:
        try:
            record = record_type.read(path)
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} could not be read, and is left out: {error}")
            continue
        if not record.windows:
            without.append(record)
            continue
        name = path.stem.partition("-")[2]  # of a schedule or a loop: the same on all ranks
        (schedules if record.in_schedule else loops)[name].append(record)
    trained = {name: ranks for name, ranks in loops.items() if any(rank.optimizer_steps for rank in ranks)}
    candidates = schedules or trained or loops  # beside a training, a loop is for evaluation
    if not candidates:
        return SavedRecords(tuple(without), tuple(notes))
    longest = max(candidates.values(), key=lambda records: min(len(rank.windows) for rank in records))
    # After a restart with fewer ranks, records of ranks that are no more lie there still.
    world_size = max(longest, key=lambda rank: rank.windows[-1].window).world_size
    ranks = [rank for rank in longest if rank.world_size == world_size]
    notes += _missing(ranks, world_size)
    if len(schedules) > 1:
        notes.append(f"{len(schedules)} schedules were made; this is the one with most windows")
    elif len(loops) > 1 and not schedules:
        which = "with most batches" if len(candidates) > 1 else "whose loop steps an optimizer"
        notes.append(f"{len(loops)} loaders were looped over; this is the one {which}")
    return SavedRecords(tuple(ranks), tuple(notes))


def _missing(records: Sequence[StepRecord], world_size: int) -> Iterator[str]:
    lacking = world_size - len(records)
    if not lacking:
        return
    there = ", ".join(str(row.rank) for row in records[:_SHOWN]) + (", ..." if len(records) > _SHOWN else "")
    yield (
        f"{lacking} of {world_size} ranks left no record (there are: {there}): they ended early, or ran on "
        "machines that do not share the folder (--folder)"
    )
