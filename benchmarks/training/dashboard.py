"""What the Grafana dashboard shows of a training: its panels, drawn from a real Prometheus's answers.

    python -m benchmarks.training.dashboard --seconds 90 --output docs/images/dashboard.png

Two gloo ranks train; rank 1 computes more. Prometheus scrapes their endpoint twice a second. Every query of
`dataflow metrics grafana` is asked over the last seconds, and drawn where the dashboard has its panel.
Grafana itself is not started: colours and fonts are matplotlib's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.parse
import urllib.request
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
COLUMNS = 24
STEP_S = 1


def answers(port: int, query: str, seconds: float) -> list[dict[str, Any]]:
    now = time.time()
    values = {"query": query, "start": now - seconds, "end": now, "step": STEP_S}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(values)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def filled(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def shown(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "percentunit" else f"{value:,.0f}"


def draw(axes: Any, panel: dict[str, Any], port: int, seconds: float) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    series = []
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "10s")
        for name in ("dataset", "role", "rank"):
            query = query.replace(f"${name}", ".*")
        for one in answers(port, query, seconds):
            points = [(float(at), float(value)) for at, value in one["values"]]
            series.append((filled(target["legendFormat"], one["metric"]), points))
    axes.set_title(panel["title"], fontsize=9, loc="left")
    if panel["type"] == "stat":
        axes.axis("off")
        for number, (label, points) in enumerate(series[:3]):
            height = 0.8 - 0.35 * number
            axes.text(0, height, shown(points[-1][1], unit), fontsize=16, va="center")
            axes.text(0.45, height, label, fontsize=8, va="center")
        return
    start = min((points[0][0] for _, points in series), default=0.0)
    for label, points in series:
        axes.plot([at - start for at, _ in points], [value for _, value in points], lw=1, label=label)
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
    if series:
        axes.legend(fontsize=6, frameon=False, loc="best")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="that the ranks train before it is drawn")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    asked = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("ecosystem", "kits")]
    from test_ecosystem_metrics import prometheus, two_ranks, until

    panels = json.loads(files("dataflow.telemetry.serving").joinpath("grafana.json").read_text())["panels"]
    with (
        TemporaryDirectory() as name,
        two_ranks(Path(name)) as target,
        prometheus(Path(name), target) as port,
    ):
        until(port, "count(dataflow_schedule_windows_total) == 2")
        threading.Event().wait(asked.seconds)
        heights = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        figure = plt.figure(figsize=(15, heights * 0.42))
        grid = figure.add_gridspec(heights, COLUMNS, left=0.04, right=0.99, top=0.97, bottom=0.03)
        for panel in panels:
            at = panel["gridPos"]
            rows, columns = slice(at["y"], at["y"] + at["h"] - 1), slice(at["x"], at["x"] + at["w"] - 1)
            axes = figure.add_subplot(grid[rows, columns])
            draw(axes, panel, port, asked.seconds)
        figure.savefig(asked.output, dpi=80)


if __name__ == "__main__":
    main()
