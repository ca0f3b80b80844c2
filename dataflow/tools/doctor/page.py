"""The page of `dataflow doctor`: verdict, tables, and drawings of every rank's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataflow.telemetry.timing.records import StepRecord
from dataflow.telemetry.timing.report import Report
from dataflow.telemetry.timing.shares import Part
from dataflow.tools.terminal import report as reports
from dataflow.tools.terminal.report import Drawing, Page, Table

_COLOURS: dict[Part, str] = {
    "compute": "#3b6ea8",
    "data": "#d07a2d",
    "network": "#b0355f",
    "straggler": "#8a8a8a",
    "optimizer": "#4b8b4b",
}
_RANKS = 64


def page_of(report: Report, records: Sequence[StepRecord]) -> Page:
    """All of a report, as `report.show` prints it, with drawings."""
    height = 4.8 + 0.25 * len(report.ranks[:_RANKS])
    parts: Sequence[reports.Part] = (
        str(report.advice).partition("\n")[2],
        report.facts,
        *(Table(headings, rows) for headings, *rows in (report.part_rows, report.rank_rows)),
        Drawing(11, height, lambda figure: _draw(report, records, figure)),
        *report.notes,
    )
    return Page(report.advice.verdict, report.to_json(), parts)


def _draw(report: Report, records: Sequence[StepRecord], figure: Any) -> None:
    ranks = report.ranks[:_RANKS]
    bars, lines = figure.subplots(2, 1, height_ratios=(0.8 + 0.25 * len(ranks), 3))
    left = np.zeros(len(ranks))
    for part, name in report.names.items():
        width = np.array([row.shares[part] for row in ranks]) * 100
        bars.barh([str(row.rank) for row in ranks], width, left=left, color=_COLOURS[part], label=name)
        left += width
    bars.set(title="where each rank's time went", xlabel="%", ylabel="rank", xlim=(0, 100))
    bars.invert_yaxis()
    parts = bars.get_legend_handles_labels()
    figure.legend(*parts, loc="outside lower center", ncols=len(report.names), frameon=False)
    for record in records[:_RANKS]:
        numbers = [step.window for step in record.windows[1:]]
        times = [(step.own_s if report.in_schedule else step.data_s) * 1e3 for step in record.windows[1:]]
        lines.plot(numbers, times, linewidth=0.8, label=f"rank {record.rank}")
    title, unit = "what each rank waited for a batch", "batch"
    if report.in_schedule:
        title, unit = "until each rank had its own gradients: the highest keeps the others waiting", "window"
    lines.set(title=title, xlabel=unit, ylabel="ms", ylim=(0, None))
    if len(records) <= 8:
        lines.legend(frameon=False)
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
