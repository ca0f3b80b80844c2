"""What the demo prints: tables and sentences made from its results. Pure functions of the results.

Sentences are chosen by the figures, so that they hold on every machine: a loader that loses is said to lose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from dataflow.tools.demo import train as demo_train
from dataflow.tools.demo.data import LENGTH, Corpus, TarPass
from dataflow.tools.demo.loading import LoadingResult, workers_text
from dataflow.tools.demo.train import RunResult

_LARGEST = 5
_SMALL_SHARE = 0.05
"""Waiting below this share is no bottleneck; runs closer than this are the same to noise."""


def heading(console: Console, text: str) -> None:
    """A line above a section."""
    console.print(f"\n[bold]{text}[/bold]")


def _say(console: Console, text: str) -> None:
    """A paragraph of a section; wrapped lines stay indented."""
    console.print(Padding(text, (0, 0, 0, 2)))


def show_corpus(console: Console, corpus: Corpus) -> None:
    """What was written."""
    heading(console, "Python's standard library as shards")
    _say(
        console,
        f"{corpus.num_modules:,} modules, {corpus.num_bytes / 1e6:.1f} MB of source text: "
        f"{corpus.token_shards} files of byte tokens and {corpus.tar_shards} WebDataset tars, "
        f"written and indexed in {corpus.seconds:.1f} s",
    )


def show_tars(console: Console, corpus: Corpus, tars: TarPass) -> None:
    """The largest modules, and whether every byte came back."""
    same = tars.num_bytes == corpus.num_bytes and len(tars.modules) == corpus.num_modules
    _say(
        console,
        f"read back from the tars: {len(tars.modules):,} samples (txt, json), "
        f"{tars.num_bytes / 1e6:.1f} MB in {tars.seconds:.2f} s, "
        + ("every byte there" if same else "[red]not the bytes that were written[/red]"),
    )
    table = Table("  largest modules", box=None, pad_edge=False)
    table.add_column("kB", justify="right")
    table.add_column("lines", justify="right")
    for module in sorted(tars.modules, key=lambda one: -one.num_bytes)[:_LARGEST]:
        table.add_row(f"  {module.name}", f"{module.num_bytes / 1e3:,.0f}", f"{module.num_lines:,}")
    console.print(table)


def show_state(console: Console, interrupted: RunResult) -> None:
    """The loader's part of the checkpoint."""
    state = json.dumps(interrupted.loader_state)
    _say(console, f"all processes ended; the loader's state is JSON, {len(state)} bytes:")
    _say(console, f"[dim]{state}[/dim]")


def show_losses(console: Console, whole: Sequence[float], pieces: Sequence[float], half: int) -> None:
    """Whether the interrupted run is the uninterrupted one."""
    step = first_difference(whole, pieces)
    if step is None:
        _say(
            console,
            f"[green]identical[/green]: {len(whole)} losses of the run that was interrupted after step "
            f"{half} and resumed in new processes equal those of the uninterrupted one, bit for bit",
        )
    else:
        a, b = (losses[step - 1] if step <= len(losses) else "none" for losses in (whole, pieces))
        _say(console, f"[red]different[/red]: step {step} has loss {a} uninterrupted and {b} resumed")


def first_difference(a: Sequence[float], b: Sequence[float]) -> int | None:
    """Number of the first step (from 1) whose losses differ; None: they are equal."""
    pairs = enumerate(zip_longest(a, b), 1)
    return next((step for step, (one, other) in pairs if one != other), None)


def show_comparison(
    console: Console,
    ours: RunResult,
    theirs: RunResult,
    torch_workers: int,
    loading: Sequence[LoadingResult],
) -> None:
    """Both loaders side by side, and what the figures say."""
    console.print(_training_table(ours, theirs, torch_workers))
    console.print()
    console.print(_loading_table(loading))
    console.print()
    lines = Table.grid(padding=(0, 1))
    for line in verdict(ours, theirs, loading):
        lines.add_row(" -", line)
    console.print(lines)


