"""What data on the network costs gradients on it, and what the I/O gate gives back.

    python -m benchmarks.lab.io_gate                            four hosts; needs root, ip, tc; twelve minutes
    python -m benchmarks.lab.io_gate --json benchmarks/results/io-gate.json     also saves the figures

Four hosts train with DDP over gloo (network namespaces on links of 200 Mbit/s, `benchmarks/lab/netlab.sh`); a
fifth, on a wide link, serves their data (slowstore.py, 5 ms). Computing is a sleep, so that two cores
are enough and only links are shared. The loader reads as it always does: a shuffle window at once, then
nothing for some steps; its epoch of 4 GiB is longer than a run. Ways of `GradSchedule(io=...)` take turns of
16 windows within a run; a run without any data (batches made before) comes before it. The first window of
each turn is left out, and all first turns. Then a run lets `io="auto"` choose.

    busy      the link is nine tenths full: four microbatches with 2 MB of data each, 5 MB of gradients
    light     the same with a fourth of the data
    over      more data than the link can bring
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lab.network import Lab, lab, on_hosts, why_not
from benchmarks.remote.slow_server import LENGTH, make_shards, serving
from benchmarks.report import save_figures

MBIT = 200
HOSTS = 4
PARAMETERS = 1_250_000
LIMIT_S = 400.0
TURN = 16
"""Windows of a way before the next one's; the first of them is left out."""
WAYS = ("open", "sync")
UNTIL_CHOSEN, AFTER = 104, 32
"""Windows of a run that lets "auto" choose: a trial takes 69, or 32 more where it is not sure."""
SHARDS, DISTINCT = 128, 16
_PORT = 29_600
_BOOTSTRAPS = 2000

Drawn = NDArray[np.float64]
"""Of the sample, then of each that was drawn from it."""


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
    """Turns of windows, way after way."""

    def __init__(self) -> None:
        from dataflow.grad.gate import GateMode

        self._ways = [GateMode(name) for name in WAYS]

    def __call__(self, window: int) -> Any:
        return self._ways[window // TURN % len(self._ways)]


class Made:
    """Batches without a network."""

    def __init__(self, count: int, batch: int) -> None:
        import torch

        self._count, self._batch = count, {"tokens": torch.zeros(batch, LENGTH, dtype=torch.int64)}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * self._count)


