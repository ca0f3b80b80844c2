"""Do hosts that share a store behind one link get fair shares of it, and is the link driven into collapse.

    python -m benchmarks.lab.fair_share                         four hosts; needs root, ip, tc; six minutes
    python -m benchmarks.lab.fair_share --json benchmarks/results/fair-share.json     also saves the figures

Hosts and the store (slowstore.py, 10 ms) are network namespaces on one bridge (`benchmarks/lab/netlab.sh`);
each link is limited by a token bucket with a queue of 50 ms, the store's own link is the narrow one. All
ranks open the production loader, wait for each other, and read one epoch of tokens as fast as they get it.
Compared in turns:

    16 MiB    as it is: the hosts of a job begin with their shares of 16 MiB, 4 MiB at least
    64 MiB    they begin with their shares of what one host would ask for, 64 MiB
    alone     each host begins as if it were the only one
    greedy    no control: whatever the reader threads and the memory allow is in flight

"jobs" are hosts that know nothing of each other and read the same shards; "two ranks" share a broker on each
host, and in "broker ended" the rank of host 0 that serves is killed when it has read a third of its samples.
Until the first rank is through, the kernel's counters of the links tell how full the store's link was, and
how alike the hosts' shares of it were (Jain's index: 1, all alike; 1/n, one has everything).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import REPOSITORY
from benchmarks.lab.network import NUMBER, TCP, Lab, lab, why_not
from benchmarks.remote.slow_server import make_shards, serving
from benchmarks.report import save_figures
from benchmarks.runner import Tell, call_command

LATENCY_MS = 10.0
HOST_MBPS = 1000
LIMIT_S = 170.0
_NOTE_S = 0.1
_COUNTS = ("in_flight_max", "retries", "timeouts", "hedges")
_KILL_AFTER = 1 / 3
"""Of a rank's samples."""


@dataclass(frozen=True)
class Case:
    """Who reads what, and how it is admitted."""

    name: str
    admission: str = "16 MiB"
    ranks: int = 1
    """On each host."""
    one_job: bool = True
    """Hosts divide the shards; otherwise each reads all of a fourth of them, knowing of no other."""
    kill: bool = False
    one_control: bool = True
    """Whether the ranks of a host share one control; otherwise each has a fixed share of where it begins."""


CASES = [
    Case("16 MiB"),
    Case("64 MiB", "64 MiB"),
    Case("alone", "alone"),
    Case("greedy", "greedy"),
    Case("jobs", one_job=False),
    Case("two ranks", ranks=2),
    Case("two ranks, fixed shares", ranks=2, one_control=False),
    Case("two ranks, greedy", "greedy", ranks=2),
    Case("two ranks, broker ended", ranks=2, kill=True),
]


# ---- one rank --------------------------------------------------------------------------------------------


def rank(source: str, place: Sequence[int], admission: str, tell: Tell) -> None:
    """A rank's epoch. Runs in a process of its own; says when it is ready, and at a third; begins at a line.

    Args:
        source: catalog.
        place: host, hosts, local rank, ranks of the host.
        admission: as in the module's text.
        tell: what the parent waits for, and the figures.
    """
    import dataflow.stream.read_ahead as read_ahead
    import dataflow.stream.resources as resources
    from dataflow import DataLoader, ShardedDataset, Topology

    host, hosts, local, ranks = place
    if admission in ("64 MiB", "alone"):
        read_ahead._START_TOGETHER = read_ahead._START_IN_FLIGHT * (hosts if admission == "alone" else 1)
    elif admission == "greedy":
        resources.Inflight = type("Greedy", (resources.Inflight,), {"admits": lambda *_: True})  # type: ignore
    dataset = ShardedDataset(source)
    where = Topology(host * ranks + local, hosts * ranks, local, ranks, node=host, num_nodes=hosts)
    samples, noted, third = 0, [], False
    with DataLoader(dataset, 16, True, topology=where, seed=1) as loader:
        total = len(dataset) // (hosts * ranks)
        tell("ready")
        sys.stdin.readline()
        began = time.monotonic()
        for batch in loader:
            samples += len(batch["tokens"])
            now = time.monotonic()
            if not noted or now >= noted[-1][0] + _NOTE_S:
                noted.append((round(now, 3), samples))
            if not third and samples >= _KILL_AFTER * total:
                third = True
                serves = any(thread.name == "prefetch-broker" for thread in threading.enumerate())
                tell("third", serves=serves)
        ended = time.monotonic()
        stats = loader.stats()
    tell(
        "done",
        began=began,
        ended=ended,
        samples=samples,
        noted=noted,
        first_batch_s=round(noted[0][0] - began, 3),
        faults=asdict(stats.faults),
        in_flight_bytes=stats.in_flight_limit,
        in_flight_reason=stats.in_flight_reason,
    )


# ---- figures, pure ---------------------------------------------------------------------------------------


