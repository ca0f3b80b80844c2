"""The records that the ranks of a run left in a folder."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataflow.timing.records import RankRecord

_SHOWN = 8
_NAME = re.compile(r"\d{6,}-(loop-)?\d{3,}\.json")
"""As `timing.records.Recorder` names them: the folder may be a user's own, with other files in it."""


@dataclass(frozen=True)
class SavedRecords:
    """Records of one schedule or loader."""

    records: tuple[RankRecord, ...]
    """Of the schedule with most windows, by rank; without one, of the loader with most batches (of those in
    whose loops an optimizer stepped, if any).

    Where no window and no step has ended: all, and none has windows.
    """
    notes: tuple[str, ...]
    """What is missing or could not be read."""


def record_files(folder: Path) -> list[Path]:
    """The files of a folder that ranks wrote."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_records(folder: Path) -> SavedRecords:
    """Read them. A program may make several schedules, one after the other: the longest is taken."""
    schedules: dict[str, list[RankRecord]] = defaultdict(list)
    loops: dict[str, list[RankRecord]] = defaultdict(list)
    notes: list[str] = []
    without: list[RankRecord] = []
    for path in record_files(folder):
        try:
            record = RankRecord.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            notes.append(f"{path.name} could not be read, and is left out: {error}")
            continue
        if not record.windows:
            without.append(record)
            continue
        (schedules if record.in_schedule else loops)[path.stem.partition("-")[2]].append(record)
    trained = {name: ranks for name, ranks in loops.items() if any(one.optimizer_steps for one in ranks)}
    candidates = schedules or trained or loops  # beside a training, a loop is for evaluation
    if not candidates:
        return SavedRecords(tuple(without), tuple(notes))
    longest = max(candidates.values(), key=lambda records: min(len(one.windows) for one in records))
    # After a restart with fewer ranks, records of ranks that are no more lie there still.
    world_size = max(longest, key=lambda one: one.windows[-1].window).world_size
    ranks = [one for one in longest if one.world_size == world_size]
    notes += _missing(ranks, world_size)
    if len(schedules) > 1:
        notes.append(f"{len(schedules)} schedules were made; this is the one with most windows")
    elif len(loops) > 1 and not schedules:
        which = "with most batches" if len(candidates) > 1 else "whose loop steps an optimizer"
        notes.append(f"{len(loops)} loaders were looped over; this is the one {which}")
    return SavedRecords(tuple(ranks), tuple(notes))


def _missing(records: list[RankRecord], world_size: int) -> Iterator[str]:
    lacking = world_size - len(records)
    if not lacking:
        return
    there = ", ".join(str(one.rank) for one in records[:_SHOWN]) + (", ..." if len(records) > _SHOWN else "")
    yield (
        f"{lacking} of {world_size} ranks left no record (there are: {there}): they ended early, or ran on "
        "machines that do not share the folder (--folder)"
    )
