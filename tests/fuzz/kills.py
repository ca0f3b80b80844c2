"""Kills processes at random moments of loops over loaders, and tells what each left behind.

    python tests/fuzz/kills.py --rounds 1000 --seed 1

The loops, in turn: over shards, whose batches are copies alone; with a transform in Python; over a map-style
dataset with worker processes. Each runs in a process of its own, which is killed by SIGKILL within the first
moments. 10 s later no descendant of it may run, and neither shared memory nor the temporary folder may hold
anything new, but for multiprocessing's folder of a process that was killed while it started its fork server:
nobody else knows of it yet. These are counted. In the end a loop over the same shards must deliver every
sample once. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "kits"), str(TESTS.parent)]
_ENDS_IN_S = 10.0
_BEGINS_IN_S = 60.0
_LONGEST_S = 0.1
"""From a process's first line to its end, at most."""
_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans become children of this process."""
_SHARED = Path("/dev/shm")
NUM_SAMPLES = 2000


class Squares:
    """A map-style dataset."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> int:
        return i * i


def kept(sample: Any) -> Any:
    """A transform."""
    return sample


def loops(folder: str) -> dict[str, Callable[[], Any]]:
    """What makes a loader for each kind of loop."""
    from datasets_kit import make_ints_tar

    from dataflow import DataLoader

    made = make_ints_tar(Path(folder), NUM_SAMPLES)
    return {
        "shards": lambda: DataLoader(made.open(), 4, shuffle=True),
        "transform": lambda: DataLoader(made.open(transform=kept), 4, shuffle=True),
        "builders": lambda: DataLoader(made.open(transform=kept), 4, shuffle=True, num_workers=2),
        "processes": lambda: DataLoader(Squares(), 4, num_workers=2),
    }


def run(make: Callable[[], Any], begun: int) -> None:
    """Loop for ever, in a child of `main`."""
    os.write(begun, b"1")
    loader = make()
    while True:
        for batch in loader:
            del batch


def killed(make: Callable[[], Any], delay_s: float, folder: Path) -> str:
    """Run and kill a loop; what is wrong then."""
    before = {*_SHARED.iterdir(), *folder.iterdir()}
    tells, begun = os.pipe()
    child = os.fork()
    if not child:
        try:
            run(make, begun)
        finally:
            os._exit(7)  # only an error ends the loop
    os.close(begun)
    began = select.select([tells], [], [], _BEGINS_IN_S)[0]
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.close(tells)
    _, status = os.waitpid(child, 0)
    wrong = [] if began and os.WIFSIGNALED(status) else ["it ended by itself"]
    deadline = time.monotonic() + _ENDS_IN_S
    while True:
        try:
            orphan, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not orphan and time.monotonic() > deadline:
            wrong.append("a process of it still runs")
            break
        if not orphan:
            time.sleep(0.002)
    left = {
        path
        for path in {*_SHARED.iterdir(), *folder.iterdir()} - before
        if path.parent == _SHARED or path.name[:5] != "pymp-"
    }
    return ", ".join([*wrong, *(f"{path} is left" for path in sorted(left))])


def main() -> int:
    """Kill, and print what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng = random.Random(given.seed)
    failures = 0
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        kinds = loops(shards)
        for number in range(given.rounds):
            name = list(kinds)[number % len(kinds)]
            if wrong := killed(kinds[name], rng.uniform(0, _LONGEST_S), Path(folder)):
                failures += 1
                print(f"round {number}, {name}: {wrong}", flush=True)
        with kinds["shards"]() as loader:
            samples = sorted(int(x) for batch in loader for x in next(iter(batch.values())))
        if samples != list(range(NUM_SAMPLES)):
            failures += 1
            print(f"in the end {len(samples)} samples came of {NUM_SAMPLES}")
        num_folders = len([*Path(folder).glob("pymp-*")])
    print(f"{given.rounds} rounds, {failures} failures; {num_folders} folders of multiprocessing are left")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
