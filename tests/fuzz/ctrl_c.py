"""Presses Ctrl-C at random moments of loops over loaders, and tells how long each took to end.

    python tests/fuzz/ctrl_c.py --rounds 200 --seed 1

The loops, in turn: over shards; with a transform in Python; over a map-style dataset with worker threads;
with worker processes. In each round a signal comes within the first moments, and KeyboardInterrupt must leave
the loop within 2 s; after it no thread or process of the loader may be left. Exit status 1 if that failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "kits"), str(TESTS.parent)]
_ENDS_IN_S = 2.0
_HANGS_S = 60
_LONGEST_S = 0.25
"""From the beginning of a loop to the signal, at most."""


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

    made = make_ints_tar(Path(folder), 2000)
    return {
        "shards": lambda: DataLoader(made.open(), 4, shuffle=True),
        "transform": lambda: DataLoader(made.open(transform=kept), 4, shuffle=True),
        "builders": lambda: DataLoader(made.open(transform=kept), 4, shuffle=True, num_workers=2),
        "no builders": lambda: DataLoader(made.open(transform=kept), 4, shuffle=True, num_workers=0),
        "threads": lambda: DataLoader(Squares(), 4, num_workers=2, workers="thread"),
        "processes": lambda: DataLoader(Squares(), 4, num_workers=2),
    }


def interrupted(make: Callable[[], Any], delay_s: float) -> tuple[float, str]:
    """Seconds from the signal to the end of the loop, and what is wrong."""
    sent = [0.0]

    def press() -> None:
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay_s, press)
    raised = False
    try:
        try:
            timer.start()
            loader = make()
            while True:
                for batch in loader:
                    del batch
        except KeyboardInterrupt:
            raised = True
            took = time.monotonic() - sent[0]
        timer.join()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0], "a second KeyboardInterrupt"
    wrong = [] if raised else ["no KeyboardInterrupt"]
    loader = batch = None
    deadline = time.monotonic() + 10
    # A thread whose start the signal hit may be listed for ever without having begun.
    begun_by = time.monotonic() + 1
    while not all(thread.ident for thread in threading.enumerate()) and time.monotonic() < begun_by:
        time.sleep(0.001)
    for thread in threading.enumerate():
        if thread.name.startswith("dataflow") and thread.ident:
            thread.join(max(0.0, deadline - time.monotonic()))
            wrong += [f"{thread.name} is left"] if thread.is_alive() else []
    for process in multiprocessing.active_children():
        process.join(max(0.0, deadline - time.monotonic()))
        wrong += [f"process {process.pid} is left"] if process.is_alive() else []
    return took, ", ".join(wrong)


def main() -> int:
    """Press, and print the slowest of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    rng = random.Random(given.seed)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        kinds = loops(folder)
        slowest = dict.fromkeys(kinds, 0.0)
        for number in range(given.rounds):
            name = list(kinds)[number % len(kinds)]
            faulthandler.dump_traceback_later(_HANGS_S, exit=True)
            took, wrong = interrupted(kinds[name], rng.uniform(0, _LONGEST_S))
            faulthandler.cancel_dump_traceback_later()
            slowest[name] = max(slowest[name], took)
            if wrong or took > _ENDS_IN_S:
                failures += 1
                print(f"round {number}, {name}: after {took:.2f} s; {wrong or 'too late'}")
    for name, took in slowest.items():
        print(f"{name:10} ended within {took:.2f} s")
    print(f"{given.rounds} rounds, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
