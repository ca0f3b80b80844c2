"""What data on the network costs gradients on it, and what the I/O gate gives back.

    python -m benchmarks.io_gate                            four hosts; needs root, ip, tc; ten minutes
    python -m benchmarks.io_gate --json benchmarks/results/io-gate.json     also saves the figures

Four hosts train with DDP over gloo (network namespaces on links of 200 Mbit/s, `benchmarks/netlab.sh`); a
fifth, on a wide link, serves their data (tests/slowstore.py, 5 ms). Computing is a sleep, so that two cores
are enough and only links are shared. The loader reads as it always does: a shuffle window of 64 MiB at once,
then nothing for some steps. Ways of `GradSchedule(io=...)` take turns of 16 windows within a run; a run
without any data (batches made before) comes before it. The first window of each turn is left out.

    busy      the link is nine tenths full: four microbatches with 2 MB of data each, 5 MB of gradients
    light     the same with a fourth of the data
    over      more data than the link can bring
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab import Lab, lab, on_hosts, why_not
from benchmarks.report import save_figures
from benchmarks.slow_server import LENGTH, make_shards, serving

MBIT = 200
HOSTS = 4
PARAMETERS = 1_250_000
LIMIT_S = 400.0
TURN = 16
"""Windows of a way before the next one's; the first of them is left out."""
WAYS = ("open", "few", "sync", "early")
_PORT = 29_600
_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Regime:
    """How much goes over the link."""

    name: str
    accumulate: int
    batch: int
    """Samples of 8 KiB."""
    compute_ms: float
    """Of a microbatch; a third of it forward."""


REGIMES = (
    Regime("busy", 4, 256, 85),
    Regime("light", 4, 64, 85),
    Regime("over", 2, 512, 85),
)


# ---- one rank --------------------------------------------------------------------------------------------


class Rotating:
    """Turns of windows, way after way. A policy of the I/O gate."""

    def __init__(self) -> None:
        from dataflow.grad.io_gate import GateDecision, Way

        self.decision = GateDecision(Way.OPEN, "in turns", {})
        self._ways = [Way(name) for name in WAYS]

    def way(self, window: int) -> Any:
        return self._ways[window // TURN % len(self._ways)]

    def ended(self, window: int, seconds: float, held_reads: int) -> None:
        pass


class Made:
    """Batches without a network."""

    def __init__(self, count: int, batch: int) -> None:
        import torch

        self._count, self._batch = count, {"tokens": torch.zeros(batch, LENGTH, dtype=torch.int64)}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * self._count)


