"""The page of `dataflow top --web` in a real browser, over a training that runs and knows nothing of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers_kit import served

from dataflow.tools.top.sources import MachinePages
from dataflow.tools.top.view import Follower
from dataflow.tools.top.web import page_server

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("lightning", reason="runs with the frameworks: pip install -e '.[ecosystem]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]

NAME = "<img src=x onerror=document.title=1><b>shards</b>"
TRAINING = f"""
import threading
from dataflow import DataLoader
compute = threading.Event().wait
loader = DataLoader(range(1 << 20), batch_size=16, name={NAME!r})
for batch in loader:
    compute(0.05)
"""
DEADLINE_S = 20.0


class Tab:
    """A tab of a browser, through its DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        """What the browser has to say: errors of scripts, and what the page's policy forbids."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            said = await self._socket.receive_json(timeout=DEADLINE_S)
            if said.get("method") in (
                "Log.entryAdded",
                "Runtime.exceptionThrown",
                "Page.javascriptDialogOpening",
            ):
                self.complaints.append(str(said["params"]))
            if said.get("id") == number:
                assert "error" not in said, said
                return dict(said["result"])

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a condition holds: it is looked at as often as the page is drawn."""
        look = f"const look = () => ({condition}) ? done() : requestAnimationFrame(look); look();"
        await self.value(f"new Promise((done) => {{ {look} }})")


@dataclass
class Training:
    """A training that runs, and the folder of its page."""

    process: subprocess.Popen[bytes]
    runtime: Path

    @property
    def follower(self) -> Follower:
        return Follower(MachinePages([self.runtime / "dataflow"]))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A training with a page of its own, which takes batches."""
    runtime = tmp_path_factory.mktemp("run")
    script = runtime / "train.py"
    script.write_text(TRAINING)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    with subprocess.Popen([sys.executable, str(script)], env=environment) as process:
        follower, waiting = Training(process, runtime).follower, threading.Event()
        while not follower.view().runs:  # it imports torch
            assert process.poll() is None
            waiting.wait(0.05)
        yield Training(process, runtime)
        process.kill()


@pytest.fixture
def url(training: Training) -> Iterator[str]:
    """The address of the page over it."""
    with served(page_server(training.follower, 0)) as (host, port):
        yield f"http://{host}:{port}/"


async def in_a_browser(folder: Path, url: str, check: Callable[[Tab], Awaitable[None]]) -> None:
    """Start a browser, open a page, and check it."""
    arguments = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *arguments,
        f"--user-data-dir={folder}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        assert browser.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while b"DevTools listening on ws://" not in (line := await browser.stderr.readline()):
                assert line, "the browser did not start"
        host = line.decode().split("ws://")[1].partition("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{host}/json/list") as answer:
                [page] = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Log", "Runtime"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                await check(tab)
    finally:
        browser.kill()
        await browser.communicate()


CONTRAST = """(() => {
  const luminance = (text) => {
    const [r, g, b] = text.match(/[0-9.]+/g).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  return Math.min(...[...document.querySelectorAll("h1, h2, p, span, td, th, li, figcaption")].map((one) => {
    const [a, b] = [getComputedStyle(one).color, behind(one)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
})()"""
SHIFTS = """new Promise((done) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const one of list.getEntries()) sum += one.value; })
    .observe({type: "layout-shift"});
  const shown = () => Number(document.body.dataset.shown), from = shown();
  const look = () => shown() >= from + 2 ? done(sum) : requestAnimationFrame(look);
  look();
})"""


def test_top_follows_a_training_that_was_not_started_for_it(training: Training) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(training.runtime)}
    command = [sys.executable, "-m", "dataflow.tools.cli", "top", "--once", "--json", "-"]
    said = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=True)
    trainings = json.loads(said.stdout)["trainings"]  # those of other tests, too
    [shown] = [one for one in trainings if [loader["name"] for loader in one["loaders"]] == [NAME]]
    assert (shown["program"], shown["where"]) == ("train.py", "training")
    assert 0 < shown["batches_per_s"] <= 20


def test_the_page_follows_a_training_in_a_browser(training: Training, url: str, tmp_path: Path) -> None:
    async def check(tab: Tab) -> None:
        await tab.until("document.querySelector('.verdict')?.textContent.includes('data-bound')")
        await tab.until("document.querySelector('.where').textContent == 'bottleneck: training'")
        assert (await tab.value("document.querySelector('h2').textContent")).startswith(
            "train.py: 1 rank on "
        )
        cells = await tab.value("[...document.querySelectorAll('tbody td')].map((one) => one.textContent)")
        assert cells[:3] == ["0", NAME, "0"]
        assert cells[3].endswith("/65,536")
        assert await tab.value("document.querySelectorAll('img, b').length") == 0
        assert await tab.value("document.title") == "dataflow top"

        first = await tab.value("document.getElementById('at').textContent")
        assert await tab.value(SHIFTS) < 0.01
        assert await tab.value("document.getElementById('at').textContent") != first
        assert await tab.value("document.querySelector('polyline').points.length") >= 2

        colours = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=features)
            colours.append(await tab.value("getComputedStyle(document.body).backgroundColor"))
            assert await tab.value(CONTRAST) >= 4.5, scheme
        assert colours[0] != colours[1]

        narrow = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        await tab.call("Emulation.setDeviceMetricsOverride", **narrow)
        assert await tab.value("document.documentElement.scrollWidth") == 360

        training.process.kill()
        await tab.until("document.querySelector('h2').textContent.includes('died without a word')")
        assert await tab.value("document.querySelector('section').className") == "over"
        assert tab.complaints == []

    asyncio.run(in_a_browser(tmp_path / "browser", url, check))
