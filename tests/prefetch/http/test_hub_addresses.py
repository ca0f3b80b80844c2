"""Where the bytes of a file on the Hub are, for how long, and who is left alone until when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefetch.http import hub
from prefetch.http.connections import Destination
from prefetch.http.responses import Head
from sharding.http_status import StatusError
from sharding.hub.access import HubAccess

DATE = {"date": "Wed, 25 Nov 2026 12:00:00 GMT"}
NOON = 1795608000


@pytest.mark.parametrize(
    ("query", "seconds"),
    [
        (f"Expires={NOON + 3600}&Signature=s&Key-Pair-Id=k", 3600),
        ("X-Amz-Date=20261125T115900Z&X-Amz-Expires=3600&X-Amz-Signature=s", 3540),
        ("se=2026-11-25T12%3A30%3A00Z&sig=s", 1800),
        (f"Expires={NOON + 60}&X-Amz-Date=20261125T120000Z&X-Amz-Expires=30", 30),
        ("nothing=said", float("inf")),
        ("Expires=soon", float("inf")),
    ],
)
def test_an_address_says_how_long_it_is_signed_for(query: str, seconds: float) -> None:
    head = Head(302, "Found", DATE, True)
    assert hub._seconds_left(f"https://cdn/x?{query}", head) == seconds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Heads of requests, which `answer` in a test answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


class Site:
    """Answers by URL, in place of connections."""

    def __init__(self, answers: Callable[[str, bytes], Head]) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self._answers = answers

    async def request(self, origin: Any, head: bytes, accept: Any, **_: Any) -> None:
        scheme, host, port = origin
        url = f"{scheme}://{host}:{port}{head.split()[1].decode()}"
        self.asked.append((url, head))
        answer = self._answers(url, head)
        dest: Destination = accept(answer)
        dest.put(b"x" * min(len(dest.rest), int(answer.fields.get("content-length", "0"))))


class Repository:
    """As much of the filesystem as reads need."""

    access = HubAccess("https://hub:443", "hf_secret")

    def file_address(self, path: str) -> str:
        return f"https://hub:443/datasets/o/n/resolve/main/{path}"


def head(status: int, **fields: str) -> Head:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return Head(status, "", {"content-length": "4", **DATE, **named}, True)


def read(site: Site, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> bytearray:
    monkeypatch.setattr(hub.Connections, "here", lambda: site)
    out, repository = bytearray(4), Repository()

    async def several() -> None:
        dest = [Destination(memoryview(out), lambda nbytes: None) for _ in range(times)]
        await asyncio.gather(*(hub.hub_body(repository, "f", 0, one, lambda info: None) for one in dest))

    asyncio.run(several())
    return out


@pytest.mark.usefixtures("asked")
def test_a_mirror_may_redirect_several_times_and_the_token_stays_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(url: str, request: bytes) -> Head:
        if url.startswith("https://hub:443/datasets"):
            return head(307, location="/api/resolve-cache/f")
        if url.startswith("https://hub:443/api"):
            return head(302, location="http://mirror:80/f")
        if url.startswith("http://mirror"):
            return head(302, location="http://cdn:80/f?sig=1")
        return head(206, content_range="bytes 0-3/4")

    site = Site(answers)
    assert read(site, monkeypatch) == b"xxxx"
    tokens = [b"hf_secret" in request for _, request in site.asked]
    assert tokens == [True, True, False, False]


@pytest.mark.usefixtures("asked")
def test_reads_of_one_file_share_the_question_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(url: str, request: bytes) -> Head:
        if url.startswith("https://hub"):
            return head(302, location="http://cdn:80/f?sig=1")
        return head(206, content_range="bytes 0-3/4")

    site = Site(answers)
    read(site, monkeypatch, times=5)
    assert sum(url.startswith("https://hub") for url, _ in site.asked) == 1


@pytest.mark.usefixtures("asked")
def test_small_files_come_from_the_hub_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(lambda url, request: head(206, content_range="bytes 0-3/4"))
    assert read(site, monkeypatch) == b"xxxx"
    assert len(site.asked) == 2


@pytest.mark.usefixtures("asked")
def test_a_host_that_asks_for_a_pause_is_left_alone_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(lambda url, request: head(429, ratelimit='"resolvers";r=0;t=55'))
    with pytest.raises(StatusError, match="429"):
        read(site, monkeypatch)
    assert len(site.asked) == 1
    with pytest.raises(StatusError, match="left alone") as caught:
        read(site, monkeypatch)  # another filesystem, as another process has
    assert 50 < caught.value.retry_after_s < 57
    assert len(site.asked) == 1
    later_s = time.time() + 60
    monkeypatch.setattr(hub.time, "time", lambda: later_s)
    with pytest.raises(StatusError, match="429"):
        read(site, monkeypatch)
    assert len(site.asked) == 2


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("after_s", "num_asked"), [(54.5, 1), (55.5, 2)])
def test_a_host_is_left_alone_until_its_pause_is_over(
    monkeypatch: pytest.MonkeyPatch, after_s: float, num_asked: int
) -> None:
    site = Site(lambda url, request: head(429, ratelimit='"resolvers";r=0;t=55'))
    for now_s in (NOON, NOON + after_s):
        monkeypatch.setattr(hub.time, "time", lambda now_s=now_s: now_s)
        with pytest.raises(StatusError, match="429"):
            read(site, monkeypatch)
    assert len(site.asked) == num_asked