def rank(
    source: str, place: Sequence[int], address: str, regime: dict[str, Any], windows: int, io: str = ""
) -> Any:
    """Train for so many windows. Runs in a process of its own; prints the seconds of each.

    Args:
        source: catalog; "" for no data.
        place: rank, ranks.
        address: of rank 0.
        regime: as in `Regime`.
        windows: how many.
        io: of `GradSchedule`; "": ways take turns.
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
        topology = Topology(me, ranks, 0, 1, node=me, num_nodes=ranks)
        loader = DataLoader(ShardedDataset(source), given.batch, True, topology=topology, seed=1)
    found = []
    with contextlib.ExitStack() as stack:
        sched = GradSchedule(loader, model, optimizer, accumulate=given.accumulate, io=io or Rotating())
        stack.enter_context(sched)
        if source:
            stack.enter_context(loader)
        # No batch, no window: epochs follow one another until there were enough.
        while len(found) < windows:
            for _ in sched:
                time.sleep(given.compute_ms / 3e3)
                loss = model(inputs).sum() * sched.scale()
                time.sleep(given.compute_ms / 1.5e3)
                sched.backward(loss)
                if info := sched.step():
                    seconds = info.seconds
                    found.append([seconds.total, seconds.sync, seconds.data_wait])
                    if len(found) == windows:
                        break
    stats = loader.read_pause.stats() if source else None
    decision = {"way": sched.io.way, "reason": sched.io.reason} if sched.io else None
    distributed.destroy_process_group()
    return {"windows": found, "hold": stats and asdict(stats), "decision": decision}


# ---- figures, pure ---------------------------------------------------------------------------------------


def by_way(windows: Sequence[Sequence[float]]) -> dict[str, list[Sequence[float]]]:
    """Windows of each way, without the first of each turn, and without the first turn of all."""
    found: dict[str, list[Sequence[float]]] = {way: [] for way in WAYS}
    for number, window in enumerate(windows):
        if number >= TURN * len(WAYS) and number % TURN:
            found[WAYS[number // TURN % len(WAYS)]].append(window)
    return found


def _with_interval(values: Drawn) -> list[float] | None:
    """The value, and 95 % of those of the samples drawn again; None if what it is a share of is nothing."""
    found = [float(each) for each in (values[0], *np.quantile(values[1:], (0.025, 0.975)))]
    return [round(each, 4) for each in found] if np.isfinite(found).all() else None


def figures(arms: dict[str, list[Sequence[float]]]) -> dict[str, Any]:
    """Of windows [total, sync, data wait] of "none" and each way: seconds, and what is recovered.

    Everything as [value, low, high], an interval of 95 %: windows are drawn again, with a fixed seed.
    """
    random = np.random.default_rng(0)
    told: dict[str, Any] = {}
    drawn: dict[tuple[str, str], Drawn] = {}
    for name, windows in arms.items():
        given = np.asarray(windows)  # [windows, 3]
        picks = random.integers(len(given), size=(_BOOTSTRAPS, len(given)))
        samples = np.concatenate([given[None], given[picks]])
        told[name] = {"windows": len(given)}
        for number, what in enumerate(("window", "sync", "data_wait")):
            of_what = samples[:, :, number]
            drawn[name, f"mean_{what}_s"] = np.mean(of_what, axis=1)
            drawn[name, f"median_{what}_s"] = np.median(of_what, axis=1)
        told[name] |= {what: _with_interval(values) for (arm, what), values in drawn.items() if arm == name}
    for way in arms.keys() - {"none", "open"}:
        for what in ("mean_sync_s", "median_sync_s", "mean_window_s", "median_window_s"):
            none, opened, held = (drawn[name, what] for name in ("none", "open", way))
            with np.errstate(divide="ignore", invalid="ignore"):
                told[way][f"recovers_of_{what}"] = _with_interval((opened - held) / (opened - none))
        costs = drawn[way, "mean_window_s"] / drawn["open", "mean_window_s"] - 1
        told[way]["costs_of_mean_window"] = _with_interval(costs)
    return told


# ---- runs ------------------------------------------------------------------------------------------------


def run(hosts: Lab, source: str, regime: Regime, windows: int, io: str = "") -> dict[str, Any]:
    """All hosts; what rank 0 told."""
    calls = [(source, [host, HOSTS], hosts.address(0), asdict(regime), windows, io) for host in range(HOSTS)]
    return dict(on_hosts(hosts, calls, rank, limit_s=LIMIT_S))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="of each way in a run; the first is left out")
    parser.add_argument("--auto", action="store_true", help="also a run that lets it choose")
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
        make_shards(Path(name), SHARDS, distinct=DISTINCT)
        store = {"host": hosts.address(HOSTS), "latency-ms": 5.0}
        server = stack.enter_context(serving(Path(name), store, inside=hosts.inside(HOSTS)))
        server.warm_up("*")
        source = f"{server.url}/x.catalog"
        for regime in chosen:
            arms: dict[str, list[Sequence[float]]] = {"none": [], **{way: [] for way in WAYS}}
            holds = []
            for _ in range(asked.repeats):
                arms["none"] += run(hosts, "", regime, alone)["windows"][TURN:]
                with_data = run(hosts, source, regime, windows)
                holds.append(with_data["hold"])
                for way, found in by_way(with_data["windows"]).items():
                    arms[way] += found
            decision = None
            if asked.auto:
                told = run(hosts, source, regime, UNTIL_CHOSEN + AFTER, "auto")
                arms["auto"], decision = told["windows"][UNTIL_CHOSEN:], told["decision"]
            results[regime.name] = {
                **asdict(regime),
                "arms": figures(arms),
                "auto": decision,
                "holds": holds,
                "windows": {name: np.round(windows, 4).tolist() for name, windows in arms.items()},
            }
            print(regime.name, json.dumps({**results[regime.name], "windows": None}, indent=1), flush=True)
    if asked.json:
        save_figures(asked.json, hosts=HOSTS, link_mbit=MBIT, gradient_bytes=4 * PARAMETERS, regimes=results)


if __name__ == "__main__":
    main()
