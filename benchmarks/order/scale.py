"""How planning an epoch grows with the dataset, beside MosaicML Streaming's and Grain's own functions.

    python -m benchmarks.order.scale --json benchmarks/results/order-scale.json

Each case runs in a fresh process with at most 8 GB of data and 60 s; what does not fit is reported as that.
The dataset has 1,000 samples a shard, one block each, and 8 nodes of 8 ranks read batches of 64. Measured:

- plan: from the table of sample counts to an object that answers for any position of epoch 3;
- seek: the same from nothing, in the middle of the epoch, to the first batch of one rank as sample numbers;
- positions to sample numbers: consecutive ones, random ones within 400,000, and random ones in the epoch;
- peak memory: of the whole process over what it had after its imports, until planned and sought once.

*Mosaic* is what `generate_work_random_batching` does for one stream: `get_partitions` and
`get_shuffle_py1e`, with its defaults (8 canonical nodes); a look-up is then indexing an array. *Grain* is
`index_shuffle`, one call a position, as `ShuffleMapDataset` makes them: a full shuffle without locality, so
our `Shuffle("full")` stands beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import run_child
from benchmarks.report import save_figures

SIZES = (10**6, 10**7, 10**8, 10**9)
CONTESTANTS = ("ours", "ours-uneven", "ours-exchange", "ours-full", "mosaic", "grain")
SHARD, NODES, RANKS_PER_NODE, BATCH = 1000, 8, 8, 64
SEED, EPOCH, RANK = 1, 3, 37
LOCAL = 400_000
LIMIT_BYTES, LIMIT_S = 8 << 30, 60

Lookup = Callable[[NDArray[np.int64]], Any]


def ours(num_samples: int, kind: str) -> tuple[Callable[[], Lookup], Callable[[], Any], dict[str, Any]]:
    from sharding.order.order import Order
    from sharding.order.shuffle import Shuffle
    from sharding.plan.plan import EpochPlan, PlanState

    counts = np.full(num_samples // SHARD, SHARD)
    if kind == "ours-uneven":  # sizes differ, their sum is the same
        change = np.random.default_rng(0).integers(-500, 501, len(counts) // 2)
        counts[0 : 2 * len(change) : 2] += change
        counts[1 : 2 * len(change) : 2] -= change
    shuffle = Shuffle("full") if kind == "ours-full" else Shuffle("window", 64)
    if kind == "ours-exchange":
        shuffle = Shuffle("window", 64, 8, 0.1)

    def plan(start: int = 0) -> EpochPlan:
        order = Order(counts, shuffle, seed=SEED, epoch=EPOCH)
        made = {"batch_size": BATCH, "rank": RANK, "world_size": NODES * RANKS_PER_NODE}
        return EpochPlan(order, **made, tail="drop", start=start)

    def seek() -> Any:
        made = plan(num_samples // 2 + 12_345)
        return made.order.samples(made.positions(0, 1)[0])

    resolved = shuffle.resolved()
    state = PlanState(
        seed=SEED,
        epoch=EPOCH,
        position=num_samples // 2,
        num_samples=num_samples,
        shuffle=resolved,
        fingerprint="0123456789abcdef",
    )
    return lambda: plan().order.samples, seek, {"state_bytes": len(json.dumps(state.to_json()))}


def mosaic(num_samples: int) -> tuple[Callable[[], Lookup], Callable[[], Any], dict[str, Any]]:
    import benchmarks.peers.mosaic  # noqa: F401 -- its stand-ins let `streaming` be imported

    # isort: split
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(num_samples // SHARD, SHARD)

    def work(done: int = 0) -> NDArray[np.int64]:
        ids = get_partitions("relaxed", num_samples, NODES, NODES, RANKS_PER_NODE, 1, BATCH, done)
        block = max(4_000_000 // NODES, 1 << 18)
        shuffle = get_shuffle("py1e", sizes, NODES, SEED, EPOCH, block)
        return np.where(ids != -1, shuffle[ids], -1)

    def lookup() -> Lookup:
        flat = work().reshape(-1)
        return lambda positions: flat[positions]

    world = NODES * RANKS_PER_NODE
    return lookup, lambda: work((num_samples // 2 + 12_345) // world * world)[4, 5, 0, 0], {}


def grain(num_samples: int) -> tuple[Callable[[], Lookup], Callable[[], Any], dict[str, Any]]:
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    shuffle, most = index_shuffle_module.index_shuffle, num_samples - 1

    def lookup(positions: NDArray[np.int64]) -> list[int]:
        return [shuffle(p, max_index=most, seed=SEED + EPOCH, rounds=4) for p in positions.tolist()]

    return lambda: lookup, lambda: lookup(np.arange(BATCH) + num_samples // 2 + 12_345), {}


def measured(contestant: str, num_samples: int) -> dict[str, Any]:
    """One case, in as much memory as it may take."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    return measure(contestant, num_samples)


