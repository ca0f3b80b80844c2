"""The HTML page of `dataflow doctor`: verdict, tables, and two drawings by matplotlib (extra: plot)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.timing.diagnosis import Part
from dataflow.timing.records import RankRecord
from dataflow.timing.report import RankReport, Report, loader_text
from dataflow.tools.terminal import pictures

_COLOURS: dict[Part, str] = {
    "compute": "#3b6ea8",
    "data": "#d07a2d",
    "network": "#b0355f",
    "straggler": "#8a8a8a",
    "optimizer": "#4b8b4b",
}
_RANKS = 64
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin: 0 } h2 { font-size: 1.1em; margin: 2em 0 .4em }
header { border-left: 6px solid; padding: .2em 1em } header p { margin: .3em 0 } .facts, li { color: #555 }
.bar { display: flex; height: 1.6em; border-radius: 3px; overflow: hidden; margin: 1em 0 .6em }
table { border-collapse: collapse } th { font-weight: 600; color: #555 }
th, td { padding: .25em .9em; text-align: right; border-bottom: 1px solid #e4e4e4 }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.dot { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em }
svg { max-width: 100%; height: auto }
"""


def write_page(report: Report, records: Sequence[RankRecord], path: str) -> None:
    """Write the page. `ImportError`, which names the extra, without matplotlib."""
    drawing = io.StringIO()
    _drawn(report, records).savefig(drawing, format="svg")
    svg = drawing.getvalue()
    Path(path).write_text(_page(report, svg[svg.index("<svg") :]))


def _drawn(report: Report, records: Sequence[RankRecord]) -> Any:
    shown = report.ranks[:_RANKS]
    tall = 0.8 + 0.25 * len(shown)
    figure = pictures.figure_class()(figsize=(11, 4 + tall), layout="constrained")
    bars, lines = figure.subplots(2, 1, height_ratios=(tall, 3))
    left = np.zeros(len(shown))
    for part in report.names:
        width = np.array([one.shares[part] for one in shown]) * 100
        bars.barh([str(one.rank) for one in shown], width, left=left, color=_COLOURS[part])
        left += width
    bars.set(title="where each rank's time went", xlabel="%", ylabel="rank", xlim=(0, 100))
    bars.invert_yaxis()
    for record in records[:_RANKS]:
        numbers = [one.window for one in record.windows[1:]]
        own = [(one.own_s if report.in_schedule else one.data_s) * 1e3 for one in record.windows[1:]]
        lines.plot(numbers, own, linewidth=0.8, label=f"rank {record.rank}")
    if report.in_schedule:
        title, unit = "until each rank had its own gradients: the highest keeps the others waiting", "window"
    else:
        title, unit = "what each rank waited for a batch", "batch"
    lines.set(title=title, xlabel=unit, ylabel="ms", ylim=(0, None))
    if len(records) <= 8:
        lines.legend(frameon=False)
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _page(report: Report, svg: str) -> str:
    action = str(report.advice).partition("\n")[2]
    bar = "".join(
        f'<div style="width: {report.shares[part]:.2%}; background: {_COLOURS[part]}"></div>'
        for part in report.names
    )
    parts = [
        (f'<span class="dot" style="background: {_COLOURS[part]}"></span>{escape(name)}', *_of(report, part))
        for part, name in report.names.items()
    ]
    ranks = [_rank_row(report, one) for one in report.ranks]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dataflow doctor</title><style>{_STYLE}</style></head>
<body><header style="border-color: {_COLOURS[report.bound]}"><h1>{escape(report.advice.verdict)}</h1>
<p>{escape(action)}</p><p class="facts">{escape(report.facts)}</p></header>
<div class="bar">{bar}</div>
{_table(("where a step's time goes", "share", "faster, at most, with it gone"), parts)}
<h2>Ranks</h2>
{_table(("rank", "host", "ms", *report.headings, "loader"), ranks)}
{svg}
<ul>{"".join(f"<li>{escape(line)}</li>" for line in report.notes)}</ul></body></html>
"""


def _of(report: Report, part: Part) -> tuple[str, str]:
    gain = report.gains.get(part)
    return f"{report.shares[part]:.1%}", "-" if gain is None else f"{gain:.2f} x"


def _rank_row(report: Report, one: RankReport) -> tuple[str, ...]:
    shares = (f"{one.shares[part]:.0%}" for part in report.names)
    return (
        f"{one.rank} *" if report.is_critical(one) else f"{one.rank}",
        escape(one.host),
        f"{one.window_s.p50 * 1e3:,.1f}",
        *shares,
        loader_text(one.loader),
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
