"""Make docs/images/live-light.png and live-dark.png: `python docs/live_view.py`, with chromium and aiohttp.

Two ranks train for half a minute on data whose transform takes too long, and a browser looks at them.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.telemetry.serving.http import HttpServer
from dataflow.tools.top.sources import MachinePages
from dataflow.tools.top.view import Follower
from dataflow.tools.top.web import page_server

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1080, "height": 500}
RANKS, SECONDS = 2, 30
_wait = threading.Event().wait


def work(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes its time."""
    _wait(0.012)
    return sample


def train(folder: str) -> None:
    """Train until the process is ended."""
    dataset = ShardedDataset(
        f"{folder}/photos/*.tar", transform=work, decode={"jpg": bytes}, catalog=f"{folder}/photos.catalog"
    )
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4, workers="thread")
    while True:
        for _ in loader:
            _wait(0.06)  # a step


@contextmanager
def trainings(folder: Path) -> Iterator[Follower]:
    """Ranks that train, and what follows them."""
    (folder / "photos").mkdir()
    with ShardWriter(f"{folder}/photos/photos-%06d.tar", max_count=1000) as writer:
        for number in range(8000):
            writer.write({"__key__": f"{number:06d}", "cls": number % 10, "jpg": bytes(12_000)})
    ShardedDataset(f"{folder}/photos/*.tar", catalog=f"{folder}/photos.catalog")
    with ExitStack() as stack:
        for rank in range(RANKS):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            variables = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "MASTER_ADDR": "127.0.0.1"}
            variables |= {name: str(value) for name, value in numbers.items()}
            command = [sys.executable, __file__, str(folder)]
            process = stack.enter_context(subprocess.Popen(command, env=variables))
            stack.callback(process.kill)
        follower = Follower(MachinePages([folder / "dataflow"]))
        while not (view := follower.view()).trainings or view.trainings[0].ranks < RANKS:
            _wait(0.2)
        yield follower


async def take(url: str, profile: Path) -> None:
    """Have a browser look at a page for some time, and take its picture in both themes."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
    browser = await asyncio.create_subprocess_exec(
        "chromium", *flags, f"--user-data-dir={profile}", url, stderr=asyncio.subprocess.PIPE
    )
    assert browser.stderr is not None
    try:
        while b"DevTools listening on ws://" not in (line := await browser.stderr.readline()):
            assert line, "the browser did not start"
        host = line.decode().split("ws://")[1].partition("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{host}/json/list") as answer:
                page = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as tab:

                async def call(method: str, **parameters: Any) -> Any:
                    await tab.send_json({"id": 1, "method": method, "params": parameters})
                    while (said := await tab.receive_json()).get("id") != 1:
                        pass
                    return said["result"]

                await call("Emulation.setDeviceMetricsOverride", **SIZE, deviceScaleFactor=1, mobile=False)
                await asyncio.sleep(SECONDS)
                for theme in ("light", "dark"):
                    features = [{"name": "prefers-color-scheme", "value": theme}]
                    await call("Emulation.setEmulatedMedia", features=features)
                    picture = (await call("Page.captureScreenshot", format="png"))["data"]
                    (IMAGES / f"live-{theme}.png").write_bytes(base64.b64decode(picture))
    finally:
        browser.kill()
        await browser.communicate()


def main() -> None:
    """Make both pictures."""
    with tempfile.TemporaryDirectory() as folder, trainings(Path(folder)) as follower:
        asyncio.run(show(page_server(follower, 0), Path(folder) / "browser"))


async def show(server: HttpServer, folder: Path) -> None:
    """Take the pictures of the page that is served."""
    over = asyncio.Event()
    serving = asyncio.create_task(server.serve(over))
    await take(f"http://127.0.0.1:{server.listener.getsockname()[1]}/", folder)
    over.set()
    await serving


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
