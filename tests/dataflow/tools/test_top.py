"""`dataflow top`: what two pages say, what holds a training up, and what is said where none runs."""

from __future__ import annotations

import http.client
import io
import json
import os
import platform
import pwd
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from servers_kit import served

from dataflow.telemetry.status.reading import boot_id
from dataflow.telemetry.status.record import (
    LoaderRecord,
    ScheduleRecord,
    StatusDecision,
    TrainingRecord,
    to_page,
)
from dataflow.tools.cli import main
from dataflow.tools.top import sources
from dataflow.tools.top.command import first_view
from dataflow.tools.top.page import PAGE, SCRIPT
from dataflow.tools.top.screen import screen_of
from dataflow.tools.top.sources import Endpoint, Reading
from dataflow.tools.top.view import Follower, TopView, TrainingView
from dataflow.tools.top.web import page_server, payload_of
from sharding.errors import DataflowError

BEGAN_AT = 1_000_000.0


def stats(at_s: float, *, waited: float = 0.0, read: float = 0.0, build: float = 0.0) -> dict[str, Any]:
    """Figures of a loader over shards after so many seconds: 100 batches a second, of 32 samples.

    `waited`, `read` and `build` are shares of the time.
    """
    stage = {"tasks": 1, "queued": 0, "cpu_s": 0.0, "threads": 2}
    return {
        "elapsed_s": at_s,
        "starved_s": at_s * waited,
        "batches": int(100 * at_s),
        "samples": int(3200 * at_s),
        "read_bytes": int(1e6 * at_s),
        "delivered_bytes": 0,
        "workers": "thread",
        "depth_reason": "",
        "in_flight_limit": 0,
        "ready_batches": 3,
        "depth": 8,
        "skipped_samples": 0,
        "cache": {"hits": 3, "misses": 1},
        "faults": {"retries": 2},
        "memory": {"limit_bytes": 1000, "ready_bytes": 500, "peak_bytes": 900},
        "read": {**stage, "busy_s": 2 * at_s * read},
        "build": {**stage, "busy_s": 2 * at_s * build},
    }


def record(
    at_s: float, *, rank: int = 0, world_size: int = 1, name: str = "images", **more: Any
) -> TrainingRecord:
    """A page after so many seconds of training."""
    shares = {key: more.pop(key) for key in ("waited", "read", "build") if key in more}
    loader = LoaderRecord(
        name=name,
        role="train",
        state="running",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        node=0,
        epoch=2,
        loop_batches=7,
        loop_length=500,
        began_at=BEGAN_AT,
        last_batch_at=BEGAN_AT + at_s,
        kind="LoaderStats",
        stats=stats(at_s, **shares),
        offset={},
        decisions=more.pop("decisions", ()),
    )
    page = {
        "version": 1,
        "pid": 4000 + rank,
        "start_ticks": 1,
        "boot_id": "another machine",
        "host": "node7",
        "job": "job",
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "local_world_size": world_size,
        "node": 0,
        "program": "train.py",
        "dataflow": "0.1.0",
        "cores": 8.0,
        "began_at": BEGAN_AT,
        "written_at": BEGAN_AT + at_s,
        "state": "running",
        "error": "",
        "loaders": (loader,),
    }
    return TrainingRecord(**{**page, **more})


@dataclass
class Read:
    """A source that gives what a test says, and a clock."""

    readings: list[Reading] = field(default_factory=list)
    now_s: float = 0.0

    def read(self) -> Reading:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def nothing(self, reading: Reading) -> str:
        return "nothing runs"

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def follower(self) -> Follower:
        return Follower(self, lambda: self.now_s, lambda: BEGAN_AT + self.now_s)


def views(*readings: list[TrainingRecord]) -> list[TopView]:
    """What is shown after each reading, a second after the other."""
    source = Read([Reading(records) for records in readings])
    follower, shown = source.follower(), []
    for _ in readings:
        shown.append(follower.view())
        source.wait(1.0)
    return shown


def after(*readings: list[TrainingRecord]) -> TrainingView:
    """The training after the last of some readings."""
    [training] = views(*readings)[-1].trainings
    return training


