"""The HTML page of `dataflow doctor`: verdict, tables, and two drawings by matplotlib (extra: plot)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataflow import pictures
from dataflow.doctor.diagnosis import PARTS, Part
from dataflow.doctor.records import RankRecord
from dataflow.doctor.report import NAMES, Report

_COLOURS: dict[Part, str] = {
    "compute": "#2060a0",
    "data": "#c06020",
    "network": "#a02050",
    "straggler": "#808080",
    "optimizer": "#408040",
}
_RANKS = 64


def write_page(report: Report, records: Sequence[RankRecord], path: str) -> None:
    """Write the page. `ImportError`, which names the extra, without matplotlib."""
    drawing = io.StringIO()
    _drawn(report, records).savefig(drawing, format="svg")
    svg = drawing.getvalue()
    Path(path).write_text(_page(report, svg[svg.index("<svg") :]))


def _drawn(report: Report, records: Sequence[RankRecord]) -> Any:
    shown = report.ranks[:_RANKS]
    figure = pictures.figure_class()(figsize=(11, 4 + 0.25 * len(shown)), layout="constrained")
    bars, lines = figure.subplots(2, 1)
    left = np.zeros(len(shown))
    for part in PARTS:
        width = np.array([one.shares[part] for one in shown]) * 100
        bars.barh([str(one.rank) for one in shown], width, left=left, color=_COLOURS[part], label=NAMES[part])
        left += width
    bars.set(title="where each rank's time went", xlabel="%", ylabel="rank", xlim=(0, 100))
    bars.invert_yaxis()
    bars.legend(frameon=False, ncols=len(PARTS), fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.2))
    for record in records[:_RANKS]:
        numbers = [one.window for one in record.windows[1:]]
        own = [one.own_s * 1e3 for one in record.windows[1:]]
        lines.plot(numbers, own, linewidth=0.8, label=f"rank {record.rank}")
    lines.set(
        title="until each rank had its own gradients: the highest keeps the others waiting",
        xlabel="window",
        ylabel="ms",
        ylim=(0, None),
    )
    if len(records) <= 8:
        lines.legend(frameon=False)
    return figure


def _page(report: Report, svg: str) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(NAMES[part])}</td><td>{report.shares[part]:.1%}</td>"
        f"<td>{_gain(report.gains.get(part))}</td></tr>\n"
        for part in PARTS
    )
    head, _, action = str(report.advice).partition("\n")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dataflow doctor</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} td, th {{ padding: 2px 12px; text-align: right }}
td:first-child {{ text-align: left }} svg {{ max-width: 100%; height: auto }}</style></head>
<body><h1>{html.escape(head)}</h1><p>{html.escape(action)}</p>
<table><tr><th>where a step's time goes</th><th>share</th><th>faster, at most, with it gone</th></tr>
{cells}</table>
{svg}
<pre>{html.escape(str(report))}</pre></body></html>
"""


def _gain(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f} x"
