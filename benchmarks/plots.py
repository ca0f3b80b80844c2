"""Draw results into docs/images: those of the network lab, of `benchmarks.order.convergence`, of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from matplotlib.figure import Figure

from benchmarks import REPOSITORY

_GREY, _BLUE, _RED = "#b0b0b0", "#2060a0", "#c04020"


def io_gate(found: dict[str, Any]) -> Figure:
    """Each window of each way in the order they came, and their mean with its 95 % interval, by regime."""
    regimes = found["regimes"]
    figure = Figure(figsize=(8, 1 + 1.4 * len(regimes)), layout="constrained")
    axes = figure.subplots(len(regimes), squeeze=False)[:, 0]
    for axis, (name, regime) in zip(axes, regimes.items(), strict=True):
        arms = list(regime["windows"])
        for place, arm in enumerate(arms):
            seconds = [window[0] for window in regime["windows"][arm]]
            # Side by side within a row: windows differ less than dots are wide.
            across = [place - 0.3 + 0.6 * number / len(seconds) for number in range(len(seconds))]
            axis.plot(seconds, across, ".", color=_GREY, markersize=4)
            mean, low, high = regime["arms"][arm]["mean_window_s"]
            axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", capsize=4, color=_BLUE)
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1].set_xlabel("window, s (dots: windows, the first on top; mean and its 95 % interval)")
    return figure


def controller(found: dict[str, Any]) -> Figure:
    """Each window of each arm in the order they came, and where the controller changed its mode."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for (arm, times), color in zip(found["windows_ms"].items(), (_GREY, _RED, _BLUE), strict=True):
        axis.plot(times, ".", color=color, markersize=3, label=arm)
    for window, _ in found["controller_turns"][1:]:
        axis.axvline(window, color=_BLUE, linewidth=0.3)
    axis.set_yscale("log")
    axis.set_xlabel("window (lines: the controller changes its mode, trials included)")
    axis.set_ylabel("window, ms")
    axis.legend(markerscale=4, fontsize=8)
    return figure


def cost_model(found: dict[str, Any]) -> Figure:
    """Predicted over measured seconds of each all-reduce by its size."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(row["algorithm"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["algorithm"] == name]
        ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
        axis.plot([row["bytes"] for row in rows], ratios, "o-", markersize=4, linewidth=1, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("bytes reduced")
    axis.set_ylabel("predicted / measured")
    axis.legend(fontsize=8)
    return figure


def convergence(found: dict[str, Any]) -> Figure:
    """Mean and 95 % interval of each order's paired difference from the full shuffle, with every seed."""
    rows = [row for row in found["summary"] if row["arm"] != "full"]
    full = {run["seed"]: run["loss"] for run in found["runs"] if run["arm"] == "full"}
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        seeds = [
            run["loss"] - full[run["seed"]]
            for run in found["runs"]
            if run["arm"] == row["arm"] and run["seed"] in full
        ]
        axis.plot(seeds, [place] * len(seeds), ".", color=_GREY, markersize=4)
        loss = row["loss"]
        axis.errorbar(loss["difference"], place, xerr=loss["half_interval"], fmt="o", capsize=4, color=_BLUE)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=0.03)
    axis.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("final test loss, difference from the full shuffle (95 % interval; dots: seeds)")
    return figure


def training(found: dict[str, Any]) -> Figure:
    """Images a second of a training on a GPU with each loader, and of the same training on one batch."""
    rates = {row["loader"]: row["samples_per_s"] for row in found["medians"]}
    perfect = rates["one batch"]
    figure = Figure(figsize=(8, 1.9), layout="constrained")
    axis = figure.subplots()
    names = {
        "one batch": "one resident batch",
        "dataflow": "dataflow",
        "torch": "torch DataLoader, 16 workers",
    }
    shown = [(label, rates[name]) for name, label in names.items() if name in rates]
    bars = axis.barh(*zip(*shown, strict=True), color=[_GREY, _BLUE, _RED])
    axis.bar_label(bars, [f"{rate:,.0f} ({rate / perfect:.0%})" for _, rate in shown], padding=4, fontsize=9)
    axis.set_xlim(0, perfect * 1.2)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(f"images/s, ViT-S/16 on one {found['gpu']}")
    return figure


_PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "io-gate": io_gate,
    "controller": controller,
    "cost-model": cost_model,
    "convergence": convergence,
    "training": training,
}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(_PLOTS)), metavar="[RESULT]...")
def main(names: tuple[str, ...]) -> None:
    """Draw the results of these names; all by default. Needs the extra `plot`."""
    for name in names or _PLOTS:
        found = json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}.json").read_text())
        _PLOTS[name](found).savefig(REPOSITORY / "docs" / "images" / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
