"""`python -m benchmarks.convert`: conversion beside what peers convert with, from the same Parquet files.

Rows of 3,072 bytes and a class go through a function of a row into shards: `dataflow.convert` to MDS, Parquet
and tar; `MDSWriter` of Streaming in as many processes, merged by `merge_index`; `litdata.optimize`;
`datasets` by `map` and `to_parquet`, by rows and, as ours, by batches of columns. All with two workers, in
processes of their own, in turns, from the page cache; medians are shown. Time and CPU time are those of the
call, workers included, the imports of the first process aside.

Then `dataflow.convert` is stopped 50 times with SIGKILL at random moments, and run with 1, 2 and 40 workers:
all must have written the same bytes.

Needs mosaicml-streaming, litdata and datasets. What this Python lacks is run by `--peer-python`, if that has
it, and else left out with words.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import REPOSITORY
from benchmarks.data import read_through
from benchmarks.harness import interleaved, medians
from benchmarks.memory import tree_cpu_s
from benchmarks.options import data_option, json_option, repeats_option
from benchmarks.report import ReportSummary, save_runs
from benchmarks.runner import call_command, result_of

NUM_ROWS, NUM_FILES, ROW_GROUP = 120_000, 12, 1_000
SHARD_BYTES = 16 << 20
WORKERS = 2
KILLS = 50
LIMIT_S = 120.0
OURS = "dataflow"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ConvertRun:
    """One conversion. Either `reason` says why there are no figures, or all of them are there."""

    by: str
    to: str
    package: str = ""
    """The package that this Python or another must have; "": none."""
    samples_per_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of all processes."""
    reason: str = ""


CONTESTANTS = (
    ConvertRun(by=OURS, to="mds"),
    ConvertRun(by="MDSWriter", to="mds", package="streaming"),
    ConvertRun(by="litdata.optimize", to="litdata", package="litdata"),
    ConvertRun(by=OURS, to="parquet"),
    ConvertRun(by="datasets.map", to="parquet", package="datasets"),
    ConvertRun(by=f"{OURS} batched", to="parquet"),
    ConvertRun(by="datasets.map batched", to="parquet", package="datasets"),
    ConvertRun(by=OURS, to="tar"),
)


# ---- the functions of users -----------------------------------------------------------------------------


def mapped(row: Row) -> Row:
    """The function of a row that all contestants call."""
    return {"x": row["x"], "label": row["label"] + 1}


