"""Columns of sound and video: how clips are decoded, clips of a robot's camera, and what is padding."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.audio import Audio
from dataflow.decode.episodes import Camera, EpisodeVideos, FrameIndexes
from dataflow.decode.image import Image
from dataflow.decode.media import MediaRule, MissingMediaSupportError, decoders
from dataflow.decode.padding import PadMask
from dataflow.decode.rules import ReadBytes
from dataflow.decode.values import Draws
from dataflow.decode.video import Video
from dataflow.outputs.columns import ChunkColumns
from dataflow.outputs.decoded import DecodedOutput, Failures, NoteWarning
from dataflow.outputs.fixed import MaskOutput
from dataflow.outputs.output import Default, Output, name_beside
from dataflow.staging.columns import Array, StagedArray, StagedSpans
from prefetch.errors import MemoryLimitError
from prefetch.memory.arena import Arena
from sharding.blocks import Column, ColumnSpec, Masked, Shard
from sharding.errors import SampleError
from sharding.spans import Bytes, Ints

PAD_SUFFIX = "_is_pad"


@dataclass(frozen=True, kw_only=True)
class ClipOutput(DecodedOutput):
    """Clips of sound or video, of one shape or each of its own."""

    kinds: ClassVar[tuple[str, str, str, str]] = ("clip", "clips", "clip lists", "lists of clips")
    instead: ClassVar[str] = "None in a list of clips"
    releases_gil: ClassVar[bool] = True

    rule: MediaRule

    @property
    def suffix(self) -> str:
        """See `Output`."""
        return PAD_SUFFIX if isinstance(self.rule, PadMask) else ""

    @property
    def parts_rule(self) -> MediaRule | None:
        """The rule, where it may cut values."""
        return self.rule if self.rule.reads_parts else None

    @property
    def is_sized(self) -> bool:
        """See `DecodedOutput`."""
        return self.rule.shape is not None

    @property
    def is_random(self) -> bool:
        """See `DecodedOutput`."""
        return self.rule.random

    def description(self) -> str:
        """Kind, dtype and rule; the shape, where all have the same."""
        return f"{super().description()} {self.rule}"

    def decode_few(
        self,
        columns: ChunkColumns,
        encoded: Sequence[Bytes],
        out: Sequence[NDArray[Any]],
        draws: Draws | None,
        remark: NoteWarning,
    ) -> Failures:
        """See `DecodedOutput`. A clip is a task of its own: it takes longer than to hand it out."""
        failures = list[tuple[int, Exception]]()
        for index, data in enumerate(encoded):
            clip = out[index].reshape(self.rule.shape or ())  # of one frame, cameras deliver the frame
            try:
                self.rule.decode(data, draws, clip, most_bytes=columns.sample_bytes)
            except MissingMediaSupportError:
                raise
            except Exception as error:
                clip[...] = 0
                failures.append((index, _failure(error)))
        return failures

    def decode(self, columns: ChunkColumns, data: Bytes, row: int, number: int = 0) -> Tensor | None:
        """See `DecodedOutput`; None where it fails, which is noted."""
        draws = self.draws(columns, row, number)
        try:
            clip = self.rule.decode(data, draws, None, most_bytes=columns.sample_bytes)
        except MissingMediaSupportError:
            raise
        except Exception as error:
            columns.note_bad(row, self.name, _failure(error))
            return None
        return torch.from_numpy(np.ascontiguousarray(clip))

    def pads_beside(self, names: Collection[str]) -> Sequence[Output]:
        """See `Output`. Of a clip that is missing all is padding."""
        if not isinstance(self.rule, Video | Audio) or not self.rule.mask:
            return []
        rule = PadMask(self.rule)
        default = Default(None if rule.shape is None else np.ones(rule.shape, np.bool_))
        return [
            ClipOutput(
                name=name_beside(self, PAD_SUFFIX, names),
                sources=self.sources,
                dtype=rule.dtype,
                shape=rule.shape or (),
                rule=rule,
                default=default if self.default is not None else None,
            )
        ]


@dataclass(frozen=True, kw_only=True)
class EpisodeClipOutput(ClipOutput):
    """Clips of a robot's camera, cut out of files of many episodes; of a single frame [batch, 3, h, w]."""

    rule: Video
    episodes: EpisodeVideos = field(compare=False)

    @property
    def clip_bytes(self) -> int:
        """See `StagedOutput`."""
        return self.episodes.clip_bytes(self.rule.frames or 1)

    @property
    def parts_rule(self) -> None:
        """None, since nothing is stored."""
        return

    def takes(self, column: Column) -> bool:
        """Return whether a column is one of numbers, a row each."""
        return isinstance(column, np.ndarray) and column.size == len(column)

    def staged_bytes(self, num_rows: int) -> int:
        """Return the bytes of addresses, lengths and moments."""
        return 32 * num_rows

    def stage(self, num_rows: int, arena: Arena) -> StagedMoments:
        """Return where moments and clips go."""
        return StagedMoments(
            np.zeros(num_rows, np.int64),
            np.full(num_rows, -1, np.int64),
            moments=(np.full(num_rows, -1, np.int64), np.zeros(num_rows)),
        )

    def cut(
        self, staged: StagedSpans, rows: Ints, read_of: Callable[[Shard], ReadBytes], indexes: dict[str, Any]
    ) -> None:
        """See `StagedOutput`. All cameras share what is known of the frames of videos."""
        assert isinstance(staged, StagedMoments)
        known, (episodes, seconds) = indexes.setdefault("frames", FrameIndexes()), staged.moments
        values = self.episodes.cut(self.rule, episodes[rows], seconds[rows], known, read_of)
        for row, value in zip(rows.tolist(), values, strict=True):
            staged.put_cut(row, value)

    def pads_beside(self, names: Collection[str]) -> Sequence[Output]:
        """See `Output`."""
        if not self.rule.mask:
            return []
        mask = PadMask(self.rule)
        return [
            EpisodePadOutput(
                name=name_beside(self, PAD_SUFFIX, names),
                sources=self.sources,
                dtype=mask.dtype,
                source_dtype=mask.dtype,
                shape=mask.shape or (),
                rule=self.rule,
                episodes=self.episodes,
            )
        ]


