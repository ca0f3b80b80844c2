"""The cost of handing a batch from worker processes to the training process.

    python -m benchmarks.handover.compare                             everything; about an hour on two cores
    python -m benchmarks.handover.compare --cases many --loaders ours torch --seconds 1 --repeats 1
    python -m benchmarks.handover.compare --cases tiny --json tiny.json  adds to the runs in tiny.json
    python -m benchmarks.handover.compare --repeats 0 --json tiny.json   shows what is in it, runs nothing

The datasets cost next to nothing, so a loader's rate is what its hand-over lets through. Each measurement is
a fresh process with OMP_NUM_THREADS=1, warmed up; repeats are interleaved (A B C A B C ...) and medians
shown, each beside torch's DataLoader with the same dataset and number of workers. The bars come last. Runs
during which other processes used more than a tenth of a core count only where a point has no others.

cases (batches; the consumer takes one after the other and reads two elements of it):
  large        uint8 [64, 3, 224, 224], default collate, 2 workers
  large-read   the same, and the consumer copies each batch, as a copy to a device does
  many         200 float32 [16, 8] in a dict, 2 workers
  scalars      int64 [256] from a dataset of ints, 2 workers
  tiny         int64 [16, 2049], one gather by `__getitems__` from a uint16 array in memory, 2 workers
  startup      ms from making the loader to its first batch (scalars), by start method, 2 and 8 workers; then
               the same for a second loader of the same process
  first        ms from making the first loader of a process to its first batch, by default (torch forks), 2
               and 8 workers, and for later loaders; cold: at once, in a process with one thread; threads:
               at once, with another thread; model: with a model built in between, which takes 1 s. OpenMP has
               its own number of threads here. `first_wait_ms` in the file is what was waited for.
  turn         ms from the end of an epoch to the first batch of the next (large, 24 batches, a training step
               of 10 ms), with workers that persist and with workers started anew, 2 and 8 workers
  descriptors  file descriptors and shared-memory objects in use while 20 batches of 200 (or 50) tensors
               are held, 2 workers
  memory       MB above a process that only imports torch, peak over all processes (large), 2 and 8 workers
  delay        share of throughput lost when one sample in 100 takes 5 ms longer; a sample sleeps 1 ms,
               batches of 32, 2, 4 and 8 workers. Workers that wait for their own delayed samples lose 5 ms
               in 105, 4.8 %; what is lost beyond that, the loader lost by waiting for the batch in turn.
               Ours and torch only.

loaders:
  in-process       torch without workers: what building the batches costs where nothing is handed over
  ours             dataflow.DataLoader; ours-thread: with workers="thread"
  torch            torch.utils.data.DataLoader; torch-any-order (delay only): in_order=False
  stateful         torchdata.stateful_dataloader.StatefulDataLoader
  nodes-process    torchdata.nodes, the recipe of its migration guide; nodes-thread: the same with threads
  spdl             spdl.dataloader.get_pytorch_dataloader (processes); spdl-thread: a pipeline on threads;
                   spdl-subprocess: that pipeline in one subprocess, with its shared-memory arena
  grain            grain, mp_prefetch over finished batches
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.handover.bars import FIGURES, disturbed, medians, table, verdict_table, verdicts
from benchmarks.handover.loaders import LOADERS, TORCH
from benchmarks.handover.measured import MEASURES, Point, measured
from benchmarks.harness import bare_torch, interleaved, run_child
from benchmarks.memory import Memory
from benchmarks.report import command, commit, machine, save_figures, versions

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
LIMIT_S = 60.0
"""A measurement that takes longer is ended and named."""


def points(case: str, loader: str) -> Iterator[Point]:
    """The measurements of one loader in one case; none where the case does not apply to it."""
    kind = LOADERS[loader]
    point = Point(case, loader)
    if case == "delay":
        variants = ("plain", "delayed") if kind.delays else ()
        yield from (replace(point, workers=n, variant=v) for n in (2, 4, 8) for v in variants)
    elif not kind.rate:
        return
    elif case == "first":
        variants = ("cold", "threads", "model") if kind.firsts else ()
        yield from (replace(point, workers=n, variant=v) for n in (2, 8) for v in variants)
    elif case == "startup":
        yield from (replace(point, workers=n, variant=start) for n in (2, 8) for start in kind.starts)
    elif case == "turn":
        variants = ["persistent" if persistent else "anew" for persistent in kind.turns]
        yield from (replace(point, workers=n, variant=v) for n in (2, 8) for v in variants)
    elif case == "descriptors":
        yield from (replace(point, variant=num) for num in ("50", "200"))
    elif case == "memory":
        yield from (replace(point, workers=n) for n in (2, 8))
    else:
        yield point


def measure(point: Point, bare: Memory) -> dict[str, Any]:
    """One measurement in a fresh process: its figures, or the reason why there are none."""
    environment = {} if point.case == "first" else ENVIRONMENT
    events, peak = run_child(measured, asdict(point), environment=environment, limit_s=LIMIT_S)
    told = {name: value for name, value in events.items() if isinstance(value, float | int)}
    if point.case == "memory":
        told |= {"held_mb": peak.held_mb - bare.held_mb, "pss_mb": peak.pss_mb - bare.pss_mb}
    run = {field.name: getattr(point, field.name) for field in fields(Point)}
    return run | {"figures": told, "reason": events.get("reason", "")}


def said(run: dict[str, Any]) -> str:
    """One line a measurement."""
    name = f"{run['case']} {run['loader']} {run['workers']} {run['variant']}".strip()
    if run["reason"]:
        return f"{name}: not measured: {run['reason']}"
    measured = run["figures"]  # not every loader has every figure of a case
    figures = ", ".join(f"{n} {measured[n]:,.4g}" for n in FIGURES[run["case"]] if n in measured)
    if disturbed(measured):
        figures += f" (disturbed: others used {measured['others_cores']:.2f} cores)"
    return f"{name}: {figures}"


class Results:
    """The runs of a file and of this session. A long benchmark may be cut into sessions of few repeats."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        kept = json.loads(path.read_text()) if path and path.exists() else {"settings": settings, "runs": []}
        if kept["settings"] != settings:
            raise SystemExit(
                f"{path} holds runs of other settings: {kept['settings']}, now {settings}; "
                "medians over both would mean nothing, so name another file"
            )
        self.runs: list[dict[str, Any]] = kept["runs"]
        self._sessions: list[dict[str, Any]] = kept.get("sessions", [])

    def save(self, began: str) -> None:
        if self._path is None:
            return
        rows = medians(self.runs)
        session = {"command": command(), "date": began, "commit": commit()}
        save_figures(
            self._path,
            settings=self._settings,
            sessions=[*self._sessions, session],
            verdicts=[asdict(v) | {"verdict": v.says} for v in verdicts(rows)],
            medians=[
                {"case": c, "loader": loader, "workers": n, "variant": v, **figures}
                for (c, loader, n, v), figures in sorted(rows.items())
            ],
            runs=self.runs,
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handover.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="CASE")
    parser.add_argument(
        "--loaders",
        nargs="+",
        choices=LOADERS,
        default=list(LOADERS),
        metavar="LOADER",
        help="torch is always run beside them: every ratio is to it",
    )
    parser.add_argument("--repeats", type=_count, default=3, help="interleaved (default: 3)")
    parser.add_argument("--seconds", type=_positive, default=1.5, help="timed, each run (default: 1.5)")
    parser.add_argument(
        "--json", type=Path, help="keep all runs here; runs in it already count towards the medians"
    )
    parsed = parser.parse_args(arguments)
    if parsed.repeats == 0 and parsed.json is None:
        parser.error("--repeats 0 shows what is in a file: name it with --json")
    return parsed


def _positive(text: str) -> float:
    if (number := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print the tables and the bars."""
    rows = medians(runs)
    if noisy := sum(row["disturbed_runs"] > 0 for row in rows.values()):
        print(f"\nDISTURBED: {noisy} of {len(rows)} points were measured beside other work only")
    for case in MEASURES:
        if shown := table(case, rows):
            print(f"\n{case}\n\n{shown}")
    print(f"\nbars\n\n{verdict_table(verdicts(rows))}")


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.repeats == 0:
        show(json.loads(arguments.json.read_text())["runs"])
        return
    settings = {"machine": machine(), "versions": versions(), "timed_s": arguments.seconds}
    results = Results(arguments.json, settings)
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    bare = bare_torch()
    print(settings, flush=True)
    loaders = [name for name in LOADERS if name in arguments.loaders or name == TORCH]
    for case in arguments.cases:
        chosen = [
            replace(point, timed_s=arguments.seconds) for name in loaders for point in points(case, name)
        ]
        for run in interleaved(chosen, arguments.repeats, partial(measure, bare=bare), itemgetter("reason")):
            results.runs.append(run)
            results.save(began)
            print(said(run), flush=True)
    show(results.runs)


if __name__ == "__main__":
    main()
