"""LeRobot's datasets, version 3, as they lie: Parquet rows, and videos that hold the frames of many episodes.

`meta/info.json` says where files are and which columns are videos; the tables in `meta/episodes` say which
part of which file is whose. The rows are a dataset of Parquet shards; a camera is one more column, whose
values are cut out of videos at the times of the rows (`dataflow.decode.episodes`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.decode.episodes import Camera, EpisodeVideos
from dataflow.sources.listing.claims import Listing, SourceArguments, Spec
from dataflow.sources.listing.expand import expand
from dataflow.sources.listing.places import Places
from prefetch.store.small_files import SmallFiles
from sharding.blocks import Shard
from sharding.catalog.storage import open_url, shard_info, shard_of
from sharding.errors import CorruptShardError, ShardReadError
from sharding.urls import is_local

_ASKED_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class RobotDataset:
    """The contents of a LeRobot dataset's `meta/`."""

    data: list[str]
    """The Parquet shards, in the order of their episodes."""
    cameras: Mapping[str, Camera]


def open_lerobot(source: Any, options: Mapping[str, Any], files: SmallFiles) -> RobotDataset:
    """Read `meta/` of a folder. Raises `ValueError` for what is no folder of version 3."""
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"format='lerobot' takes one folder, got {source!r}")
    root = os.fspath(source).rstrip("/")
    url = f"{root}/meta/info.json"
    try:
        info = json.loads(_read(url, files))
        version, fps = str(info["codebase_version"]), float(info["fps"])
        features, data_path = info["features"], str(info["data_path"])
        video_path = str(info.get("video_path") or "")
        keys = [key for key, feature in features.items() if feature["dtype"] == "video"]
        sizes = {key: tuple(int(n) for n in features[key]["shape"]) for key in keys}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(url, f"not LeRobot's: {type(error).__name__}: {error}") from error
    if not version.startswith("v3"):
        raise ValueError(
            f"{url} is of version {version}; version 3 is read: convert it by "
            "lerobot.datasets.v30.convert_dataset_v21_to_v30"
        )
    episodes = _episodes(root, keys, options, files)
    data = _paths(root, data_path, episodes, "data")
    cameras = {}
    for key in keys:
        names = _paths(root, video_path, episodes, f"videos/{key}", video_key=key)
        number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
        cameras[key] = Camera(
            height_width=_height_width(sizes[key], features[key].get("names")),
            videos=EpisodeVideos(
                shards=_shards(list(number_of), options),
                file=np.array([number_of[name] for name in names], np.int64),
                begin_s=_numbers(episodes, f"videos/{key}/from_timestamp").astype(np.float64),
                num_frames=_numbers(episodes, "length").astype(np.int64),
                fps=fps,
            ),
        )
    return RobotDataset(data=list(dict.fromkeys(data)), cameras=cameras)


def claim(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """The shards and cameras of a folder of LeRobot."""
    if (asked.config, asked.split, asked.revision) != (None, None, None):
        raise ValueError("config=, split= and revision= are not for a folder of LeRobot")
    robot = open_lerobot(spec.source, places.options, places.files)
    return asked.listing(robot.data, format="parquet", cameras=robot.cameras)


def _height_width(shape: Sequence[int], names: Any) -> tuple[int, int]:
    """Return height and width of frames, whose channels come first or last."""
    first = isinstance(names, list) and names[:1] in (["channels"], ["channel"], ["c"])
    return (shape[1], shape[2]) if first else (shape[0], shape[1])


def _read(url: str, files: SmallFiles) -> bytes:
    try:
        return files.read(url)
    except ShardReadError as error:
        if error.reason == "no such file":
            error.add_note("is this the folder of a LeRobot dataset?")
        raise


def _episodes(root: str, keys: Sequence[str], options: Mapping[str, Any], files: SmallFiles) -> pa.Table:
    """Return what is needed of the tables in `meta/episodes`, a row an episode, by its number."""
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for key in keys:
        columns += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    urls = expand(f"{root}/meta/episodes/*/*.parquet", options)
    tables = []
    for url in urls:
        try:
            tables.append(pq.read_table(pa.BufferReader(_read(url, files)), columns=columns))
        except (pa.ArrowException, KeyError) as error:
            raise CorruptShardError(url, f"not LeRobot's table of episodes: {error}") from error
    table = pa.concat_tables(tables).sort_by("episode_index")
    if table.column("episode_index").to_pylist() != list(range(len(table))):
        raise CorruptShardError(f"{root}/meta/episodes", "episodes are not numbered from 0 on without gaps")
    return table


def _numbers(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()


def _paths(root: str, pattern: str, episodes: pa.Table, of: str, **more: str) -> list[str]:
    """Return the file that has each episode."""
    chunks, files = (_numbers(episodes, f"{of}/{name}").tolist() for name in ("chunk_index", "file_index"))
    return [
        f"{root}/{pattern.format(chunk_index=chunk, file_index=file, **more)}"
        for chunk, file in zip(chunks, files, strict=True)
    ]


def _shards(urls: Sequence[str], options: Mapping[str, Any]) -> tuple[Shard, ...]:
    """The videos, as they are now."""

    def shard(url: str) -> Shard:
        fs, path = (None, "") if is_local(url) else open_url(url, options)
        return shard_of(url, shard_info(url, fs, path))

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return tuple(pool.map(shard, urls))
