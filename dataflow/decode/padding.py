"""Masks of the padding of clips: the column that `Video(mask=True)` or `Audio(mask=True)` adds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.audio import Audio
from dataflow.decode.media import MissingMediaSupportError, frames_of, with_frames, with_reason
from dataflow.decode.rules import ReadBytes
from dataflow.decode.values import Draws
from dataflow.decode.video import Video
from sharding.spans import Bytes

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class PadMask:
    """Tells of each frame or sample of a clip whether it is padding: bool [frames] or [samples].

    A `MediaRule` over the same files as the clip's own. It looks at how long they are, and says nothing of
    files that make no clip: the clip does.
    """

    rule: Video | Audio
    """The rule of the clip."""

    @property
    def dtype(self) -> str:
        """The dtype of results: "bool"."""
        return "bool"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """[frames] or [samples]; None where clips differ."""
        return self.rule.pads_shape

    @property
    def random(self) -> bool:
        """False: what is shorter than its clip is not cut at random."""
        return False

    @property
    def reads_parts(self) -> bool:
        """Return whether a file's list of frames may do."""
        return self.rule.reads_parts

    def cut(self, read: ReadBytes, length: int, draws: Draws | None) -> Bytes:
        """The mask itself, where the list of frames tells; else all of the file. See `MediaRule.cut`."""
        try:
            pads = self.rule.pads_by_index(read, length)
        except ValueError as error:
            return with_reason(str(error))
        if pads is None:
            return read(0, length)
        return with_frames(_NOTHING, pads.astype(np.int64), np.zeros(len(pads), np.int64))

    def decode(
        self,
        data: Bytes,
        draws: Draws | None,
        out: NDArray[Any] | None = None,
        *,
        most_bytes: int = sys.maxsize,
    ) -> NDArray[Any]:
        """Return the mask of a stored value. See `MediaRule.decode`."""
        try:
            cut = frames_of(data)
            pads = self.rule.pads(data, most_bytes) if cut is None else cut[1] != 0
        except MissingMediaSupportError:
            raise
        except Exception:  # the clip's own decoding says why
            pads = np.zeros(self.shape or 0, np.bool_)
        if out is None:
            return pads
        np.copyto(out, pads)
        return out
