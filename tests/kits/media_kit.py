"""Small files of sound and video: which frame a picture is can be read from its pixels.

torchcodec encodes them. Where it or FFmpeg's libraries are missing, tests that import this skip.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.decode.media import decoders

try:
    decoders()
    from torchcodec.encoders import AudioEncoder, VideoEncoder
except (ImportError, RuntimeError, OSError) as error:
    reason = f"torchcodec, or FFmpeg's shared libraries: {str(error).splitlines()[0]}"
    pytest.skip(reason, allow_module_level=True)

SIDE = 64
FPS = 30
CODECS = {"mp4": "mpeg4", "mkv": "mpeg4", "avi": "mpeg4", "webm": "libvpx-vp9", "mov": "mpeg4"}
"""Which every build of FFmpeg has, but for VP9."""


def picture(number: int) -> Tensor:
    """Bits of a number as light and dark squares, uint8 [3, SIDE, SIDE]."""
    bits = torch.tensor([235 if number >> bit & 1 else 16 for bit in range(16)], dtype=torch.uint8)
    return (
        bits.reshape(4, 4).repeat_interleave(SIDE // 4, 0).repeat_interleave(SIDE // 4, 1).expand(3, -1, -1)
    )


def number_of(frame: Tensor) -> int:
    """The number that a frame of any size shows; [3, height, width]."""
    step = frame.shape[-1] // 4
    bits = frame.float().mean(0)[step // 2 :: step, step // 2 :: step] > 128
    return sum(int(bit) << at for at, bit in enumerate(bits.flatten().tolist()))


def numbers_of(clip: Tensor) -> list[int]:
    return [number_of(frame) for frame in clip]


@cache
def video(
    num_frames: int = 60, kind: str = "mp4", first: int = 0, codec: str = "", noise: int = 0, **options: Any
) -> bytes:
    """A video at 30 frames a second, a key frame in 12, that shows the numbers from `first` on.

    `noise`: levels that pixels differ by at random, so that it has more bytes.
    """
    frames = torch.stack([picture(first + i) for i in range(num_frames)])
    if noise:
        added = np.random.default_rng(0).integers(-noise, noise, frames.shape)
        frames = torch.from_numpy((frames.numpy() + added).clip(0, 255).astype(np.uint8))
    more = {"g": "12", **options}
    encoded = VideoEncoder(frames, frame_rate=FPS).to_tensor(
        {"mkv": "matroska"}.get(kind, kind), codec=codec or CODECS[kind], extra_options=more
    )
    return encoded.numpy().tobytes()


def ramp(num_samples: int, channels: int = 1) -> Tensor:
    """Sound whose value tells the sample: -0.5 upwards, another slope in each channel."""
    base = torch.arange(num_samples) / 65536 - 0.5
    return torch.stack([base / (1 + channel) for channel in range(channels)])


@cache
def sound(num_samples: int = 16000, kind: str = "wav", rate: int = 16000, channels: int = 1) -> bytes:
    encoded = AudioEncoder(ramp(num_samples, channels), sample_rate=rate).to_tensor(kind)
    return encoded.numpy().tobytes()


def first_sample(clip: Tensor) -> int:
    """Which sample of `ramp` a clip [channels, samples] begins with."""
    return int(np.rint((float(clip[0, 0]) + 0.5) * 65536))