def _training_table(ours: RunResult, theirs: RunResult, torch_workers: int) -> Table:
    table = Table("  training", box=None, pad_edge=False)
    table.add_column("dataflow", justify="right")
    table.add_column(f"torch, {workers_text(torch_workers)}", justify="right")
    rows = (
        ("samples/s", lambda run: f"{run.samples_per_s:,.0f}"),
        ("median step", lambda run: f"{run.median_step_s * 1e3:,.0f} ms"),
        ("MB/s of text", lambda run: f"{run.samples_per_s * LENGTH / 1e6:.3f}"),
        ("share of time waiting for data", lambda run: f"{run.waiting_share:.2%}"),
        ("first batch after", lambda run: f"{run.first_batch_s * 1e3:,.0f} ms"),
        ("peak memory of rank 0", _memory_text),
        ("  of it the loader's buffers", lambda run: _megabytes(run.loader_peak_bytes)),
    )
    for name, text in rows:
        table.add_row(f"  {name}", text(ours), text(theirs))
    return table


def _loading_table(loading: Sequence[LoadingResult]) -> Table:
    table = Table("  loading alone, one epoch in one process", box=None, pad_edge=False)
    for name in ("samples/s", "MB/s", "first batch"):
        table.add_column(name, justify="right")
    for one in loading:
        rate = one.samples_per_s
        first = f"{one.first_batch_s * 1e3:,.0f} ms"
        table.add_row(f"  {one.name}", f"{rate:,.0f}", f"{rate * LENGTH / 1e6:.2f}", first)
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count else "-"


def _memory_text(run: RunResult) -> str:
    workers = run.worker_peak_bytes
    text = _megabytes(run.peak_bytes)
    return f"{text} + workers {_megabytes(sum(workers))}" if workers else text


def verdict(ours: RunResult, theirs: RunResult, loading: Sequence[LoadingResult]) -> Iterator[str]:
    """What the figures say, one sentence each."""
    yield _training_verdict(ours, theirs)
    alone = [one for one in loading if one.torch_workers is None]
    by_torch = [one for one in loading if one.torch_workers is not None]
    if alone and by_torch:
        yield _loading_verdict(alone[0], max(by_torch, key=lambda one: one.samples_per_s))
    yield (
        "'Waiting' is the time in next() after the first batch, on rank 0. MB are bytes of text, without the "
        "overlap of one byte between samples. One run each on this machine, files in the page cache: "
        "expect several per cent of noise."
    )
    yield (
        "torch's side is a hand-written dataset over mapped files, with a full permutation of the samples; "
        "it has no exact resume, which is what the second section is about."
    )


def _training_verdict(ours: RunResult, theirs: RunResult) -> str:
    slower = max(ours.waiting_share, theirs.waiting_share)
    if slower < _SMALL_SHARE:
        return (
            "Training: the model is the limit. Both loaders keep up, so no loader could make this training "
            "faster, and a difference in samples/s is noise or their use of the cores."
        )
    name = "dataflow" if ours.waiting_share > theirs.waiting_share else "torch's loader"
    return f"Training: {name} made the training wait for {slower:.0%} of its time."


def _loading_verdict(ours: LoadingResult, best: LoadingResult) -> str:
    ratio = ours.samples_per_s / best.samples_per_s
    same = ours.checksum == best.checksum and ours.samples == best.samples
    samples = "the same samples" if same else "NOT the same samples"
    if abs(ratio - 1) < _SMALL_SHARE:
        return f"Loading alone: both deliver {samples} at the same speed ({best.name})."
    how = f"{ratio:.1f} times as fast as" if ratio > 1 else f"{1 / ratio:.1f} times slower than"
    return f"Loading alone: dataflow delivers {samples} {how} {best.name} (start included)."


def show_end(console: Console, seconds: float, folder: str | None) -> None:
    """How long it took, and where things are."""
    console.print(f"\n  done in {seconds:.0f} s; the training loop is {demo_train.__file__}", soft_wrap=True)
    if folder:
        console.print(f"  shards and checkpoint are in {folder}", soft_wrap=True)
