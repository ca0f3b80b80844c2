"""The endpoint for Prometheus: what it answers, to whom, and that no client or port touches a training."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import dataflow.telemetry.serving.serve as serve_module
import dataflow.telemetry.status.page as page_module
from dataflow import DataLoader, serve_metrics
from dataflow.stats import StatsSnapshot
from dataflow.telemetry.serving.endpoint import NodeAnswers, exposition
from dataflow.telemetry.serving.instruments import all_instruments, loader_instruments, points_of
from dataflow.telemetry.serving.serve import MetricsEndpoint, checked_address
from dataflow.telemetry.status.page import StatusFile
from dataflow.telemetry.status.reading import read_pages
from dataflow.telemetry.status.record import TrainingRecord, from_json
from dataflow.telemetry.timing.health import health_of, liveness, readiness

pytestmark = pytest.mark.timeout(60)
pytest.importorskip("prometheus_client")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> TrainingRecord:
    """What a loader's page says after two of its batches."""
    folder = tmp_path_factory.mktemp("run") / "dataflow"
    page = StatusFile(lambda: [folder])
    page.due = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "_page", page)
        batches = iter(DataLoader(range(8), batch_size=2, name='web "1"'))
        next(batches)
        page.due = 0.0
        next(batches)
    [record] = read_pages([folder])
    return record


def of_ranks(record: TrainingRecord, *states: str, **changes: object) -> list[TrainingRecord]:
    """Records of the ranks of a job, with these states."""
    return [
        msgspec.structs.replace(
            record,
            rank=rank,
            pid=100 + rank,
            state=state,
            local_world_size=len(states),
            loaders=tuple(msgspec.structs.replace(one, rank=rank, **changes) for one in record.loaders),
        )
        for rank, state in enumerate(states)
    ]


# ---- instruments ----------------------------------------------------------------------------------------


def test_every_number_of_stats_but_rates_and_shares_is_an_instrument(record: TrainingRecord) -> None:
    loader = DataLoader(range(4))
    names = {name for name in loader.stats().flat() if not name.endswith(("_per_s", "_share"))}
    assert isinstance(loader.stats(), StatsSnapshot)
    assert names <= loader_instruments().keys()


def test_instruments_have_their_own_names_units_and_descriptions() -> None:
    every = all_instruments()
    assert len({one.name for one in every}) == len({one.prometheus_name for one in every}) == len(every)
    assert all(one.description and one.unit for one in every)
    by_name = {one.name: one for one in every}
    read = by_name["dataflow.loader.read.busy"]
    assert (read.kind, read.unit, read.prometheus_name) == (
        "counter",
        "s",
        "dataflow_loader_read_busy_seconds",
    )
    assert by_name["dataflow.loader.memory.peak_bytes"].kind == "gauge"
    assert by_name["dataflow.loader.samples"].unit == "{sample}"


def test_labels_are_rank_node_dataset_and_role(record: TrainingRecord) -> None:
    _, text = exposition([record])
    line = next(one for one in text.decode().splitlines() if one.startswith("dataflow_loader_batches_total"))
    assert line == 'dataflow_loader_batches_total{dataset="web \\"1\\"",node="0",rank="0",role="train"} 2.0'


def test_a_dead_rank_is_down_and_its_gauges_are_gone(record: TrainingRecord) -> None:
    points = list(points_of(of_ranks(record, "running", "died")))
    up = {one.attributes["rank"]: one.value for one in points if one.instrument.name == "dataflow.up"}
    kinds = {one.instrument.kind for one in points if one.attributes["rank"] == "1"}
    assert up == {"0": 1.0, "1": 0.0}
    assert kinds == {"counter", "gauge"}  # the one gauge is `up`
    gauges = {one.instrument.name for one in points if one.attributes["rank"] == "1"} & {
        one.name for one in all_instruments() if one.kind == "gauge"
    }
    assert gauges == {"dataflow.up"}


