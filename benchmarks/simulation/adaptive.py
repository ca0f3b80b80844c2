"""How near does the adaptive loader come to the best static setting in hindsight (on a virtual clock).

`python -m benchmarks.simulation.adaptive` runs every trace of `traces` over several seeds with the production
controllers, searches the best pair of (bytes in flight, depth) for the same seed under the same memory limit,
and writes results/adaptive.json. On the first `--exhaustive` seeds the search takes every depth from 1 to 64
and every power of two from 1 MiB to 1 GiB; on the others the depths 2, 3, 4, 6 ... 64 and 4 MiB to 1 GiB
in steps of four. `--plot FOLDER` draws a picture of each trace from the first seed. Everything runs on a
virtual clock: the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.report import save_figures
from benchmarks.simulation.store import (
    Best,
    RankResult,
    Simulation,
    adaptive,
    best_static,
    finish_s,
    static,
)
from benchmarks.simulation.traces import DEPTHS, INFLIGHTS, TRACES

COARSE_DEPTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
COARSE_INFLIGHTS = INFLIGHTS[2::2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "adaptive.json"
MIB = 1 << 20


def jain(results: Sequence[RankResult]) -> float:
    """Fairness of the shares of their work that the ranks had done when the first was through; 1 is equal."""
    shares = [r.steps_at_first_finish / r.steps for r in results]
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def turns_per_100_steps(results: Sequence[RankResult]) -> float:
    return max(100 * r.turns / r.steps for r in results)


def judged(name: str, seed: int, *, exhaustive: bool) -> dict[str, Any]:
    """One trace and seed: ours, and the best static pair."""
    trace = TRACES[name](seed)
    ours = Simulation(trace, adaptive()).run()
    depths, inflights = (DEPTHS, INFLIGHTS) if exhaustive else (COARSE_DEPTHS, COARSE_INFLIGHTS)
    best = best_static(trace, depths, inflights)
    return {
        "trace": name,
        "seed": seed,
        "exhaustive": exhaustive,
        "stationary": trace.stationary,
        "ratio": round(best.finished_s / finish_s(ours), 4),
        "seconds": round(finish_s(ours), 3),
        "best_seconds": round(best.finished_s, 3),
        "best_inflight_mib": best.inflight_bytes // MIB,
        "best_depth": best.depth,
        "static_runs": best.runs,
        "turns_per_100_steps": round(turns_per_100_steps(ours), 2),
        "peak_mib": round(max(r.peak_bytes for r in ours) / MIB, 1),
        "memory_mib": trace.memory_bytes // MIB,
        "over_bound": sum(r.over_bound for r in ours),
        "jain": round(jain(ours), 4) if len(ours) > 1 else None,
        "refused_requests": sum(r.refused for r in ours),
        "requests": sum(r.requests for r in ours),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a trace, over its seeds."""
    lines = [
        "| trace | ratio, mean (lowest) | best pair, seed 0 | turns per 100 steps | peak, MiB | fairness |",
        "|---|---|---|---|---|---|",
    ]
    for name in TRACES:
        mine = [row for row in rows if row["trace"] == name]
        if not mine:
            continue
        ratios = [row["ratio"] for row in mine]
        fair = [row["jain"] for row in mine if row["jain"] is not None]
        lines.append(
            f"| {name}{'' if mine[0]['stationary'] else ' *'} "
            f"| {sum(ratios) / len(ratios):.3f} ({min(ratios):.3f}) "
            f"| {mine[0]['best_inflight_mib']} MiB, {mine[0]['best_depth']} "
            f"| {max(row['turns_per_100_steps'] for row in mine):.1f} "
            f"| {max(row['peak_mib'] for row in mine):.0f} of {mine[0]['memory_mib']} "
            f"| {f'{min(fair):.3f}' if fair else ''} |"
        )
    return "\n".join(lines)


def draw(name: str, best: Best | None, folder: Path) -> None:
    """Depth, bytes in flight and progress of one seed, beside the best static pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trace = TRACES[name](0)
    rank = Simulation(trace, adaptive()).run()[-1]
    figure, (steps, depth, flight) = plt.subplots(
        3, 1, figsize=(6.4, 5), sharex=True, height_ratios=[2, 1, 1], layout="constrained"
    )
    steps.plot(rank.taken_s, range(len(rank.taken_s)), label="adaptive", lw=1.5)
    if best:
        other = Simulation(trace, static(best.inflight_bytes, best.depth)).run()[-1]
        label = f"best static: {best.inflight_bytes // MIB} MiB, {best.depth} batches"
        steps.plot(other.taken_s, range(len(other.taken_s)), "--", label=label, lw=1)
    steps.set(ylabel="batches", title=f"{name}: {trace.says}")
    steps.title.set_fontsize(8)
    steps.legend(fontsize=7)
    times, _, depths = zip(*rank.depth, strict=True)
    depth.step([*times, rank.finished_s], [*depths, depths[-1]], where="post", lw=1)
    depth.set(ylabel="depth", ylim=(0, None))
    flight.plot([t for t, _ in rank.limits], [b / MIB for _, b in rank.limits], lw=0.8)
    flight.set(ylabel="in flight, MiB", xlabel="virtual seconds", ylim=(0, None))
    figure.savefig(folder / f"adaptive-{name}.png", dpi=70, metadata={"Software": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--exhaustive", type=int, default=1, help="seeds with the whole grid")
    parser.add_argument("--traces", nargs="*", default=list(TRACES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in args.traces:
        rows += [judged(name, seed, exhaustive=seed < args.exhaustive) for seed in range(args.seeds)]
        if args.plot:
            row = rows[-args.seeds]
            best = Best(row["best_inflight_mib"] * MIB, row["best_depth"], row["best_seconds"], 0)
            draw(name, best, args.plot)
        print(table(rows).splitlines()[-1], flush=True)
    save_figures(args.out, rows=rows)
    print(f"\n{table(rows)}\n\n{len(rows)} runs of ours in {time.perf_counter() - began:.0f} s, {args.out}")


if __name__ == "__main__":
    main()