def text_of(view: TopView, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen_of(view, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- rates and the bottleneck ------------------------------------------------------------------------------


def test_rates_are_the_differences_of_two_pages() -> None:
    first, second = views([record(10)], [record(12, waited=0.25)])
    assert first.trainings[0].samples_per_s is None
    [training] = second.trainings
    [row] = training.loaders
    assert training.samples_per_s == row.samples_per_s == pytest.approx(3200)
    assert training.batches_per_s == row.batches_per_s == pytest.approx(100)
    assert row.waiting == 1.0  # 3 s more in 2 s
    assert (row.read_bytes_per_s, row.cache_hits, row.faults) == (pytest.approx(1e6), 0.75, 2)
    assert (row.ready, row.depth, row.memory_bytes, row.memory_limit) == (3, 8, 500, 1000)


@pytest.mark.parametrize(
    ("shares", "where"),
    [
        ({"waited": 0.5, "read": 0.95, "build": 0.2}, "store"),
        ({"waited": 0.5, "read": 0.2, "build": 0.95}, "decoding and transforms"),
        ({"waited": 0.5, "read": 0.1, "build": 0.1}, "read-ahead"),
        ({"waited": 0.0, "read": 0.1, "build": 0.1}, "training"),
    ],
)
def test_the_bottleneck_is_the_one_that_doctor_names(shares: dict[str, float], where: str) -> None:
    training = after(*[[record(at, **shares)] for at in (10, 11, 12)])
    assert training.where == where
    assert training.shares["data"] == pytest.approx(shares["waited"])
    assert ("data-bound" in training.verdict) == (where != "training" or "not" in training.verdict)
    assert training.action


@pytest.mark.parametrize("first", ["train", "validation"])
def test_of_two_loaders_the_one_that_trains_tells_what_holds_the_training_up(first: str) -> None:
    def both(at_s: float) -> TrainingRecord:
        [train] = record(at_s, waited=0.5).loaders
        often = msgspec.structs.replace(train, name="held out", role="validation", stats=stats(4 * at_s))
        loaders = (train, often) if first == "train" else (often, train)
        return record(at_s, loaders=loaders)

    assert after(*[[both(at)] for at in (10, 11, 12)]).shares["data"] == pytest.approx(0.5)


def test_a_schedule_tells_communication_apart() -> None:
    def schedule(windows: int) -> ScheduleRecord:
        seconds = {"data": 0.01, "peers": 0.0, "compute": 0.1, "exposed": 0.3, "optimizer": 0.01}
        return ScheduleRecord(
            loader="images",
            rank=0,
            world_size=2,
            node=0,
            state="running",
            strategy="all-reduce",
            model="DDP",
            windows=windows,
            steps=windows,
            skipped_steps=0,
            microbatches=4 * windows,
            replays=0,
            seconds={part: value * windows for part, value in seconds.items()},
            window_s=0.42,
            totals={},
            last_step_at=BEGAN_AT,
        )

    training = after(*[[record(at, world_size=2, schedules=(schedule(at),))] for at in (10, 12)])
    assert training.where == "network"
    assert training.shares["network"] == pytest.approx(0.3 / 0.42)


def test_the_rank_that_waits_is_named() -> None:
    ranks = [
        [record(at, rank=rank, world_size=2, waited=0.8 * rank, read=0.9 * rank) for rank in (0, 1)]
        for at in (10, 11, 12)
    ]
    training = after(*ranks)
    assert training.ranks == training.world_size == 2
    assert "most on rank 1" in training.verdict
    assert training.samples_per_s == pytest.approx(6400)


def test_decisions_that_ranks_have_in_common_come_once_with_their_reason() -> None:
    deeper = StatusDecision(at=BEGAN_AT + 5, what="depth", value=16, reason="waits asked for it")
    first = StatusDecision(at=BEGAN_AT, what="workers", value="thread", reason="2 cores")
    both = [record(9, rank=rank, world_size=2, decisions=(first, deeper)) for rank in (0, 1)]
    training = after(both)
    assert [(one.what, one.value, one.ranks) for one in training.decisions] == [
        ("depth", 16, (0, 1)),
        ("workers", "thread", (0, 1)),
    ]
    assert "waits asked for it" in text_of(views(both)[0])


def test_figures_that_nobody_has_sent_before_end_no_view() -> None:
    odd = record(10)
    odd.loaders[0].stats.clear()
    odd.loaders[0].stats.update(elapsed_s="x", read=[], memory=None, batches={}, ready_batches=1e400)
    assert after([odd], [odd]).verdict == ""
    assert text_of(views([odd])[0])


# ---- the end ----------------------------------------------------------------------------------------------


def test_a_training_that_ended_is_shown_with_its_last_figures() -> None:
    over = record(12, state="ended", error="KeyError: 'x'")
    training = after([record(10)], [record(11)], [over])
    assert training.is_over
    assert "ended with KeyError: 'x'," in training.state_text
    assert training.samples_per_s == pytest.approx(3200)
    assert "died without a word" in after([record(10)], [record(11, state="died")]).state_text


def test_a_training_that_takes_no_batches_is_said_to_be_quiet() -> None:
    source = Read([Reading([record(10)]), Reading([record(11)])])
    follower = source.follower()
    follower.view()
    source.wait(1.0)
    assert follower.view().trainings[0].state == "running"
    source.wait(42.0)
    training = follower.view().trainings[0]
    assert (training.state, training.state_text[:21]) == ("quiet", "no batch for 42 s: th")


@pytest.mark.parametrize(("now_s", "state"), [(12.0, "running"), (52.0, "quiet")])
def test_by_the_clock_of_this_machine_a_training_is_quiet_at_first_sight(now_s: float, state: str) -> None:
    source = Read([Reading([record(10, boot_id=boot_id())])], now_s)
    assert source.follower().view().trainings[0].state == state


def test_trainings_that_ended_before_are_not_shown() -> None:
    assert views([record(10, state="ended")])[0].trainings == ()


def test_what_is_printed_once_waits_for_a_second_page() -> None:
    source = Read([Reading([record(10)]), Reading([record(10)]), Reading([record(11)])])
    view = first_view(source.follower(), source.wait)
    assert view.trainings[0].samples_per_s == pytest.approx(3200)
    assert source.now_s == 2.0
    json.dumps(view.to_json())


def test_a_fault_leaves_the_last_figures_and_says_so() -> None:
    source = Read([Reading([record(10)]), Reading((), fault="http://node7:9400 does not answer")])
    follower = source.follower()
    follower.view()
    view = follower.view()
    assert view.runs
    assert "does not answer; what follows is older" in text_of(view)


# ---- where trainings are looked for --------------------------------------------------------------------


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without pages, where this user's would be."""
    folder = tmp_path / "dataflow"
    folder.mkdir(0o700)
    monkeypatch.setattr(sources, "page_folders", lambda: [folder])
    monkeypatch.setattr(sources.tempfile, "gettempdir", lambda: str(tmp_path))
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["top", *arguments])
    return result.exit_code, result.output


def test_without_a_training_it_says_what_to_look_at(nobody: Path) -> None:
    code, said = run("--once")
    assert code == 1
    for part in (str(nobody), "DATAFLOW_LIVE=0", "XDG_RUNTIME_DIR", "dataflow top http://HOST:9400"):
        assert part in said


def test_the_training_that_was_last_there_is_named(nobody: Path) -> None:
    (nobody / "1-1.page").write_bytes(
        to_page(record(10, state="ended", error="OSError: full", host=platform.node()), 1)
    )
    assert "train.py ended" in run("--once")[1]
    assert "with OSError: full" in run("--once")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_trainings_of_others_are_theirs_to_see(nobody: Path) -> None:
    other = pwd.getpwnam("nobody")
    folder = nobody.parent / f"dataflow-{other.pw_uid}"
    folder.mkdir(0o700)
    os.chown(folder, other.pw_uid, -1)
    code, said = run("--once")
    assert code == 1
    assert (
        "Trainings of user nobody can be seen by them and by root only: sudo -u nobody dataflow top" in said
    )


def test_pages_that_cannot_be_read_say_why(nobody: Path) -> None:
    page = to_page(record(10), 1)
    newer = msgspec.json.decode(msgspec.json.encode(record(10))) | {"version": 2}
    (nobody / "1.page").write_bytes(to_page(newer, 1))  # type: ignore[arg-type]
    (nobody / "2.page").write_bytes(page[:-5])
    (nobody / "3.page").write_bytes(b"anything")
    said = run("--once")[1]
    assert "1.page is left out: it was written by another dataflow" in said
    assert "its version is 2, this one reads 1); upgrade here: pip install -U dataflow-loader" in said
    assert "2.page is left out: it is damaged" in said
    assert "3.page is left out: it is no page" in said


# ---- endpoints -----------------------------------------------------------------------------------------


@contextmanager
def answering(*parts: bytes, hold: threading.Event | None = None) -> Iterator[str]:
    """A server that sends some bytes to who asks, and then waits; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(65536)
                for part in parts:
                    client.sendall(part)
                if hold is not None:
                    hold.wait(10)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            if hold is not None:
                hold.set()
            thread.join(10)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body


def test_an_endpoint_gives_the_same_records() -> None:
    with answering(ok(msgspec.json.encode([record(10)]))) as url:
        assert Endpoint(url).read().records == [record(10)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("begun", [b"", b"HTTP/1.0 200 OK\r\n", ok(b"[")])
def test_an_endpoint_that_hangs_is_given_up_in_time(begun: bytes) -> None:
    with answering(begun, hold=threading.Event()) as url:
        fault = Endpoint(url, deadline_s=0.2).read().fault
    assert fault == f"{url} does not answer: nothing whole within 0.2 s"


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"version":' * 200_000,
        b'[{"version": 1, "more": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]",
        b'[{"version": 1' + b"0" * 200_000 + b"}]",
        b"[" + b"[]," * 200_000 + b"[]]",
    ],
)
def test_json_that_is_nested_or_large_is_no_figures(text: bytes) -> None:
    with answering(ok(text)) as url:
        assert "sends no figures of a training" in Endpoint(url).read().fault


def test_an_endpoint_that_is_none_is_told_so() -> None:
    with answering(b"HTTP/1.0 404 Not Found\r\n\r\n") as url:
        assert "it says 404 Not Found; is it a training's endpoint?" in Endpoint(url).read().fault
    for text in (b"<html>", b"[" * 100_000, b'[{"version": ' + b"[" * 100_000):
        with answering(ok(text)) as url:
            assert "sends no figures of a training" in Endpoint(url).read().fault
    with answering(ok(b'[{"version": 7}]')) as url:
        assert (
            "is of a newer dataflow (its pages have version 7, this one reads 1)"
            in Endpoint(url).read().fault
        )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    code, said = run("--once", url)
    assert code == 1
    assert f"{url} does not answer: " in said


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://me:secret@host:9400"])
def test_an_endpoint_has_an_address(url: str) -> None:
    code, said = run("--once", url)
    assert code == 1
    assert "an endpoint must be like http://host:9400" in said
    assert "secret" not in said


# ---- the page ------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """Where the page is served."""
    follower = Read([Reading([record(10)]), Reading([record(11)])]).follower()
    with served(page_server(follower, 0)) as (_, port):
        yield port


def ask(port: int, path: str = "/", *, method: str = "GET", host: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    return connection.getresponse()


def test_the_page_and_its_figures_are_served_with_a_strict_policy(port: int) -> None:
    answer = ask(port)
    assert (answer.status, answer.read().decode()) == (200, PAGE)
    policy = str(answer.getheader("Content-Security-Policy"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    figures = json.loads(ask(port, "/figures.json").read())
    assert figures["trainings"][0]["title"].startswith("train.py: 1 rank on node7")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9401", "127.0.0.1.evil.example", "[::2]:1", "::1"]
)
def test_pages_of_other_names_are_refused(port: int, host: str) -> None:
    assert ask(port, "/figures.json", host=host).status == 403


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:9401", "LOCALHOST"])
def test_this_machine_may_call_itself_what_it_likes(port: int, host: str) -> None:
    assert ask(port, host=host).status == 200


def test_silent_connections_do_not_keep_out_a_browser_that_asks(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert ask(port).status == 200


def test_only_get_is_answered(port: int) -> None:
    assert [ask(port, method=method).status for method in ("POST", "PUT", "HEAD", "ODD")] == [405] * 4
    assert ask(port, "/../etc/passwd").status == 404


def test_a_port_in_use_is_named_with_the_cure(port: int) -> None:
    with pytest.raises(DataflowError, match=f"port {port} on 127.0.0.1 is in use: name another with --port"):
        page_server(Read([]).follower(), port)


def test_names_are_shown_as_they_are_and_obeyed_nowhere() -> None:
    name = "<img src=x onerror=alert(1)>\x1b]0;title\x07[bold]"
    view = views([record(10, name=name, program=name, host=name)])[0]
    shown = text_of(view)
    assert "\x1b" not in shown
    assert "[bold]" in shown
    assert "\x1b" not in json.loads(json.dumps(payload_of(view)))["trainings"][0]["title"]
    assert "innerHTML" not in SCRIPT
    assert "http" not in SCRIPT.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("arguments", [("--web", "--once"), ("--web", "--json", "-"), ("--port", "1")])
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2