def measure(contestant: str, num_samples: int, num_positions: int = 1_000_000) -> dict[str, Any]:
    """One case, in this process; look-ups of a tenth of the positions where each is a call."""
    makers = {"mosaic": mosaic, "grain": grain}
    if contestant in makers:
        plan, seek, facts = makers[contestant](num_samples)
    else:
        plan, seek, facts = ours(num_samples, contestant)
    before = _peak_mb()
    first_seek_s, _ = _timed(seek)
    plan_s, lookup = _timed(plan)
    peak_mb = _peak_mb() - before
    again = contestant.startswith("ours") or plan_s < 5
    if again:
        plan_s = min(plan_s, *(_timed(plan)[0] for _ in range(2)))
        first_seek_s = min(first_seek_s, *(_timed(seek)[0] for _ in range(2)))
    rng, scalar = np.random.default_rng(1), contestant == "grain"
    num = num_positions // 10 if scalar else num_positions
    local = min(LOCAL, num_samples)
    base = min(num_samples // 3, num_samples - num)
    asked = {
        "consecutive": np.arange(num) + base,
        "local": rng.integers(0, local, num) + min(num_samples // 3, num_samples - local),
        "random": rng.integers(0, num_samples, num // 200 if contestant.startswith("ours") else num),
    }
    if contestant == "ours-full":
        asked["random"] = rng.integers(0, num_samples, num)
    rates = {
        f"{name}_m_per_s": len(p) / min(_timed(lambda p=p: lookup(p))[0] for _ in range(3)) / 1e6
        for name, p in asked.items()
    }
    return {"plan_s": plan_s, "seek_s": first_seek_s, "peak_mb": peak_mb, **rates, **facts}


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def run(contestant: str, num_samples: int) -> dict[str, Any]:
    """One case in a fresh process; a "reason" instead of figures where it does not fit the limits."""
    events, _ = run_child(measured, contestant, num_samples, limit_s=LIMIT_S)
    reason = events.get("reason", "")
    if "MemoryError" in reason or "bad_alloc" in reason:
        reason = "more than 8 GB"
    case = {"contestant": contestant, "samples": num_samples, "shards": num_samples // SHARD}
    return case | ({"reason": reason} if reason else events["result"])


def table(cases: list[dict[str, Any]]) -> str:
    """The cases as a Markdown table."""
    head = "| | samples | plan, s | seek, s | peak, MB | consecutive, M/s | local, M/s | random, M/s |"
    lines = [head, "|---|" + "---:|" * 7]
    for case in cases:
        start = f"| {case['contestant']} | {case['samples']:.0e} |".replace("e+0", "e")
        if "reason" in case:
            lines.append(f"{start} {case['reason']} | | | | | |")
            continue
        rates = (case[f"{name}_m_per_s"] for name in ("consecutive", "local", "random"))
        figures = (case["plan_s"], case["seek_s"], case["peak_mb"], *rates)
        lines.append(start + "".join(f" {figure:.3g} |" for figure in figures))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here; cases already in it are kept")
    parser.add_argument("--only", nargs="*", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    arguments = parser.parse_args()
    known = arguments.json is not None and arguments.json.exists()
    cases = json.loads(arguments.json.read_text())["cases"] if known else []
    for contestant in arguments.only:
        for size in arguments.sizes:
            cases = [c for c in cases if (c["contestant"], c["samples"]) != (contestant, size)]
            cases.append(run(contestant, size))
            print(table(cases[-1:]).splitlines()[-1], flush=True)
    cases.sort(key=lambda c: (CONTESTANTS.index(c["contestant"]), c["samples"]))
    print(table(cases))
    if arguments.json:
        whole = "python -m benchmarks.order.scale --json benchmarks/results/order-scale.json"
        save_figures(
            arguments.json,
            command=whole,  # cases of other sessions are kept
            limit_bytes=LIMIT_BYTES,
            limit_s=LIMIT_S,
            cases=cases,
        )


if __name__ == "__main__":
    main()
