"""The parts that rules for sound and video share: torchcodec, where a clip begins, what it needs of a file.

A rule first *cuts* what it needs out of the stored value, then *decodes* that. Cutting reads parts of the
value and decodes nothing, so whoever fetches a value from afar fetches these parts only, and what was cut is
a value like any other: bytes. What cannot be cut is those bytes as they are stored. A value that contradicts
itself becomes a note of what is wrong, which decoding raises: the sample is bad, not the shard.
"""

from __future__ import annotations

import struct
import sys
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.rules import PartsRule, ReadBytes
from dataflow.decode.values import Draws
from sharding.errors import DataflowError
from sharding.spans import Bytes, Ints

ClipPosition = Literal["random", "middle", "start", "end"]
"""The position of a clip in its file."""
DRAW_CLIP = 23
"""Index of the random number that says where a clip begins: the one that images leave."""
_MARK = b"\0dataflow\0clip\0"
"""Begins what was cut. No file of sound or video begins so."""


class MissingMediaSupportError(DataflowError, ImportError):
    """torchcodec, or the FFmpeg libraries that it needs, cannot be loaded."""


def check_choices(rule: object, **choices: Any) -> None:
    """Raise `ValueError` where a field of a rule is none of the literals of its type."""
    for name, kind in choices.items():
        if getattr(rule, name) not in get_args(kind):
            listed, title = ", ".join(map(repr, get_args(kind))), type(rule).__name__
            raise ValueError(f"{title} {name} must be one of {listed}, got {getattr(rule, name)!r}")


class MediaRule(PartsRule, Protocol):
    """A rule that says what is wanted of files of sound or video: `Video` or `Audio`."""

    @property
    def dtype(self) -> str:
        """The dtype of the results."""
        ...

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of each result, where all have the same; else None."""
        ...

    @property
    def reads_parts(self) -> bool:
        """Return whether `cut` may read less than all of a value."""
        ...

    def decode(
        self,
        data: Bytes,
        draws: Draws | None,
        out: NDArray[Any] | None = None,
        *,
        most_bytes: int = sys.maxsize,
    ) -> NDArray[Any]:
        """Decode a value, or what was cut of it, into `out` or a new array. Thread-safe; releases the GIL.

        Raises `MemoryLimitError` for what takes more than `most_bytes`, `ValueError` or what the decoder
        raises for bytes that make no clip.
        """
        ...


def read_from(data: Bytes) -> ReadBytes:
    """Reads a value that is in memory."""
    return lambda offset, nbytes: data[offset : offset + nbytes]


def with_frames(clip: Bytes, numbers: Ints, ticks: Ints) -> Bytes:
    """A clip that was cut, and which of its frames are meant."""
    head = _MARK + struct.pack("<q", len(numbers)) + numbers.astype("<i8").tobytes()
    return np.concatenate([np.frombuffer(head + ticks.astype("<i8").tobytes(), np.uint8), clip])


def with_reason(reason: str) -> Bytes:
    """Return what stands for a value of which nothing can be cut."""
    return np.frombuffer(_MARK + struct.pack("<q", -1) + reason.encode(), np.uint8)


def frames_of(data: Bytes) -> tuple[Bytes, Ints, Ints] | None:
    """A clip that was cut, its frames' numbers and ticks; None: these are stored bytes.

    Raises `ValueError` with the reason where nothing could be cut.
    """
    start = len(_MARK) + 8
    if len(data) < start or data[: len(_MARK)].tobytes() != _MARK:
        return None
    count = struct.unpack("<q", data[len(_MARK) : start].tobytes())[0]
    if count < 0:
        raise ValueError(data[start:].tobytes().decode(errors="replace"))
    numbers, ticks = np.frombuffer(data[start : start + 16 * count].tobytes(), "<i8").reshape(2, count)
    return data[start + 16 * count :], numbers, ticks


def begins_at(room: float, position: str, draws: Draws | None) -> float:
    """Return where in [0, room] a clip begins: "start", "middle", "end" or "random"."""
    if position == "random":
        if draws is None:
            raise ValueError("random clips need draws")
        return float(draws[0, DRAW_CLIP]) * room
    return {"start": 0.0, "middle": room / 2, "end": room}[position]


def as_tensor(data: Bytes) -> Tensor:
    """Encoded bytes as decoders take them; a copy where they may not be written to, of which torch warns."""
    return torch.from_numpy(np.require(data, requirements=["C", "W"]))


def decoders() -> ModuleType:
    """`torchcodec.decoders`. Raises `MissingMediaSupportError` where it cannot be loaded."""
    try:
        import torchcodec.decoders

        if getattr(torchcodec, "ffmpeg_major_version", 0) is None:  # 0.17 fails at the first clip
            raise RuntimeError("no version of FFmpeg is found")
    except (ImportError, RuntimeError, OSError) as error:
        # torchcodec lists all it tried to load, for every version of FFmpeg, in hundreds of lines.
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MissingMediaSupportError(
            f"decoding sound and video needs torchcodec and FFmpeg's shared libraries ({what}): "
            "pip install 'dataflow-loader[media]', and install ffmpeg by the system's packages; beside a "
            "torch without CUDA, have torchcodec 0.13, as later ones on PyPI need CUDA's libraries"
        ) from error
    return torchcodec.decoders
