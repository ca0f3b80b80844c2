"""What `dataflow bench storage` prints, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from dataflow.tools.bench.percentiles import PERCENTILES, absent_text
from dataflow.tools.bench.reads import Case
from dataflow.tools.bench.storage import Found, Measured, client_is_busy
from dataflow.tools.terminal.indexing import bytes_text
from dataflow.tools.terminal.pictures import figure_class

_HOW = {
    "direct": "local files, around the page cache (O_DIRECT)",
    "buffered": "local files, through the page cache, with the reader that training uses",
    "store": "a remote store, with the reader that training uses",
}


def case_text(case: Case) -> str:
    """Such as "random 2 MiB x 16"."""
    return f"{case.pattern} {size_text(case.block_bytes)} x {case.concurrency}"


def size_text(nbytes: int) -> str:
    """A block size in binary units where it is a round one, else in bytes."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} bytes"


def show(found: Found, console: Console) -> None:
    """Print all figures."""
    head = Table(show_header=False, box=None, pad_edge=False)
    head.add_column(style="bold")
    head.add_column()
    head.add_row("shards", f"{found.shards:,}, {bytes_text(found.stored_bytes)}")
    head.add_row("read", _HOW[found.how])
    first = found.first_byte
    median = first.latency_s["50"]
    later = "-" if median is None else f"{_ms(median)} ms median of {first.reads}"
    what = "byte" if first.nbytes == 1 else bytes_text(first.nbytes)
    head.add_row(f"first {what}", f"{later}; {_ms(first.first_s)} ms the very first time")
    console.print(head)
    console.print(_table(found))
    for line in notes(found):
        console.print(f"- {line}", markup=False)


def _table(found: Found) -> Table:
    # 80 columns: the units stand in the caption.
    caption = "x: reads in flight; p: percentiles of the latency in ms; CPU: this client's seconds a GB"
    table = Table(
        box=None, padding=(0, 1, 0, 0), header_style="bold", caption=caption, caption_justify="left"
    )
    for name in ("order", "block"):
        table.add_column(name, no_wrap=True)
    for name in ("x", "MB/s", "reads/s", *(f"p{name}" for name in PERCENTILES), "CPU", "data"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.cases:
        table.add_row(
            one.case.pattern,
            size_text(one.case.block_bytes),
            str(one.case.concurrency),
            f"{one.mb_per_s:,.1f}",
            f"{one.reads_per_s:,.0f}",
            *(_ms(one.latency_s[name]) for name in PERCENTILES),
            f"{one.cpu_s_per_gb:.2f}",
            one.label.word,
        )
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3g}"


def notes(found: Found) -> Iterator[str]:
    """What a reader of the table must know, one sentence each."""
    for word, cases in _grouped(found, lambda one: one.label.word).items():
        yield f"{word}: {cases[0].label.reason}" + _where(cases, found)
    if found.how == "direct":
        yield "what lies below the block device (a hypervisor's cache, a controller's) cannot be seen"
    few = [one for one in found.cases if None in one.latency_s.values()]
    if few:
        least = min(few, key=lambda one: one.reads)
        yield absent_text(least.latency_s, least.reads)
    for one in found.cases:
        if one.exhausted:
            yield f"{case_text(one.case)} ended after {one.seconds:.2f} s: every block was read once"
    busy = [one for one in found.cases if client_is_busy(one, found.how)]
    if busy:
        why = "a core (of which Python uses one at a time) or all of them had no time left"
        yield f"this client may be the limit, not the store: {why}" + _where(busy, found)
    faults = [one for one in found.cases if any(vars(one.faults).values())]
    if faults:
        yield "reads failed and were tried again (faults in --json)" + _where(faults, found)


def _grouped(found: Found, key: Callable[[Measured], str]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for one in found.cases:
        groups.setdefault(key(one), []).append(one)
    return groups


def _where(cases: list[Measured], found: Found) -> str:
    if len(cases) == len(found.cases):
        return ""
    named = ", ".join(case_text(one.case) for one in cases[:3])
    return f" ({named}{f' and {len(cases) - 3} more' if len(cases) > 3 else ''})"


def write_picture(found: Found, path: str) -> None:
    """Draw throughput, latency and throughput over time into a file."""
    figure = figure_class()(figsize=(13, 4.2), layout="constrained")
    rates, latency, over_time = figure.subplots(1, 3)
    lines = _grouped(found, lambda one: f"{one.case.pattern} {size_text(one.case.block_bytes)}")
    for name, cases in lines.items():
        rates.plot([one.case.concurrency for one in cases], [one.mb_per_s for one in cases], "o-", label=name)
        best = max(cases, key=lambda one: one.mb_per_s)
        _draw_latency(latency, best)
        at = [(i + 0.5) * best.seconds / len(best.mb_per_s_over_time) for i in range(20)]
        over_time.plot(at, best.mb_per_s_over_time, label=case_text(best.case))
    rates.set(title="throughput", xlabel="reads in flight", ylabel="MB/s", ylim=(0, None))
    latency.set(title="latency", xlabel="percentile", ylabel="ms", yscale="log")
    over_time.set(title="throughput over time", xlabel="s", ylabel="MB/s", ylim=(0, None))
    for axis in (rates, latency, over_time):
        axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_latency(axis: Any, one: Measured) -> None:
    known = [(f"p{name}", value * 1e3) for name, value in one.latency_s.items() if value is not None]
    axis.plot([name for name, _ in known], [value for _, value in known], "o-", label=case_text(one.case))
