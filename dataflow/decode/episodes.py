"""The frames of a robot's camera: LeRobot keeps many episodes in one video, one after the other."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.media import with_reason
from dataflow.decode.mp4 import FrameIndex, needed_frames, read_index, spans_of
from dataflow.decode.rules import ReadBytes
from dataflow.decode.video import Video
from sharding.blocks import Shard
from sharding.spans import Bytes, Ints

_SPARE_FRAMES = 32
"""Frames beside those of a clip that are reckoned to be read for it: of the group that it begins in."""


MOMENT_COLUMNS = ("episode_index", "timestamp")
"""Columns of a row that say which frame is its: the episode, and seconds in it."""


class FrameIndexes:
    """The frames of videos that rows refer to, within so many bytes. Thread-safe."""

    def __init__(self, keep_bytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()  # guards the rest
        self._keep_bytes, self._held_bytes = keep_bytes, 0
        self._indexes: OrderedDict[str, FrameIndex | None] = OrderedDict()
        self._making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def of(self, shard: Shard, read: ReadBytes) -> FrameIndex | None:
        """Do as `read_index`; several threads that ask for the same read it once."""
        with self._lock:
            making = self._making[shard.url]
        with making:
            with self._lock:
                if shard.url in self._indexes:
                    self._indexes.move_to_end(shard.url)
                    return self._indexes[shard.url]
            index = read_index(read, shard.size)
            with self._lock:
                self._indexes[shard.url] = index
                self._held_bytes += index.nbytes if index else 0
                while self._held_bytes > self._keep_bytes and len(self._indexes) > 1:
                    dropped = self._indexes.popitem(last=False)[1]
                    self._held_bytes -= dropped.nbytes if dropped else 0
            return index


@dataclass(frozen=True, eq=False, kw_only=True)
class EpisodeVideos:
    """The videos of one camera, and which part of which is each episode's."""

    shards: tuple[Shard, ...]
    file: Ints
    """[episodes] index of the video in `shards`."""
    begin_s: NDArray[np.float64]
    """[episodes] seconds in the video."""
    num_frames: Ints
    """[episodes] number of frames of each."""
    fps: float

    def clip_bytes(self, frames: int) -> int:
        """About how many bytes the frames of a clip take, as they are stored."""
        total = sum(shard.size for shard in self.shards)
        return total * (frames + _SPARE_FRAMES) // max(1, int(self.num_frames.sum()))

    def beyond(self, rule: Video, episodes: Ints, seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which frames of the clips at n moments lie beyond their episodes: [n, frames]."""
        known = (episodes >= 0) & (episodes < len(self.file))
        count = self.num_frames[np.where(known, episodes, 0)]
        return rule.beyond(seconds, count, self.fps) & known[:, None]

    def cut(
        self,
        rule: Video,
        episodes: Ints,
        seconds: NDArray[np.float64],
        indexes: FrameIndexes,
        read_of: Callable[[Shard], ReadBytes],
    ) -> list[Bytes]:
        """Return what clips at n moments need, [n] episodes and seconds: values as of `MediaRule.cut`.

        What several of them need of a video is read once. Raises what reading raises.
        """
        values = [with_reason(f"no episode {episode}") for episode in episodes.tolist()]
        known = (episodes >= 0) & (episodes < len(self.file))
        files = np.where(known, self.file[np.where(known, episodes, 0)], -1)
        for file in np.unique(files[known]).tolist():
            rows = np.flatnonzero(files == file)
            shard = self.shards[file]
            index, why = None, "no MP4 whose frames can be listed"
            try:
                index = indexes.of(shard, read_of(shard))
            except ValueError as error:
                why = str(error)
            if index is None:
                for row in rows.tolist():
                    values[row] = with_reason(f"{shard.url}: {why}")
                continue
            self._cut_of(rule, index, shard, read_of(shard), rows, episodes, seconds, values)
        return values

    def _cut_of(
        self,
        rule: Video,
        index: FrameIndex,
        shard: Shard,
        read: ReadBytes,
        rows: Ints,
        episodes: Ints,
        seconds: NDArray[np.float64],
        values: list[Bytes],
    ) -> None:
        """The values of the rows that are of one video."""
        frames: dict[int, Ints] = {}
        for row in rows.tolist():
            try:
                moments = rule.moments(float(seconds[row]), int(self.num_frames[episodes[row]]), self.fps)
            except ValueError as error:
                values[row] = with_reason(str(error))
                continue
            # The middle of a frame: times that were added up in float32 are off by a little.
            frames[row] = index.at(self.begin_s[episodes[row]] + (moments + 0.5) / self.fps)
        if not frames:
            return
        needed = needed_frames(index, index.shown[np.unique(np.concatenate([*frames.values()]))])
        held = [(low, read(low, high - low)) for low, high in spans_of(index, needed, shard.size)]
        lows = np.array([low for low, _ in held])

        def read_held(offset: int, nbytes: int) -> Bytes:
            low, data = held[int(np.searchsorted(lows, offset, side="right")) - 1]
            return data[offset - low : offset - low + nbytes]

        for row, row_frames in frames.items():
            try:
                values[row] = rule.cut_by(index, row_frames, read_held, shard.size)
            except ValueError as error:
                values[row] = with_reason(f"{shard.url}: {error}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Camera:
    """A column of a robot's dataset that is not stored in its rows."""

    output_by: ClassVar[str] = "dataflow.outputs.media:camera_output"
    sources: ClassVar[tuple[str, ...]] = MOMENT_COLUMNS

    height_width: tuple[int, int]
    videos: EpisodeVideos