def jain(shares: Sequence[float]) -> float:
    """1: all alike; 1/n: one has everything."""
    squares = len(shares) * sum(share * share for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0


def at_time(noted: Sequence[Sequence[float]], when: float) -> list[float]:
    """Counts at a time, between the notes before and after it; a note is the time and the counts."""
    times = [note[0] for note in noted]
    return [float(np.interp(when, times, counts)) for counts in list(zip(*noted, strict=True))[1:]]


def longest_gap(noted: Sequence[Sequence[float]], after: float) -> float:
    """Seconds without a batch, the longest that ended after a time; notes are `_NOTE_S` apart at least."""
    between = itertools.pairwise(when for when, _ in noted)
    return max((later - max(earlier, after) for earlier, later in between if later > after), default=0.0)


def figures(
    ranks: Sequence[dict[str, Any]], links: Sequence[Sequence[float]], mbps: float, served: dict[str, Any]
) -> dict[str, Any]:
    """Of one run.

    Args:
        ranks: what those that ended by themselves told.
        links: time, bytes that the store sent, and bytes that each host received; from before to after.
        mbps: of the store's link.
        served: what the store counted.
    """
    began = min(one["began"] for one in ranks)
    first_through = min(one["ended"] for one in ranks)
    before, after = at_time(links, began), at_time(links, first_through)
    sent, *received = (b - a for a, b in zip(before, after, strict=True))
    firsts = [one["first_batch_s"] for one in ranks]
    return {
        "of_the_link": round(sent * 8 / 1e6 / (first_through - began) / mbps, 3),
        "jain": round(jain(received), 4),
        "first_batch_s": round(statistics.median(firsts), 2),
        "slowest_first_batch_s": round(max(firsts), 2),
        "each_s": [round(one["ended"] - began, 2) for one in ranks],
        "requests": served["requests"],
        "in_flight_max": served["concurrent_max"],
        **{key: sum(one["faults"][key] for one in ranks) for key in _COUNTS[1:]},
        "limits_mib": [round(one["in_flight_bytes"] / 2**20, 1) for one in ranks],
    }


# ---- one run ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noting(hosts: Lab, store: int) -> Iterator[list[list[float]]]:
    """Notes of the links' counters, made in a thread until the end."""
    notes: list[list[float]] = []
    over = threading.Event()

    def note() -> None:
        while True:
            last = over.is_set()
            received = [float(hosts.received(host)) for host in range(store)]
            notes.append([time.monotonic(), float(hosts.sent(store)), *received])
            if last:
                return
            over.wait(_NOTE_S)

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield notes
    finally:
        over.set()
        thread.join()


def run(folder: Path, hosts: Lab, num_hosts: int, case: Case, mbps: float) -> dict[str, Any]:
    """All hosts but the last read from the last."""
    store = {"host": hosts.address(num_hosts), "latency-ms": LATENCY_MS}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(folder, store, inside=hosts.inside(num_hosts)))
        server.warm_up("*/*")
        processes = []
        for host in range(num_hosts):
            for local in range(case.ranks):
                place = [host, num_hosts, local, case.ranks] if case.one_job else [0, 1, local, case.ranks]
                source = f"{server.url}/{'whole' if case.one_job else 'part'}/x.catalog"
                command = call_command(rank, source, place, case.admission)
                process = subprocess.Popen(
                    [*hosts.inside(host), *command],
                    cwd=REPOSITORY,
                    # Abstract sockets belong to a network namespace, so each host has a broker of its own.
                    env={**os.environ, "OMP_NUM_THREADS": "1"}
                    | ({"MASTER_ADDR": "x", "MASTER_PORT": "1"} if case.one_control else {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "ready"
        server.stats()
        before = hosts.tcp(num_hosts)
        links = stack.enter_context(noting(hosts, num_hosts))
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        killed, killed_at = None, 0.0
        if case.kill:
            serving_rank = [_serves(process) for process in processes[: case.ranks]]
            assert sum(serving_rank) == 1, "one rank of the host is the broker"
            killed = processes.pop(serving_rank.index(True))
            killed.kill()
            killed_at = time.monotonic()
        said = [process.communicate(timeout=LIMIT_S)[0].splitlines() for process in processes]
        ended = [process.returncode for process in processes]
        assert not any(ended), f"ranks ended with {ended}"
        told = [json.loads(lines[-1]) for lines in said]
        after, served = hosts.tcp(num_hosts), server.stats()
    found = figures(told, links, mbps, served)
    found["resent_segments"] = round(
        (after["RetransSegs"] - before["RetransSegs"]) / (after["OutSegs"] - before["OutSegs"]), 4
    )
    if killed is not None:
        found["longest_gap_after_s"] = [round(longest_gap(one["noted"], killed_at), 2) for one in told]
    return found


def _serves(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return bool(json.loads(process.stdout.readline())["serves"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbps", type=float, default=200.0, help="of the store's link")
    parser.add_argument("--shards", type=int, default=8, help="of 32 MiB; a multiple of four")
    parser.add_argument("--lab", type=int, default=NUMBER, help="its number; two at a time need two")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default="", help="names, separated by ';'; all unless given")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(reason)
    wanted = asked.cases.split(";") if asked.cases else [case.name for case in CASES]
    runs: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES if case.name in wanted}
    rates = [f"{HOST_MBPS}mbit"] * asked.hosts + [f"{asked.mbps:g}mbit"]
    with tempfile.TemporaryDirectory() as name, lab(rates, asked.lab) as hosts:
        for part, num_shards in (("whole", asked.shards), ("part", asked.shards // 4)):
            (Path(name) / part).mkdir()
            make_shards(Path(name) / part, num_shards)
        for _ in range(asked.repeats):
            for case in CASES:
                if case.name in runs:
                    runs[case.name].append(run(Path(name), hosts, asked.hosts, case, asked.mbps))
                    print(f"{case.name:24} {runs[case.name][-1]}", flush=True)
            if asked.json:
                save(asked.json, asked, runs)


def save(path: Path, asked: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> None:
    """All runs so far, and the medians of each case."""
    keys = ("of_the_link", "jain", "first_batch_s", "slowest_first_batch_s", "resent_segments", *_COUNTS)
    medians = {
        name: {key: statistics.median(one[key] for one in each) for key in keys}
        for name, each in runs.items()
    }
    store = {"latency-ms": LATENCY_MS, "link-mbps": asked.mbps, "tcp": TCP}
    save_figures(path, hosts=asked.hosts, host_mbps=HOST_MBPS, store=store, medians=medians, runs=runs)


if __name__ == "__main__":
    main()