def mapped_rows(rows: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
    """The same for many rows, as columns."""
    return {"x": rows["x"], "label": [label + 1 for label in rows["label"]]}


def rows_of(path: str) -> Iterator[Row]:
    """Rows of a Parquet file, mapped, as a script of users reads them."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(ROW_GROUP):
        yield from map(mapped, batch.to_pylist())


# ---- contestants ----------------------------------------------------------------------------------------


def make_source(folder: Path) -> list[str]:
    """Write the Parquet files, unless they are there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = [folder / f"{number:02d}.parquet" for number in range(NUM_FILES)]
    if not paths[-1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng, each = np.random.default_rng(0), NUM_ROWS // NUM_FILES
        for path in paths:
            data = rng.integers(0, 256, (each, 3072), np.uint8)
            table = {"x": [row.tobytes() for row in data], "label": rng.integers(0, 1000, each)}
            pq.write_table(pa.table(table), path.with_suffix(".new"), row_group_size=ROW_GROUP)
            path.with_suffix(".new").rename(path)
    return [str(path) for path in paths]


def timed(by: str, to: str, source: list[str], out: str) -> dict[str, float]:
    """Convert once: seconds and CPU seconds of the call."""
    contestant = {"MDSWriter": by_streaming, "litdata.optimize": by_litdata}.get(by)
    convert: Callable[[], object]
    batched = by.endswith("batched")
    if by.startswith(OURS):
        convert = by_ours(source, out, to, WORKERS, batched=batched)
    elif contestant is not None:
        convert = contestant(source, out)
    else:
        convert = by_datasets(source, out, batched=batched)
    used, began = tree_cpu_s(os.getpid()), time.perf_counter()
    convert()
    return {"seconds": time.perf_counter() - began, "cpu_s": tree_cpu_s(os.getpid()) - used}


def by_ours(source: Sequence[str], out: str, to: str, workers: int, *, batched: bool) -> Callable[[], object]:
    """`dataflow.convert`."""
    from dataflow import convert

    options: dict[str, Any] = {"shard_size": SHARD_BYTES, "workers": workers, "batched": batched}
    return lambda: convert(source, out, to=to, map=mapped_rows if batched else mapped, **options)


def by_streaming(source: list[str], out: str) -> Callable[[], object]:
    """`MDSWriter` in processes, as Streaming's documents show for parallel conversion."""
    from multiprocessing import Pool

    from streaming.base.util import merge_index

    def convert() -> None:
        parts = [(source[worker::WORKERS], f"{out}/{worker}") for worker in range(WORKERS)]
        with Pool(WORKERS) as pool:
            pool.starmap(write_mds, parts)
        merge_index(out, keep_local=True)

    return convert


def write_mds(source: list[str], out: str) -> None:
    """The part of one process."""
    from streaming import MDSWriter

    with MDSWriter(out=out, columns={"x": "bytes", "label": "int"}, size_limit=SHARD_BYTES) as writer:
        for path in source:
            for row in rows_of(path):
                writer.write(row)


def by_litdata(source: list[str], out: str) -> Callable[[], object]:
    """`litdata.optimize`."""
    from litdata import optimize

    return lambda: optimize(
        fn=rows_of, inputs=source, output_dir=out, num_workers=WORKERS, chunk_bytes=SHARD_BYTES
    )


def by_datasets(source: list[str], out: str, *, batched: bool) -> Callable[[], object]:
    """`datasets`: map in processes, then shards of Parquet."""
    import datasets

    datasets.disable_progress_bars()

    def convert() -> None:
        cache = f"{out}.cache"
        table = datasets.load_dataset("parquet", data_files=source, split="train", cache_dir=cache)
        function = mapped_rows if batched else mapped
        done = table.map(function, batched=batched, num_proc=WORKERS)
        count = NUM_ROWS * 3072 // SHARD_BYTES
        Path(out).mkdir(parents=True)
        for index in range(count):
            done.shard(count, index, contiguous=True).to_parquet(f"{out}/{index:05d}.parquet")

    return convert


# ---- processes ------------------------------------------------------------------------------------------


class ConvertSession:
    """The processes of one command."""

    def __init__(self, folder: Path, peer_python: str | None) -> None:
        self._folder, self._peer_python = folder, peer_python
        self.source = make_source(folder / "source")
        read_through(folder / "source")

    def run(self, run: ConvertRun) -> ConvertRun:
        """A contestant's figures."""
        python = self._python_of(run.package)
        if python is None:
            return self._told(run, reason=f"needs the package {run.package}: pip install, or --peer-python")
        out = self._folder / "out"
        for left in (out, Path(f"{out}.cache")):
            shutil.rmtree(left, ignore_errors=True)
        command = [python, *call_command(timed, run.by, run.to, self.source, str(out))[1:]]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_DATASETS_OFFLINE": "1"}
        try:
            ended = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            figures = result_of(ended.stdout) if ended.returncode == 0 else None
        except subprocess.TimeoutExpired:
            return self._told(run, reason="took too long")
        if figures is None:
            return self._told(run, reason=(ended.stderr.strip().splitlines() or ["failed"])[-1][:200])
        return self._told(run, samples_per_s=NUM_ROWS / figures["seconds"], cpu_s=figures["cpu_s"])

    def _python_of(self, package: str) -> str | None:
        if not package or find_spec(package) is not None:
            return sys.executable
        if self._peer_python is None:
            return None
        asked = [self._peer_python, "-c", f"import importlib.util as u; assert u.find_spec({package!r})"]
        has_it = subprocess.run(asked, capture_output=True).returncode == 0
        return self._peer_python if has_it else None

    @staticmethod
    def _told(run: ConvertRun, **figures: Any) -> ConvertRun:
        done = ConvertRun(**{**asdict(run), **figures})
        shown = done.reason or f"{done.samples_per_s:,.0f} samples/s, {done.cpu_s:.2f} s CPU"
        click.echo(f"{done.by} to {done.to}: {shown}")
        return done

    # ---- the same bytes --------------------------------------------------------------------------------

    def digests(self) -> dict[str, Any]:
        """Hashes of what 1, 2 and 40 workers write, and one that is killed again and again."""
        source, found = self.source[:1], dict[str, str]()
        began = time.perf_counter()
        found["1 worker"] = self._digest(source, 1)
        took_s = time.perf_counter() - began
        for workers in (WORKERS, 40):
            found[f"{workers} workers"] = self._digest(source, workers)
        kills, found["killed"] = self._killed(source, took_s)
        return {"kills": kills, "digests": found}

    def _digest(self, source: list[str], workers: int) -> str:
        out = self._folder / f"same-{workers}"
        shutil.rmtree(out, ignore_errors=True)
        small(source, str(out), workers)
        return digest_of(out)

    def _killed(self, source: list[str], took_s: float) -> tuple[int, str]:
        """Kill a conversion at random moments, until it was killed so often; then let it end.

        One that ends sooner is compared, and begun anew.
        """
        out, rng, kills, digests = self._folder / "killed", random.Random(0), 0, set[str]()
        shutil.rmtree(out, ignore_errors=True)
        for _ in range(4 * KILLS):
            if kills == KILLS:
                break
            child = os.fork()
            if child == 0:
                try:
                    small(source, str(out), 1)
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0.2, 1.4) * took_s / KILLS)
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            kills += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status):
                digests.add(digest_of(out))
                shutil.rmtree(out)
        small(source, str(out), 1)
        return kills, " and ".join(sorted({*digests, digest_of(out)}))


