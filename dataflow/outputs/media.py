"""Columns of sound and video: clips of one size straight into the slot, others as lists of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

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
from dataflow.outputs.columns import ChunkColumns, ChunkRows, WindowPart
from dataflow.outputs.fixed import FixedOutput, MaskOutput
from dataflow.outputs.output import BuiltColumn, Default, Output, name_beside, split_list, split_rows
from dataflow.staging.columns import StagedMoments, StagedPads
from prefetch.errors import MemoryLimitError
from prefetch.memory.arena import Arena
from sharding.blocks import Column

PAD_SUFFIX = "_is_pad"


@dataclass(frozen=True, kw_only=True)
class MediaOutput(Output):
    """What all columns of sound and video have in common."""

    is_decoded: ClassVar[bool] = True
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

    def description(self) -> str:
        """Kind, dtype and rule; the shape, where all have the same."""
        return f"{super().description()} {self.rule}"


@dataclass(frozen=True, kw_only=True)
class ClipOutput(MediaOutput, FixedOutput):
    """Clips of one shape: a tensor [batch, *rule.shape]."""

    kind: ClassVar[str] = "clip"

    @property
    def _unknown(self) -> float:
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Clips decoded one by one, each a task of its own: it takes longer than to hand it out."""
        columns.note_missing(self.name, self.lacking)
        out = columns.fixed_slot(self.dtype, self.shape)
        tasks: list[Callable[[], None]] = []
        for part in columns.rows.parts:
            rows = np.arange(columns.rows.num_rows)[part.chunk_rows]
            for index, row in enumerate(rows.tolist()):
                tasks.append(partial(self._decode, columns, part.between(index, index + 1), row, out[row]))
        return BuiltColumn(split=partial(split_rows, out), decodes=tasks)

    def _decode(self, columns: ChunkColumns, part: WindowPart, row: int, out: NDArray[Any]) -> None:
        """Decode a clip into its row of the slot, or note why it cannot be."""
        if self.shape != self.rule.shape:
            out = out[None]
        spans = part.spans(self.name)
        length = int(spans.lengths[part.rows[0]])
        if length < 0:
            if self.default is not None:
                out[...] = self.default.value
            return  # else noted
        draws = columns.randomness.draws(part.window, part.rows) if self.rule.random else None
        with part.window.values_of(spans, part.rows, self.name) as (buffer, starts):
            start = int(starts[0])
            data = buffer[start : start + length]
            if decoded(columns, self.name, row, self.rule, data, draws, out) is None:
                out[...] = 0


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
        """None: nothing is stored."""
        return

    def takes(self, column: Column) -> bool:
        """Whether a column is one of numbers, a row each."""
        return isinstance(column, np.ndarray) and column.size == len(column)

    def staged_bytes(self, num_rows: int) -> int:
        """Of addresses, lengths and moments."""
        return 32 * num_rows

    def stage(self, num_rows: int, arena: Arena) -> StagedMoments:
        """Where moments and clips go."""
        return StagedMoments(
            np.zeros(num_rows, np.int64),
            np.full(num_rows, -1, np.int64),
            moments=(np.full(num_rows, -1, np.int64), np.zeros(num_rows)),
        )


@dataclass(frozen=True, kw_only=True)
class FreeClipOutput(MediaOutput):
    """Clips of which each has its own shape: a list of tensors a batch, whatever their shapes are."""

    kind: ClassVar[str] = "clips"

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. A missing clip is None."""
        return self._without_default(default, "None in a list of clips")

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: clips live outside the arena."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Clips decoded one by one, when their batch is asked for."""
        columns.note_missing(self.name, self.lacking)
        stored = columns.stored_values(self.name)

        def clip(data: NDArray[np.uint8], row: int) -> Tensor | None:
            draws = None
            if self.rule.random:
                window, window_row = columns.rows.find(row)
                draws = columns.randomness.draws(window, np.array([window_row]))
            made = decoded(columns, self.name, row, self.rule, data, draws, None)
            return None if made is None else torch.from_numpy(np.ascontiguousarray(made))

        def values(sizes: Sequence[int]) -> Iterator[list[Tensor | None]]:
            for batch in split_list(stored, sizes):
                yield [columns.decoded(self.name, value, clip) for value in batch]

        return BuiltColumn(split=values, each=lambda row: columns.decoded(self.name, stored[row], clip))


@dataclass(frozen=True, kw_only=True)
class EpisodePadOutput(MaskOutput):
    """Which frames of the clips of a robot's camera are padding: [batch, frames]. Moments tell, unread."""

    rule: Video
    episodes: EpisodeVideos = field(compare=False)

    @property
    def suffix(self) -> str:
        """See `Output`."""
        return PAD_SUFFIX

    def stage(self, num_rows: int, arena: Arena) -> StagedPads:
        """The window's array, [num_rows, frames]."""
        return StagedPads(self._array(num_rows, arena), pads=partial(self.episodes.beyond, self.rule))


def pads_beside(output: Output, names: Collection[str]) -> list[Output]:
    """The column that tells which parts of an output's clips are padding, where its rule asks for it.

    Of a clip that is missing all is. Raises `ValueError` if a column of the batch has its name.
    """
    if not isinstance(output, MediaOutput) or not isinstance(output.rule, Video | Audio):
        return []
    if not output.rule.mask:
        return []
    rule = PadMask(output.rule)
    common: dict[str, Any] = {
        "name": name_beside(output, PAD_SUFFIX, names),
        "sources": output.sources,
        "dtype": rule.dtype,
        "rule": rule,
    }
    if isinstance(output, EpisodeClipOutput):
        common.update(rule=output.rule, shape=rule.shape, source_dtype=rule.dtype)
        return [EpisodePadOutput(**common, episodes=output.episodes)]
    missing = output.default is not None
    if rule.shape is None:
        return [FreeClipOutput(**common, default=Default(None) if missing else None)]
    default = Default(np.ones(rule.shape, np.bool_)) if missing else None
    return [ClipOutput(**common, shape=rule.shape, default=default)]


def decoded(
    columns: ChunkColumns,
    name: str,
    row: int,
    rule: MediaRule,
    data: NDArray[np.uint8],
    draws: Draws | None,
    out: NDArray[Any] | None,
) -> NDArray[Any] | None:
    """The clip of a row; None where there is none, which is noted. Raises where torchcodec is missing."""
    try:
        return rule.decode(data, draws, out, most_bytes=columns.sample_bytes)
    except MissingMediaSupportError:
        raise
    except MemoryLimitError as error:
        columns.note_bad(row, name, error)
        return None
    except Exception as error:
        columns.note_bad(row, name, _reason(error))
        return None


def _reason(error: Exception) -> str:
    """One line, without the place in torchcodec's own source."""
    text = (str(error) or type(error).__name__).splitlines()[0].rstrip()
    if "stream is unknown" in text:
        text = (
            "it has no stream of this kind that the FFmpeg installed can decode (`ffmpeg -codecs` lists them)"
        )
    return f"cannot decode it: {_IN_SOURCE.sub('', text)}"


_IN_SOURCE = re.compile(r"^\w+, \S+\.cpp:\d+, ")
