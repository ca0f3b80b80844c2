"""What the controller gains on a link that becomes slow and recovers, beside fixed ways of sending gradients.

    python -m benchmarks.lab.controller                            four hosts; needs root, ip, tc; two minutes
    python -m benchmarks.lab.controller --json benchmarks/results/controller.json       also saves the figures

Four hosts (network namespaces, `lab/netlab.sh`) train with DDP over gloo. Their links have 1 Gbit/s, then
100 Mbit/s, then 1 Gbit/s again; rates change between two windows, while all ranks wait. Computing is a
sleep, so that two cores are enough for all but int8's arithmetic, which hosts share cores for. Arms run one
after the other over the same windows: all-reduce and int8 fixed, and `adapt={"compression": [Int8()]}`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lab.network import Lab, lab, on_hosts, set_rates, why_not
from benchmarks.report import save_figures

HOSTS = 4
NUMBER = 75
SIDE = 632
"""The model is a square matrix of so many columns: 1.6 MB of gradients."""
COMPUTE_S = 0.02
"""Of a window; a third of it forward."""
SPELLS = ((180, "1000mbit"), (140, "100mbit"), (220, "1000mbit"))
"""Windows, and the rate of all links in them."""
ARMS = ("all-reduce", "int8", "controller")
LIMIT_S = 150.0
_PORT = 29_700


# ---- one rank --------------------------------------------------------------------------------------------


def rank(place: Sequence[int], address: str, arm: str, pipes: Sequence[str]) -> Any:
    """Train over all spells. Runs in a process of its own.

    Args:
        place: rank, ranks.
        address: of rank 0.
        arm: one of `ARMS`.
        pipes: rank 0 writes a rate to the first, and waits for a line from the second.
    """
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from dataflow import GradSchedule
    from dataflow.grad.strategies import AllReduce, Int8

    torch.set_num_threads(1)
    me, ranks = place
    distributed.init_process_group("gloo", init_method=f"tcp://{address}:{_PORT}", rank=me, world_size=ranks)
    model = DistributedDataParallel(torch.nn.Linear(SIDE, SIDE, bias=False), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [torch.ones(1, SIDE)] * sum(windows for windows, _ in SPELLS)
    begins = {sum(w for w, _ in SPELLS[:number]): rate for number, (_, rate) in enumerate(SPELLS)}
    strategy = Int8() if arm == "int8" else AllReduce()
    adapt: Any = {"compression": [Int8()]} if arm == "controller" else None
    seconds, modes = [], []
    with GradSchedule(batches, model, optimizer, 1, strategy=strategy, adapt=adapt) as sched:
        for number, batch in enumerate(sched):
            if number in begins:
                if me == 0:
                    Path(pipes[0]).write_text(begins[number] + "\n")
                    Path(pipes[1]).read_text()
                distributed.barrier()
                began = time.perf_counter()
            time.sleep(COMPUTE_S / 3)
            loss = model(batch).square().mean()
            time.sleep(COMPUTE_S / 1.5)
            sched.backward(loss * sched.scale())
            sched.step()
            ended = time.perf_counter()
            seconds.append(ended - began)
            began = ended
            modes.append(sched.mode.settings["compression"] if sched.mode else arm)
        reason = sched.mode.reason if sched.mode else "fixed"
    distributed.destroy_process_group()
    return {"seconds": seconds, "modes": modes, "reason": reason}


# ---- figures, pure ---------------------------------------------------------------------------------------


def figures(runs: dict[str, dict[str, Any]], spells: Sequence[tuple[int, str]] = SPELLS) -> dict[str, Any]:
    """Of each arm: seconds of the whole run, and of each spell; how the controller compares."""
    told: dict[str, Any] = {}
    for arm, run in runs.items():
        ends = [sum(windows for windows, _ in spells[: n + 1]) for n in range(len(spells))]
        parts = [run["seconds"][end - windows : end] for end, (windows, _) in zip(ends, spells, strict=True)]
        told[arm] = {
            "total_s": round(sum(run["seconds"]), 2),
            "spells": [
                {"rate": rate, "windows": windows, "mean_ms": _ms(statistics.fmean(part)),
                 "median_ms": _ms(statistics.median(part)), "last_mode": run["modes"][end - 1]}
                for (windows, rate), part, end in zip(spells, parts, ends, strict=True)
            ],
        }  # fmt: skip
    ours = told.get("controller")
    if ours is not None and len(told) > 1:
        fixed = [other for arm, other in told.items() if arm != "controller"]
        each = zip(*(other["spells"] for other in fixed), ours["spells"], strict=True)
        told["compared"] = {
            "best_fixed_over_controller": round(min(f["total_s"] for f in fixed) / ours["total_s"], 3),
            "median_beside_best_of_the_spell": [
                round(min(part["median_ms"] for part in others) / own["median_ms"], 3)
                for *others, own in each
            ],
        }
    return told


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


# ---- runs ------------------------------------------------------------------------------------------------


def run(hosts: Lab, arm: str, pipes: Sequence[str]) -> dict[str, Any]:
    """All hosts; changes the rates of their links when rank 0 asks for it. What rank 0 told."""
    calls = [([host, HOSTS], hosts.address(0), arm, pipes) for host in range(HOSTS)]
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(on_hosts, hosts, calls, rank, limit_s=LIMIT_S)
        # A reader that waits for a rank that has failed reads nothing, which is no rate.
        told.add_done_callback(lambda _: os.close(os.open(pipes[0], os.O_RDWR | os.O_NONBLOCK)))
        for _ in SPELLS:
            set_rates(hosts, Path(pipes[0]).read_text().strip())
            Path(pipes[1]).write_text("done\n")
        return dict(told.result())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(reason)
    runs = {}
    with tempfile.TemporaryDirectory() as name, lab([SPELLS[0][1]] * HOSTS, NUMBER) as hosts:
        pipes = [f"{name}/wanted", f"{name}/done"]
        for pipe in pipes:
            os.mkfifo(pipe)
        for arm in asked.arms.split(","):
            runs[arm] = run(hosts, arm, pipes)
            print(arm, round(sum(runs[arm]["seconds"]), 2), runs[arm]["reason"], flush=True)
    told = figures(runs)
    print(json.dumps(told, indent=1))
    if asked.json:
        used = runs.get("controller", {}).get("modes", [])
        spans = [[number, mode] for number, mode in enumerate(used) if not number or used[number - 1] != mode]
        save_figures(
            asked.json,
            hosts=HOSTS,
            gradient_bytes=4 * SIDE * SIDE,
            compute_s=COMPUTE_S,
            arms=told,
            controller_turns=spans,
            windows_ms={arm: [_ms(seconds) for seconds in ran["seconds"]] for arm, ran in runs.items()},
        )


if __name__ == "__main__":
    main()
