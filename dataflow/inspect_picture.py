"""The picture of `dataflow inspect`: a PNG, or one HTML page with the same drawing and the table in it.

matplotlib draws it (`dataflow.pictures`).
"""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow import pictures
from sharding.keyed import keyed_order
from sharding.quality import distinct_per_batch
from sharding.read_cost import open_bytes

if TYPE_CHECKING:
    from dataflow.inspect_command import Inspection

_DOTS = 4000
_COLOURS = {"this plan": "#2060a0", "full shuffle": "#c06020"}


def check_picture(path: str) -> None:
    """Say early what would fail late: `ValueError` for another ending, `ImportError` without matplotlib."""
    pictures.check_picture(path, (".png", ".html"))


def write_picture(found: Inspection, path: str) -> None:
    """Draw it into a file."""
    figure = _drawn(found)
    if path.endswith(".png"):
        figure.savefig(path, dpi=120)
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    with open(path, "w") as file:
        file.write(_page(found, svg[svg.index("<svg") :]))


def _drawn(found: Inspection) -> Any:
    figure = pictures.figure_class()(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    sides = {"this plan": found.plan, "full shuffle": found.full}
    for name, side in sides.items():
        colour, stretch = _COLOURS[name], side.stretch
        at = keyed_order(len(stretch.sample), 0)[:_DOTS]  # even steps would see some lanes only
        axes[0, 0 if name == "this plan" else 1].plot(
            stretch.position[at], stretch.sample[at], ".", markersize=1.5, color=colour
        )
        batches = np.arange(stretch.first_batch, stretch.last_batch)
        shards = distinct_per_batch(stretch, found.catalog.blocks.shard[stretch.block])
        axes[1, 0].plot(batches, shards, linewidth=0.8, color=colour, label=name)
        held = sum(open_bytes(stretch, side.reads, node) for node in range(stretch.num_nodes))
        axes[1, 1].plot(batches, np.asarray(held) / 1e6, linewidth=1, color=colour, label=name)
    for axis, name in zip(axes[0], sides, strict=True):
        axis.set(title=f"{name}: where each position's sample lies", xlabel="position", ylabel="sample")
    axes[1, 0].set(title="distinct shards in a batch", xlabel="batch", ylim=(0, None))
    axes[1, 1].set(title="memory of open windows, all nodes", xlabel="batch", ylabel="MB", ylim=(0, None))
    for axis in axes[1]:
        axis.legend(frameon=False)
    return figure


def _page(found: Inspection, svg: str) -> str:
    from dataflow.inspect_command import rows_of

    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(plan)}</td><td>{html.escape(full)}</td></tr>\n"
        for name, plan, full in rows_of(found)
    )
    catalog, shuffle = found.catalog, found.shuffle
    about = (
        f"{catalog.num_samples:,} samples, {catalog.num_blocks:,} blocks, {catalog.num_shards:,} shards; "
        f"shuffle {shuffle.kind}, {shuffle.num_lanes} lanes, "
        f"window of {shuffle.window_blocks} blocks: {found.window_reason}"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dataflow inspect</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} td, th {{ padding: 2px 12px; text-align: right }}
td:first-child {{ text-align: left }} svg {{ max-width: 100%; height: auto }}</style></head>
<body><h1>dataflow inspect</h1><p>{html.escape(about)}</p>
<table><tr><th></th><th>this plan</th><th>full shuffle</th></tr>
{cells}</table>
{svg}</body></html>
"""
