"""Random clips of long videos: frames a second and bytes fetched, beside torchcodec in torch's DataLoader.

    python -m benchmarks.remote.media                        16 videos of 120 s, made anew; some four minutes
    python -m benchmarks.remote.media --json benchmarks/results/media.json      also saves the figures

A sample is 16 frames at 8 a second from a random place of a video (640 x 360, H.264, a key frame in 60), as
uint8 [16, 3, 224, 224]; batches of 4, two workers each (builder threads here, processes there). Ours reads
tar shards. torchcodec reads the same videos as single files, by path or URL, with frames found exactly (it
scans the file) and approximately, and resizes in its decoder. Local files lie in the page cache; remote ones
behind slowstore.py on this machine, 20 ms before each answer. Bytes are what the processes read of
files (`rchar`), or what the server sent. Contestants take turns. Making the videos needs the program ffmpeg.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.harness import in_own_process
from benchmarks.remote.slow_server import server_stats, serving
from benchmarks.report import save_figures

FRAMES, FPS, SIZE, SECONDS, BATCH, WORKERS = 16, 8, 224, 120, 4, 2
STORE = {"latency-ms": 20.0}
CONTESTANTS = ("dataflow", "torchcodec, exact", "torchcodec, approximate")


def make_videos(folder: Path, count: int) -> int:
    """Videos as single files, and in two tars; gives the bytes of one."""
    source = f"testsrc2=size=640x360:rate=30:duration={SECONDS},noise=alls=12:allf=t"
    codec = ["-c:v", "libx264", "-preset", "veryfast", "-g", "60", "-pix_fmt", "yuv420p"]
    first = folder / "0000.mp4"
    command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, *codec, "-movflags", "+faststart"]
    subprocess.run([*command, str(first)], check=True)
    data = first.read_bytes()
    for i in range(1, count):
        (folder / f"{i:04d}.mp4").write_bytes(data)
    for shard in range(2):
        with tarfile.open(folder / f"videos-{shard:04d}.tar", "w") as tar:
            for i in range(shard, count, 2):
                tar.add(folder / f"{i:04d}.mp4", f"{i:04d}.mp4")
    return len(data)


class Clips(Dataset[tuple[torch.Tensor, int]]):
    """A random clip of each file, and the bytes that were read for it."""

    def __init__(self, places: list[str], seek_mode: str) -> None:
        self._places, self._seek_mode = places, seek_mode

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from torchcodec.decoders import VideoDecoder
        from torchcodec.transforms import Resize

        before = _read_bytes()
        decoder = VideoDecoder(
            self._places[index], seek_mode=self._seek_mode, transforms=[Resize((SIZE, SIZE))]
        )
        begin = torch.rand(()).item() * (SECONDS - FRAMES / FPS)
        clip = decoder.get_frames_played_at([begin + i / FPS for i in range(FRAMES)]).data
        return clip, _read_bytes() - before


def _read_bytes() -> int:
    """What this thread has read so far, files and sockets."""
    text = Path("/proc/thread-self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def run(contestant: str, folder: str, count: int, epochs: int) -> dict[str, float]:
    """Frames a second of all epochs but the first, and bytes a clip. Runs in a process of its own."""
    remote = folder.startswith("http")
    if remote:
        server_stats(folder)
    loader: Any
    if contestant == "dataflow":
        from dataflow import DataLoader, ShardedDataset, Video

        names = [f"{folder}/videos-{shard:04d}.tar" for shard in range(2)]
        video = Video(frames=FRAMES, fps=FPS, size=SIZE)
        dataset = ShardedDataset(names, decode={"mp4": video})
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, workers="thread")
    else:
        places = [f"{folder}/{i:04d}.mp4" for i in range(count)]
        loader = torch.utils.data.DataLoader(
            Clips(places, contestant.rpartition(" ")[2]),
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
        )
    fetched, frames, began = 0, 0, 0.0
    for epoch in range(epochs + 1):
        if epoch == 1:
            began, fetched, frames = time.perf_counter(), 0, 0
            before = loader.stats().read_bytes if contestant == "dataflow" else 0
            if remote:
                server_stats(folder)
        for batch in loader:
            clips = batch["mp4"] if contestant == "dataflow" else batch[0]
            frames += clips.shape[0] * clips.shape[1]
            fetched += 0 if contestant == "dataflow" else int(batch[1].sum())
    seconds = time.perf_counter() - began
    if contestant == "dataflow":
        fetched = loader.stats().read_bytes - before
        loader.close()
    if remote:
        fetched = server_stats(folder)["bytes"]
    return {
        "frames_per_s": round(frames / seconds, 1),
        "kb_per_clip": round(fetched * FRAMES / frames / 1e3, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        video_bytes = make_videos(folder, asked.videos)
        for _ in range(asked.repeats):
            for contestant in CONTESTANTS:
                for where in ("local", "remote"):
                    if where == "local":
                        row = in_own_process(run, contestant, name, asked.videos, asked.epochs)
                    else:
                        with serving(folder, STORE) as server:
                            row = in_own_process(run, contestant, server.url, asked.videos, asked.epochs)
                    runs.setdefault(f"{where}: {contestant}", []).append(row)
                    print(f"{where}: {contestant}: {row}", file=sys.stderr)
    medians = {
        case: {figure: statistics.median(row[figure] for row in rows) for figure in rows[0]}
        for case, rows in runs.items()
    }
    for case, row in sorted(medians.items()):
        print(f"{case:34} {row['frames_per_s']:9.1f} frames/s {row['kb_per_clip']:10.1f} kB a clip")
    print(f"a video has {video_bytes / 1e6:.1f} MB")
    if asked.json:
        save_figures(asked.json, store=STORE, video_bytes=video_bytes, runs=runs, medians=medians)


if __name__ == "__main__":
    main()