def rank(source: str, place: Sequence[int], address: str, regime: dict[str, Any], windows: int) -> Any:
    """Train for so many windows. Runs in a process of its own; prints the seconds of each.

    Args:
        source: catalog; "" for no data.
        place: rank, ranks.
        address: of rank 0.
        regime: as in `Regime`.
        windows: how many.
    """
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from dataflow import DataLoader, GradSchedule, ShardedDataset, Topology

    torch.set_num_threads(1)
    given = Regime(**regime)
    me, ranks = place
    init = f"tcp://{address}:{_PORT}"
    distributed.init_process_group("gloo", init_method=init, rank=me, world_size=ranks)
    side = round(PARAMETERS**0.5)
    model = DistributedDataParallel(torch.nn.Linear(side, side, bias=False), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    inputs = torch.zeros(1, side)
    loader: Any = Made(windows * given.accumulate, given.batch)
    if source:
        topology = Topology(me, ranks, 0, 1, me, ranks)
        loader = DataLoader(ShardedDataset(source), given.batch, topology=topology, seed=1)
    found = []
    with contextlib.ExitStack() as stack:
        sched = GradSchedule(loader, model, optimizer, accumulate=given.accumulate, io=Rotating())
        stack.enter_context(sched)
        if source:
            stack.enter_context(loader)
        # No batch, no window: epochs follow one another until there were enough.
        while len(found) < windows:
            for _ in sched:
                time.sleep(given.compute_ms / 3e3)
                loss = model(inputs).sum()
                time.sleep(given.compute_ms / 1.5e3)
                sched.backward(loss)
                if info := sched.step():
                    seconds = info.seconds
                    found.append([seconds.total, seconds.sync, seconds.data_wait])
                    if len(found) == windows:
                        break
    stats = loader.read_hold.stats() if source else None
    distributed.destroy_process_group()
    return {"windows": found, "hold": stats and asdict(stats)}


# ---- figures, pure ---------------------------------------------------------------------------------------


def by_way(windows: Sequence[Sequence[float]]) -> dict[str, list[Sequence[float]]]:
    """Windows of each way, without the first of each turn, and without the first turn of all."""
    found: dict[str, list[Sequence[float]]] = {way: [] for way in WAYS}
    for number, window in enumerate(windows):
        if number >= TURN * len(WAYS) and number % TURN:
            found[WAYS[number // TURN % len(WAYS)]].append(window)
    return found


def interval(values: Sequence[float]) -> list[float]:
    """95 % of the medians of values drawn again, with a fixed seed."""
    random = np.random.default_rng(0)
    drawn = random.choice(np.asarray(values), (_BOOTSTRAPS, len(values)))
    return [round(float(each), 4) for each in np.quantile(np.median(drawn, axis=1), (0.025, 0.975))]


def figures(arms: dict[str, list[Sequence[float]]]) -> dict[str, Any]:
    """Of windows [total, sync, data wait] of "none" and each way: medians, intervals, what is recovered."""
    told: dict[str, Any] = {}
    for name, windows in arms.items():
        total, sync, wait = (list(each) for each in zip(*windows, strict=True))
        told[name] = {
            "windows": len(windows),
            "window_s": round(statistics.median(total), 4),
            "mean_window_s": round(statistics.fmean(total), 4),
            "window_interval": interval(total),
            "sync_s": round(statistics.median(sync), 4),
            "sync_interval": interval(sync),
            "data_wait_s": round(statistics.median(wait), 4),
        }
    for way in WAYS[1:]:
        for what in ("sync_s", "window_s", "mean_window_s"):
            inflated = told["open"][what] - told["none"][what]
            given_back = told["open"][what] - told[way][what]
            told[way][f"recovers_of_{what}"] = round(given_back / inflated, 3) if inflated > 0 else None
        told[way]["costs_of_window"] = round(told[way]["window_s"] / told["open"]["window_s"] - 1, 4)
    return told


# ---- runs ------------------------------------------------------------------------------------------------


def run(hosts: Lab, source: str, regime: Regime, windows: int) -> dict[str, Any]:
    """All hosts; what rank 0 told."""
    calls = [(source, [host, HOSTS], hosts.address(0), asdict(regime), windows) for host in range(HOSTS)]
    return dict(on_hosts(hosts, calls, rank, limit_s=LIMIT_S))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="of each way in a run; the first is left out")
    parser.add_argument("--regimes", default=",".join(regime.name for regime in REGIMES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(reason)
    chosen = [regime for regime in REGIMES if regime.name in asked.regimes.split(",")]
    windows = asked.turns * len(WAYS) * TURN
    alone = windows // len(WAYS)
    results: dict[str, Any] = {}
    rates = [f"{MBIT}mbit"] * HOSTS + ["1000mbit"]
    with tempfile.TemporaryDirectory() as name, lab(rates) as hosts, contextlib.ExitStack() as stack:
        make_shards(Path(name), 16)
        store = {"host": hosts.address(HOSTS), "latency-ms": 5.0}
        server = stack.enter_context(serving(Path(name), store, inside=hosts.inside(HOSTS)))
        server.warm_up("*")
        for regime in chosen:
            arms: dict[str, list[Sequence[float]]] = {"none": [], **{way: [] for way in WAYS}}
            holds = []
            for _ in range(asked.repeats):
                arms["none"] += run(hosts, "", regime, alone)["windows"][TURN:]
                with_data = run(hosts, f"{server.url}/x.catalog", regime, windows)
                holds.append(with_data["hold"])
                for way, found in by_way(with_data["windows"]).items():
                    arms[way] += found
            results[regime.name] = {**asdict(regime), "arms": figures(arms), "holds": holds}
            print(regime.name, json.dumps(results[regime.name], indent=1), flush=True)
    if asked.json:
        save_figures(asked.json, hosts=HOSTS, link_mbit=MBIT, gradient_bytes=4 * PARAMETERS, regimes=results)


if __name__ == "__main__":
    main()
