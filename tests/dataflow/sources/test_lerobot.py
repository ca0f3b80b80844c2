"""LeRobot's folders of version 3: rows in Parquet, frames in videos of many episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from media_kit import FPS, number_of, numbers_of, video

from dataflow import DataLoader, Image, SampleError, ShardedDataset, Video

pytestmark = pytest.mark.reads_here
CAMERA = "observation.images.top"
LENGTHS = (20, 30, 10, 25)
"""Frames of the episodes; two in each video. A frame shows its number in the dataset."""


def write_robot(root: Path, **info: Any) -> Path:
    """A dataset as lerobot 0.4 writes it, of four episodes in two videos and two Parquet files."""
    starts = np.cumsum([0, *LENGTHS])
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    episodes = []
    for number, length in enumerate(LENGTHS):
        file = number // 2
        before = LENGTHS[number - 1] if number % 2 else 0
        episodes.append(
            {
                "episode_index": number,
                "length": length,
                "dataset_from_index": int(starts[number]),
                "data/chunk_index": 0,
                "data/file_index": file,
                f"videos/{CAMERA}/chunk_index": 0,
                f"videos/{CAMERA}/file_index": file,
                f"videos/{CAMERA}/from_timestamp": before / FPS,
                f"videos/{CAMERA}/to_timestamp": (before + length) / FPS,
            }
        )
    pq.write_table(pa.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    for file in range(2):
        own = (2 * file, 2 * file + 1)
        (root / "data/chunk-000").mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(
            root / f"data/chunk-000/file-{file:03d}.parquet", _rows(0, 0, 1).schema
        ) as writer:
            for episode in own:
                writer.write_table(_rows(episode, int(starts[episode]), LENGTHS[episode]))
        videos = root / f"videos/{CAMERA}/chunk-000"
        videos.mkdir(parents=True, exist_ok=True)
        frames = sum(LENGTHS[episode] for episode in own)
        (videos / f"file-{file:03d}.mp4").write_bytes(video(frames, first=int(starts[own[0]]), g="2"))
    feature = {"dtype": "video", "shape": [64, 64, 3], "names": ["height", "width", "channels"]}
    described = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "features": {CAMERA: feature, "action": {"dtype": "float32", "shape": [2], "names": None}},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        **info,
    }
    (root / "meta/info.json").write_text(json.dumps(described))
    return root


def _rows(episode: int, start: int, length: int) -> pa.Table:
    frame = np.arange(length)
    action = pa.FixedSizeListArray.from_arrays(np.repeat(start + frame, 2).astype(np.float32), 2)
    return pa.table(
        {
            "action": action,
            "timestamp": (frame / FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, episode),
            "index": start + frame,
        }
    )


@pytest.fixture
def robot(tmp_path: Path) -> Path:
    return write_robot(tmp_path / "robot")


def test_every_row_has_the_frame_of_its_time(robot: Path) -> None:
    dataset = ShardedDataset(robot, format="lerobot")
    seen = 0
    with DataLoader(dataset, batch_size=16, shuffle=True, seed=2) as loader:
        for batch in loader:
            assert (batch[CAMERA].dtype, batch[CAMERA].shape[1:]) == (torch.uint8, (3, 64, 64))
            assert [number_of(frame) for frame in batch[CAMERA]] == batch["index"].tolist()
            assert batch["action"][:, 0].tolist() == batch["index"].tolist()
            seen += len(batch["index"])
    assert seen == sum(LENGTHS)


def test_clips_lie_about_the_time_of_their_row(robot: Path) -> None:
    def clip(index: int, **rule: Any) -> list[int]:
        dataset = ShardedDataset(robot, format="lerobot", decode={CAMERA: Video(frames=3, **rule)})
        return numbers_of(dataset[index][CAMERA])

    assert clip(25, clip="start") == [25, 26, 27]
    assert clip(25, clip="end") == [23, 24, 25]
    assert clip(25, clip="middle") == [24, 25, 26]
    assert clip(25, clip="start", fps=10) == [25, 28, 31]
    # Episodes end at 19 and begin at 20, in one video.
    assert clip(19, clip="start", pad="last") == [19, 19, 19]
    assert clip(20, clip="end", pad="last") == [20, 20, 20]
    with pytest.raises(SampleError, match=r"reaches beyond its episode of 0\.667 s"):
        clip(19, clip="start")


@pytest.mark.parametrize(("pad", "workers"), [("last", 0), ("loop", 0), ("loop", 1)])
def test_frames_beyond_the_ends_of_an_episode_are_told_by_a_mask(robot: Path, pad: Any, workers: int) -> None:
    clip = Video(frames=3, clip="middle", fps=10, pad=pad, mask=True)
    columns = ["index", "episode_index", CAMERA]
    dataset = ShardedDataset(robot, format="lerobot", columns=columns, decode={CAMERA: clip})
    starts = np.cumsum([0, *LENGTHS])
    with DataLoader(dataset, batch_size=32, shuffle=True, seed=1, num_workers=workers) as loader:
        for batch in loader:
            assert list(batch) == [*columns, f"{CAMERA}_is_pad"]
            at = batch["index"][:, None].numpy() + np.array([-3, 0, 3])
            episode = batch["episode_index"].numpy()
            beyond = (at < starts[episode][:, None]) | (at >= starts[episode + 1][:, None])
            assert batch[f"{CAMERA}_is_pad"].numpy().tolist() == beyond.tolist()
    assert dataset[18][f"{CAMERA}_is_pad"].tolist() == [False, False, True]


def test_builder_processes_and_single_samples_give_the_same_frames(robot: Path) -> None:
    dataset = ShardedDataset(
        robot, format="lerobot", columns=["index", CAMERA], decode={CAMERA: Image(size=32)}
    )
    with DataLoader(dataset, batch_size=32, num_workers=1) as loader:
        for batch in loader:
            assert [number_of(frame) for frame in batch[CAMERA]] == batch["index"].tolist()
    assert [number_of(dataset[i][CAMERA]) for i in (0, 44, -1)] == [0, 44, 84]


def test_a_renamed_camera(robot: Path) -> None:
    dataset = ShardedDataset(robot, format="lerobot", columns={"top": CAMERA, "n": "index"})
    assert number_of(dataset[7]["top"]) == 7


def test_a_damaged_video_obeys_on_error(robot: Path) -> None:
    path = robot / f"videos/{CAMERA}/chunk-000/file-001.mp4"
    path.write_bytes(path.read_bytes()[:-100])
    dataset = ShardedDataset(robot, format="lerobot", on_error="skip")
    with DataLoader(dataset, batch_size=16) as loader:
        delivered = [i for batch in loader for i in batch["index"].tolist()]
        skipped = len(loader.stats().skipped)
    assert delivered == list(range(50))
    assert skipped == 35
    with pytest.raises(SampleError, match=r"file-001\.mp4.*truncated"):
        ShardedDataset(robot, format="lerobot")[60]


def test_what_is_no_folder_of_version_3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is this the folder of a LeRobot dataset"):
        ShardedDataset(tmp_path, format="lerobot")
    with pytest.raises(ValueError, match=r"is of version v2\.1"):
        ShardedDataset(write_robot(tmp_path / "old", codebase_version="v2.1"), format="lerobot")


def test_random_clips_of_a_camera_are_refused(robot: Path) -> None:
    with pytest.raises(ValueError, match="says where the clip lies about the row's time"):
        ShardedDataset(robot, format="lerobot", decode={CAMERA: Video(frames=3)})
