"""Whether many nodes that start together drive a store behind one link into collapse: time-outs, bytes twice.

    python -m benchmarks.nodes                        8 nodes, 100 Mbit/s for all; about two minutes
    python -m benchmarks.nodes --json benchmarks/results/nodes.json      also saves the figures
    python -m benchmarks.nodes --host 10.77.0.254 --in 'ip netns exec nlab77h{}'     in network namespaces

The store is tests/slowstore.py with one rate for all connections. Each node is a process with one rank of a
job of so many nodes; all open the loader at the same moment and read one epoch. Asked is with the start
shared out over the nodes (as it is) and with each node starting as if it were alone. Runs take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
from benchmarks.report import save_figures
from benchmarks.slow_server import call_command, make_shards, serving

LATENCY_MS = 30.0
LIMIT_S = 170.0


def node(url: str, number: int, of: int, share: bool) -> dict[str, Any]:
    """One node's epoch. Runs in a process of its own; begins when a line comes."""
    import dataflow.session as module
    from dataflow import DataLoader, ShardedDataset, Topology

    if not share:
        module._START_IN_FLIGHT *= of
    dataset = ShardedDataset(f"{url}/x.catalog")
    place = Topology(number, of, 0, 1, number, of)
    with DataLoader(dataset, 32, topology=place, seed=1) as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        samples = sum(len(batch["tokens"]) for batch in loader)
        stats = loader.stats()
        return {
            "samples": samples,
            "seconds": round(time.perf_counter() - began, 2),
            "first_batch_s": round(stats.first_batch_s, 2),
            "faults": asdict(stats.faults),
        }


def run(folder: Path, asked: argparse.Namespace, share: bool) -> dict[str, Any]:
    store = {"host": asked.host, "latency-ms": LATENCY_MS, "total-mbps": asked.mbps}
    with serving(folder, store) as server, contextlib.ExitStack() as stack:
        nodes = []
        for number in range(asked.nodes):
            inside = asked.inside.format(number).split()
            process = subprocess.Popen(
                [*inside, *call_command(node, server.url, number, asked.nodes, share)],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            nodes.append(process)
        for process in nodes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        server.stats()
        for process in nodes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in nodes]
        served = server.stats()
    return {
        "seconds": max(one["seconds"] for one in told),
        "first_batch_s": max(one["first_batch_s"] for one in told),
        "timeouts": sum(one["faults"]["timeouts"] for one in told),
        "retries": sum(one["faults"]["retries"] for one in told),
        "samples": sum(one["samples"] for one in told),
        "server_bytes": served["bytes"],
        "in_flight_max": served["concurrent_max"],
        "each_s": [one["seconds"] for one in told],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--in", dest="inside", default="", help="command that runs the rest in host {}")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, Any]]] = {"shared out": [], "each alone": []}
    with tempfile.TemporaryDirectory() as name:
        make_shards(Path(name), asked.shards)
        for _ in range(asked.repeats):
            for what, each in runs.items():
                each.append(run(Path(name), asked, share=what == "shared out"))
                print(f"{what:12} {each[-1]}", flush=True)
    if asked.json:
        medians = {
            what: {
                key: statistics.median(one[key] for one in each)
                for key in ("seconds", "first_batch_s", "timeouts", "server_bytes")
            }
            for what, each in runs.items()
        }
        save_figures(
            asked.json,
            nodes=asked.nodes,
            store={"latency-ms": LATENCY_MS, "total-mbps": asked.mbps},
            namespaces=bool(asked.inside),
            runs=runs,
            medians=medians,
        )


if __name__ == "__main__":
    main()