def test_counts_go_on_from_those_of_the_training_before(record: TrainingRecord) -> None:
    [after] = of_ranks(record, "running", offset={"batches": 40.0})
    [batches] = [one.value for one in points_of([after]) if one.instrument.name == "dataflow.loader.batches"]
    assert batches == 42


# ---- health ---------------------------------------------------------------------------------------------


def test_a_rank_lives_while_one_of_its_loaders_has_batches(record: TrainingRecord) -> None:
    now = record.last_batch_at
    assert liveness([record], now + 599, 600) == (True, "rank 0: alive")
    is_alive, text = liveness([record], now + 601, 600)
    assert not is_alive
    assert text.startswith("rank 0: no batch was taken for 601 s, more than 600:")
    [ended] = of_ranks(record, "running", state="ended")
    assert liveness([ended], now + 10_000, 600)[0]
    assert liveness(of_ranks(record, "running", "ended"), now, 600) == (True, "rank 0: alive\nrank 1: ended")
    is_alive, text = liveness(of_ranks(record, "running", "died"), now, 600)
    assert (is_alive, text) == (False, "rank 0: alive\nrank 1: process 101 died")


def test_a_node_is_ready_when_all_its_ranks_had_a_batch(record: TrainingRecord) -> None:
    ranks = of_ranks(record, "running", "running")
    assert readiness(ranks)[0]
    assert readiness(ranks[:1]) == (False, "1 of 2 ranks of this node had their first batch")
    assert not readiness([])[0]


def test_health_says_what_is_wrong(record: TrainingRecord) -> None:
    [starving] = of_ranks(record, "running", stats={"stall_share": 0.4})
    [loader] = starving.loaders
    health = health_of(loader, loader.last_batch_at + 1)
    assert (health.is_alive, health.is_ready, health.last_batch_s) == (True, True, 1.0)
    assert str(health).startswith("the training waits 40% of its time for data")