def small(source: Sequence[str], out: str, workers: int) -> None:
    """A conversion into many small shards."""
    from dataflow import convert

    convert(source, out, to="mds", map=mapped, shard_samples=40, workers=workers, progress=False)


def digest_of(folder: Path) -> str:
    """A hash of the names and bytes of all shards."""
    whole = hashlib.blake2b(digest_size=8)
    for path in [*sorted(folder.glob("*.mds")), folder / "index.json"]:
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


def verdicts(rows: Sequence[ConvertRun], same: Mapping[str, Any] | None) -> list[ReportSummary]:
    """What the bars say."""
    ours = {(row.by, row.to): row for row in rows if row.by.startswith(OURS) and not row.reason}
    bars = list[ReportSummary]()
    for row in rows:
        if row.by.startswith(OURS):
            continue
        by = f"{OURS} batched" if row.by.endswith("batched") else OURS
        own = ours.get((by, row.to), ours.get((OURS, "mds")))
        ran = own is not None and not row.reason
        rate = own.samples_per_s / row.samples_per_s if own and ran else None
        cpu = row.cpu_s / own.cpu_s if own and ran else None
        bars.append(ReportSummary(f"to {row.to}", f"x the samples/s of {row.by}", rate, 1.0))
        bars.append(ReportSummary(f"to {row.to}", f"x as little CPU time as {row.by}", cpu, 1.0))
    if same is not None:
        others = float(len(set(same["digests"].values())) - 1)
        bars.append(ReportSummary("bytes", "outputs that differ from one worker's", others, 0, at_most=True))
        bars.append(ReportSummary("bytes", "kills with SIGKILL", float(same["kills"]), KILLS))
    return bars


@click.command(help=__doc__)
@click.option("--peers/--no-peers", default=True, help="Run what peers convert with.")
@click.option("--kills/--no-kills", default=True, help="Compare bytes, also after kills.")
@click.option(
    "--peer-python",
    envvar="DATAFLOW_BENCH_PEER_PYTHON",
    help="A Python that has packages of peers which this one lacks.",
)
@repeats_option
@data_option
@json_option
def main(
    peers: bool, kills: bool, peer_python: str | None, repeats: int, root: Path | None, output: Path | None
) -> None:
    session = ConvertSession((root or REPOSITORY / ".bench-data").resolve() / "convert", peer_python)
    chosen = [one for one in CONTESTANTS if peers or one.by.startswith(OURS)]
    runs = list(interleaved(chosen, repeats, session.run))
    rows = medians(runs, "by", "to", "package")
    same = session.digests() if kills else None
    if same is not None:
        click.echo(f"{same['kills']} kills; hashes {same['digests']}")
    bars = verdicts(rows, same)
    for bar in bars:
        click.echo(f"  {bar.line}")
    if output:
        save_runs(output, bars, rows, runs, same_bytes=same)


if __name__ == "__main__":
    main()