@dataclass
class StagedMoments(StagedSpans):
    """A column of clips of other files, which are cut for rows that are asked for, once moments are known."""

    moments: tuple[Ints, NDArray[np.float64]] = field(kw_only=True)
    """[rows] episode, and seconds in it."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage the moments of one block's rows."""
        for column, values in zip(self.moments, moments_of(columns), strict=True):
            column[first : first + len(values)] = values


def moments_of(columns: Sequence[Column]) -> list[Array]:
    """Episodes, and seconds in them, of a block's rows, [n] each; -1, no episode, where one is missing."""
    moments = []
    for column in columns:
        values = column.values.copy() if isinstance(column, Masked) else np.asarray(column)
        if isinstance(column, Masked):
            values[column.lacks != 0] = -1
        moments.append(values.reshape(len(values)))
    return moments


@dataclass
class StagedPads(StagedArray):
    """A flag for each frame of clips about moments that is padding, bool [rows, frames]."""

    _: KW_ONLY
    pads: Callable[[Ints, NDArray[np.float64]], Array] = field(kw_only=True)
    """[n] episodes, and seconds in them -> [n, frames]."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage what the moments of one block's rows tell."""
        episodes, seconds = moments_of(columns)
        self.values[first : first + len(episodes)] = self.pads(
            episodes.astype(np.int64), seconds.astype(np.float64)
        )


@dataclass(frozen=True, kw_only=True)
class EpisodePadOutput(MaskOutput):
    """A mask of the padding frames of a robot camera's clips: [batch, frames]. Moments tell, unread."""

    rule: Video
    episodes: EpisodeVideos = field(compare=False)

    @property
    def suffix(self) -> str:
        """See `Output`."""
        return PAD_SUFFIX

    def stage(self, num_rows: int, arena: Arena) -> StagedPads:
        """The window's array, [num_rows, frames]."""
        return StagedPads(self._array(num_rows, arena), pads=partial(self.episodes.beyond, self.rule))


def clip_output(name: str, sources: tuple[str, ...], rule: Video | Audio) -> Output:
    """The output of a rule for sound or video."""
    decoders()  # raises where they are missing: now, not at the first batch
    return ClipOutput(name=name, sources=sources, dtype=rule.dtype, shape=rule.shape or (), rule=rule)


def camera_output(name: str, camera: Camera, rule: object, schema: Mapping[str, ColumnSpec]) -> Output:
    """The frame at a row's time, or a clip about it."""
    if rule in (None, "auto", "image"):
        rule = Image()
    if isinstance(rule, Image):
        video, is_clip = Video(frames=1, clip="start", image=rule), False
    elif isinstance(rule, Video) and rule.frames is not None and rule.clip != "random":
        video, is_clip = rule, True
    else:
        raise ValueError(
            f"decode for camera {name!r} must be Image(...), or Video(frames=..., clip='start', 'middle' or "
            f"'end'), which says where the clip lies about the row's time; got {rule!r}"
        )
    if video.frame.size is None:
        video = replace(video, size=None, image=replace(video.frame, size=camera.height_width))
    lacking = [source for source in camera.sources if source not in schema]
    if lacking:
        raise ValueError(f"the shards have no column {lacking[0]!r}, which tells where frames lie")
    decoders()
    shape = video.shape
    assert shape is not None
    return EpisodeClipOutput(
        name=name,
        sources=camera.sources,
        dtype=video.dtype,
        shape=shape if is_clip else shape[1:],
        rule=video,
        episodes=camera.videos,
    )


def _failure(error: Exception) -> Exception:
    """Return what is wrong with a clip, without the traceback, whose frames hold the stored bytes."""
    if isinstance(error, MemoryLimitError):
        return error
    return SampleError("", _reason(error), stage="decode")


def _reason(error: Exception) -> str:
    """One line, without the place in torchcodec's own source."""
    text = (str(error) or type(error).__name__).splitlines()[0].rstrip()
    if "stream is unknown" in text:
        text = (
            "it has no stream of this kind that the FFmpeg installed can decode (`ffmpeg -codecs` lists them)"
        )
    return f"cannot decode it: {_IN_SOURCE.sub('', text)}"


_IN_SOURCE = re.compile(r"^\w+, \S+\.cpp:\d+, ")