@pytest.mark.parametrize("counts", [True, False], ids=["with a page", "without one"])
def test_a_loaders_health_says_what_helps_as_the_doctor_does(
    monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    monkeypatch.setenv("DATAFLOW_LIVE", "1" if counts else "0")
    loader = DataLoader(range(8), batch_size=2)
    batches = iter(loader)
    next(batches)
    counted = replace(loader.stats(), elapsed_s=2.0, starved_s=0.9)
    monkeypatch.setattr(type(loader._engine._state), "stats", lambda _: counted)  # type: ignore[union-attr]
    health = loader.health()
    assert health.is_alive
    assert health.stall_share == 0.45
    assert str(health) == (
        "the training waits 45% of its time for data; next: make batches beside the training: "
        "DataLoader(num_workers=...), it has none"
    )


# ---- answers --------------------------------------------------------------------------------------------


def test_an_endpoint_answers_for_the_ranks_of_its_own_job(record: TrainingRecord) -> None:
    own = of_ranks(record, "running", "running")
    other = msgspec.structs.replace(own[0], pid=7, job="another")
    restarted = msgspec.structs.replace(own[1], pid=8, state="died")
    endpoint = NodeAnswers((100, own[0].start_ticks), read=lambda: [other, restarted, *own])
    assert endpoint.records() == own
    status, _, body = endpoint.answer("GET", "/figures")
    assert (status, from_json(body)) == (200, own)
    answers = {path: endpoint.answer("GET", path)[0] for path in ("/metrics?x=1", "/", "/readyz", "/other")}
    assert answers == {"/metrics?x=1": 200, "/": 200, "/readyz": 200, "/other": 404}
    assert endpoint.answer("POST", "/metrics")[0] == 405
    assert NodeAnswers((1, 1), read=lambda: [other]).records() == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        (9400, ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_an_address_is_loopback_unless_it_says_otherwise(given: str | int, meant: tuple[str, int]) -> None:
    assert checked_address(given) == meant


@pytest.mark.parametrize("given", ["host", "host:", "1:2:x", "127.0.0.1:70000", ""])
def test_what_is_no_address_is_an_error(given: str) -> None:
    with pytest.raises(ValueError, match="an address is 'host:port' or a port"):
        serve_metrics(given)


# ---- the process ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsEndpoint]:
    """An endpoint over a training of this process."""
    runtime = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        patch.setattr(page_module, "_page", page := StatusFile())
        page.due = 0.0
        with serve_metrics("127.0.0.1:0") as endpoint:
            next(iter(DataLoader(range(8), name="served")))
            yield endpoint
            page.close()


def got(endpoint: MetricsEndpoint, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{endpoint.address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_process_of_its_own_serves_what_this_one_writes(served: MetricsEndpoint) -> None:
    status, text = got(served, "/metrics")
    assert status == 200
    assert 'dataflow_loader_batches_total{dataset="served",node="0",rank="0",role="train"} 1.0' in text
    assert (got(served, "/healthz"), got(served, "/readyz")[0]) == ((200, "rank 0: alive\n"), 200)
    assert served._process is not None
    maps = Path(f"/proc/{served._process.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_clients_that_hang_or_speak_no_http_do_not_keep_others_waiting(served: MetricsEndpoint) -> None:
    host, _, port = served.address.rpartition(":")
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(3)
        ]
        slow[0].sendall(b"GET /met")
        slow[1].sendall(b"\x16\x03\x01\r\n\r\n")
        slow[2].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")  # and never reads
        assert got(served, "/metrics")[0] == 200
        assert b" 400 " in slow[1].recv(100)


def test_any_number_of_silent_clients_do_not_keep_out_one_that_asks(served: MetricsEndpoint) -> None:
    host, _, port = served.address.rpartition(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(40)
        ]
        assert got(served, "/healthz")[0] == 200
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest is ended"


def test_a_page_of_somebody_else_whose_name_points_here_is_refused(served: MetricsEndpoint) -> None:
    answers = {}
    for host in ("localhost:1", "127.0.0.1", "evil.example:9400"):
        request = urllib.request.Request(f"http://{served.address}/figures", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                answers[host] = answer.status
        except urllib.error.HTTPError as error:
            answers[host] = error.code
    assert answers == {"localhost:1": 200, "127.0.0.1": 200, "evil.example:9400": 403}


def test_a_port_in_use_is_told_with_who_has_it(
    served: MetricsEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    page_module.page_of_process().event()
    second = serve_metrics(served.address)
    assert second.address == ""
    assert f"Address already in use: process {os.getpid()}" in second.reason
    assert [one.getMessage() for one in caplog.records] == [second.reason]


def test_other_local_ranks_and_trainings_without_a_page_serve_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with monkeypatch.context() as patch:
        for name, value in ranks.items():
            patch.setenv(name, value)
        assert serve_metrics(0).reason == "this is local rank 1, and local rank 0 serves"
    monkeypatch.setenv("DATAFLOW_LIVE", "0")
    assert serve_metrics(0).reason == "DATAFLOW_LIVE=0: this training writes no figures"


def test_an_environment_that_cannot_be_served_is_told_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_module, "_page", page := StatusFile(lambda: [tmp_path / "dataflow"]))
    page.due = 0.0
    monkeypatch.setenv("DATAFLOW_METRICS", "nowhere")
    assert len(list(DataLoader(range(4)))) == 4
    [line] = caplog.records
    assert "DATAFLOW_METRICS=nowhere: metrics are not served: an address is" in line.getMessage()
    monkeypatch.setattr(serve_module, "_NEEDED", "no_such_package")
    with pytest.raises(ImportError, match=r"pip install 'dataflow-loader\[metrics\]'"):
        serve_metrics(0)


def test_the_endpoint_ends_with_the_training(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from dataflow.telemetry.serving.serve import serve_metrics\n"
        "print(serve_metrics(0)._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        pidfd = os.pidfd_open(int(training.stdout.readline()))
        training.communicate("", timeout=30)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
