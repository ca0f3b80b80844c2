"""What metrics' own programs make of ours: Prometheus, OpenTelemetry's SDK, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from metrics_ranks import made
from servers_kit import free_port

import dataflow.telemetry.status.page as page_module
from dataflow import DataLoader
from dataflow.telemetry.serving.instruments import all_instruments
from dataflow.telemetry.status.page import StatusFile

pytest.importorskip("lightning", reason="runs with the frameworks: pip install -e '.[ecosystem]'")
pytestmark = pytest.mark.timeout(150)
RANKS = Path(__file__).with_name("metrics_ranks.py")
LIVE = files("dataflow.telemetry.serving")
DEADLINE_S = 80.0


def asked(port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to an instant query; an error raises."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=20) as answer:
        value = json.load(answer)
    assert value["status"] == "success", value
    found: list[dict[str, Any]] = value["data"]["result"]
    return found


def until(port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers once that is anything."""
    ends, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not (found := asked(port, expression)):
        seen = asked(port, '{__name__=~"up|dataflow_up|dataflow_schedule_windows_total"}')
        assert time.monotonic() < ends, f"Prometheus has no answer to {expression}: {seen}"
        pause.wait(0.25)
    return found


@contextlib.contextmanager
def two_ranks(folder: Path) -> Iterator[str]:
    """The address where two ranks that train serve their metrics."""
    made(str(folder))
    port = free_port()
    environment = {**os.environ, "DATAFLOW_METRICS": f":{port}", "XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, RANKS, folder]
    with subprocess.Popen(command, env=environment) as ranks:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            (folder / "stop").touch()
            ranks.wait(60)
    assert ranks.returncode == 0


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[int]:
    """The port of a Prometheus that scrapes a target every half second, with our alerts."""
    port = free_port()
    (folder / "alerts.yaml").write_text(LIVE.joinpath("alerts.yaml").read_text())
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, evaluation_interval: 1s}\n"
        "rule_files: [alerts.yaml]\n"
        "scrape_configs:\n"
        f"  - {{job_name: training, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if "Server is ready to receive web requests" in line:
                    break
            else:
                pytest.fail("".join(lines))
            drain = threading.Thread(target=server.stderr.read)
            drain.start()
            yield port
        finally:
            server.terminate()
            server.wait(20)
        drain.join(20)


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Titles and queries of the dashboard's panels, its variables filled in as Grafana does."""
    dashboard = json.loads(LIVE.joinpath("grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5s")
            for name in ("dataset", "role", "rank"):
                text = text.replace(f"${name}", ".*")
            assert "$" not in text
            yield panel["title"], text


def alert_queries() -> Iterator[tuple[str, str]]:
    yaml = pytest.importorskip("yaml")
    for group in yaml.safe_load(LIVE.joinpath("alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed; tests/servers/install.sh does it"
)
def test_prometheus_answers_every_query_of_dashboard_and_alerts(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as target, prometheus(tmp_path, target) as port:
        until(port, "count(increase(dataflow_schedule_windows_total[20s]) > 4) == 2")
        for title, query in dashboard_queries():
            assert title == "Cache hits" or until(port, query)  # there is no remote store here
        firing = {name: asked(port, expression) for name, expression in alert_queries()}
        del firing["DataflowTrainingWaits"]  # as slow as this machine is now
        del firing["DataflowStragglingRank"]  # it fires, as soon as its rates are those of training
        [straggler] = until(port, dict(alert_queries())["DataflowStragglingRank"])
        assert straggler["metric"]["rank"] == "1"
        assert not any(firing.values()), firing
        labels = {name for name, _ in until(port, "dataflow_loader_batches_total")[0]["metric"].items()}
        assert labels == {"__name__", "dataset", "instance", "job", "node", "rank", "role"}
        roles = {
            (one["metric"]["dataset"], one["metric"]["role"])
            for one in until(port, "dataflow_loader_running")
        }
        assert roles == {("web", "train"), ("numbers/val", "validation")}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with prometheus, not installed")
def test_promtool_finds_no_fault_in_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", str(LIVE.joinpath("alerts.yaml"))], check=True, timeout=30)


LOADER = 'job="j", instance="i", dataset="d", role="train", node="0"'
RUNS = (f'dataflow_loader_running{{{LOADER}, rank="0"}}', "1x60")


def counter(name: str, rate: float, rank: int = 0, more: str = "") -> tuple[str, str]:
    """A counter of a loader that is scraped once a minute, and grows at a rate a second."""
    return f'dataflow_{name}_total{{{LOADER}, rank="{rank}"{more}}}', f"0+{60 * rate:g}x60"


def timestamp(name: str, minute: int) -> tuple[str, str]:
    return f'dataflow_loader_{name}_timestamp_seconds{{{LOADER}, rank="0"}}', f"{60 * minute}x60"


def windows(*seconds: float) -> list[tuple[str, str]]:
    """How busy ranks are with their windows."""
    return [
        counter("schedule_part_seconds", busy, rank, ', part="compute"') for rank, busy in enumerate(seconds)
    ]


EPOCH = (f'dataflow_loader_epoch{{{LOADER}, rank="0"}}', "1x60")
ALERTED = {
    "DataflowTrainingWaits": ([RUNS, counter("loader_starved_seconds", 0.2)], True),
    "DataflowTrainingWaits, but little": ([RUNS, counter("loader_starved_seconds", 0.05)], False),
    "DataflowNoBatch": ([RUNS, timestamp("loop_began", 1), timestamp("last_batch", 2)], True),
    "DataflowNoBatch, in a later epoch": (
        [RUNS, timestamp("loop_began", 9), timestamp("last_batch", 2)],
        True,
    ),
    "DataflowNoBatch, in the first epoch": ([RUNS, timestamp("loop_began", 9)], True),
    "DataflowNoBatch, after a long pause between epochs": (
        [RUNS, timestamp("loop_began", 35), timestamp("last_batch", 2)],
        False,
    ),
    "DataflowRankDown": ([('dataflow_up{job="j", instance="i", rank="1", node="0"}', "0x60")], True),
    "DataflowReadsRetried": ([counter("loader_faults_retries", 2)], True),
    "DataflowReadsRetried, rarely": ([counter("loader_faults_retries", 0.5)], False),
    "DataflowSamplesSkipped": (
        [counter("loader_skipped_samples", 1), counter("loader_samples", 500)],
        True,
    ),
    "DataflowSamplesSkipped, few": (
        [counter("loader_skipped_samples", 0.1), counter("loader_samples", 500)],
        False,
    ),
    "DataflowCacheMisses": (
        [EPOCH, counter("loader_cache_hits", 1), counter("loader_cache_misses", 3)],
        True,
    ),
    "DataflowCacheMisses, few": (
        [EPOCH, counter("loader_cache_hits", 3), counter("loader_cache_misses", 1)],
        False,
    ),
    "DataflowStragglingRank": (windows(0.5, 0.5, 0.9), True),
    "DataflowStragglingRank, a little": (windows(0.5, 0.5, 0.55), False),
}
"""By the alert: series, and whether it fires in minute 40."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with prometheus, not installed")
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = [
        {
            "name": case,
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{case.partition(",")[0]}", alertstate="firing"}})',
                    "eval_time": "40m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for case, (series, fires) in ALERTED.items()
    ]
    (tmp_path / "alerts.yaml").write_text(LIVE.joinpath("alerts.yaml").read_text())
    (tmp_path / "cases.yaml").write_text(json.dumps({"rule_files": ["alerts.yaml"], "tests": tests}))
    assert {name for name, _ in alert_queries()} == {case for case in ALERTED if "," not in case}
    told = subprocess.run(
        ["promtool", "test", "rules", "cases.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_every_metric_that_dashboard_and_alerts_name_is_one() -> None:
    import re

    names = {one.prometheus_name + ("_total" if one.kind == "counter" else "") for one in all_instruments()}
    queries = [*dashboard_queries(), *alert_queries()]
    used = {name for _, query in queries for name in re.findall(r"\bdataflow_\w+", query)}
    assert used <= names


# ---- OpenTelemetry --------------------------------------------------------------------------------------


def test_opentelemetry_reads_the_figures_of_all_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from dataflow.integrations.opentelemetry import instrument

    monkeypatch.setattr(page_module, "_page", StatusFile(lambda: [tmp_path / "run"]))
    reader = InMemoryMetricReader()
    instrument(MeterProvider([reader]))
    loaders = [DataLoader(range(8), batch_size=2, name=name) for name in ("one", "two")]
    for loader in loaders:
        next(iter(loader))
    [resource] = json.loads(reader.get_metrics_data().to_json())["resource_metrics"]
    metrics = {one["name"]: one for one in resource["scope_metrics"][0]["metrics"]}
    points = metrics["dataflow.loader.batches"]["data"]["data_points"]
    assert {one["attributes"]["dataset"]: one["value"] for one in points} == {"one": 1, "two": 1}
    assert metrics["dataflow.loader.batches"]["data"]["is_monotonic"]
    assert metrics["dataflow.loader.starved"]["unit"] == "s"


# ---- loggers --------------------------------------------------------------------------------------------


def test_tensorboard_has_a_row_for_each_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loader = DataLoader(range(8), batch_size=2)
    with SummaryWriter(str(tmp_path)) as writer:
        for step, _ in enumerate(loader):
            for name, value in loader.stats().flat().items():
                writer.add_scalar(f"loader/{name}", value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {f"loader/{name}" for name in loader.stats().flat()} <= set(events.Tags()["scalars"])
    assert [one.value for one in events.Scalars("loader/batches")] == [1, 2, 3, 4]
