"""Draw a result of `benchmarks.io_gate`: `python -m benchmarks.io_gate_plot RESULTS.json OUT.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main(results: str, out: str) -> None:
    """Each window of each way in the order they came, and their mean with its 95 % interval, by regime."""
    regimes = json.loads(Path(results).read_text())["regimes"]
    figure = Figure(figsize=(8, 1 + 1.4 * len(regimes)), layout="constrained")
    for axis, (name, found) in zip(
        figure.subplots(len(regimes), squeeze=False)[:, 0], regimes.items(), strict=True
    ):
        arms = list(found["windows"])
        for place, arm in enumerate(arms):
            seconds = [window[0] for window in found["windows"][arm]]
            # Side by side within a row: windows differ less than dots are wide.
            across = [place - 0.3 + 0.6 * number / len(seconds) for number in range(len(seconds))]
            axis.plot(seconds, across, ".", color="#b0b0b0", markersize=4)
            mean, low, high = found["arms"][arm]["mean_window_s"]
            ends = [[mean - low], [high - mean]]
            axis.errorbar(mean, place, xerr=ends, fmt="o", capsize=4, color="#2060a0")
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.set_title(name, loc="left", fontsize=9)
    axis.set_xlabel("window, s (dots: windows, the first on top; mean and its 95 % interval)")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
