"""Columns of sound and video: how clips are decoded, clips of a robot's camera, and what is padding."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.audio import Audio
from dataflow.decode.crop import Draws
from dataflow.decode.episodes import EpisodeVideos
from dataflow.decode.media import MediaRule, MissingMediaSupportError
from dataflow.decode.padding import PadMask
from dataflow.decode.video import Video
from dataflow.outputs.columns import ChunkColumns
from dataflow.outputs.decoded import Bytes, DecodedOutput, Failures, Remark
from dataflow.outputs.fixed import MaskOutput
from dataflow.outputs.output import Default, Output, name_beside
from dataflow.staging.columns import StagedMoments, StagedPads
from prefetch.errors import MemoryLimitError
from prefetch.memory.arena import Arena
from sharding.blocks import Column
from sharding.errors import SampleError

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
        remark: Remark,
    ) -> Failures:
        """See `DecodedOutput`. A clip is a task of its own: it takes longer than to hand it out."""
        failures = list[tuple[int, Exception]]()
        for index, data in enumerate(encoded):
            own = out[index].reshape(self.rule.shape or ())  # of one frame, cameras deliver the frame
            try:
                self.rule.decode(data, draws, own, most_bytes=columns.sample_bytes)
            except MissingMediaSupportError:
                raise
            except Exception as error:
                own[...] = 0
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
    def videos(self) -> tuple[Video, EpisodeVideos]:
        """The rule, and the files."""
        return self.rule, self.episodes

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
