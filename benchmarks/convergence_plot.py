"""Draw a result of `benchmarks.convergence`: `python -m benchmarks.convergence_plot RESULTS.json OUT.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main(results: str, out: str) -> None:
    """Mean and 95 % interval of each order's paired difference from the full shuffle, with every seed."""
    found = json.loads(Path(results).read_text())
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
        axis.plot(seeds, [place] * len(seeds), ".", color="#b0b0b0", markersize=4)
        loss = row["loss"]
        axis.errorbar(
            loss["difference"], place, xerr=loss["half_interval"], fmt="o", capsize=4, color="#2060a0"
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=0.03)
    axis.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("final test loss, difference from the full shuffle (95 % interval; dots: seeds)")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
