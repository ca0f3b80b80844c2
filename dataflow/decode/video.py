"""Clips of encoded videos: what `decode={"mp4": Video(frames=16, fps=8, size=224)}` does.

A frame is chosen by its time stamp: at time t that one is seen whose time is the last not after t. MP4 files
are cut (`dataflow.decode.mp4`): what a decoder gets are the groups of frames around the clip. Other files are
decoded whole, from the start of the group on where torchcodec can jump. One thread each; FFmpeg runs without
the interpreter lock. A few frames are decoded at a time, so that a clip takes no memory beside its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.image import Image, resize_part
from dataflow.decode.media import (
    ClipPosition,
    as_tensor,
    begins_at,
    check_choices,
    decoders,
    frames_of,
    read_from,
    with_frames,
    with_reason,
)
from dataflow.decode.mp4 import CLIP_TICKS, FrameIndex, cut, read_index
from dataflow.decode.rules import ReadBytes
from dataflow.decode.values import Draws, check_fits
from sharding.spans import Bytes, Ints

Numbers = np.number[Any] | NDArray[np.number[Any]]
_TICK_S = 5e-4
"""Seconds to a frame's time that count as it, where ticks are not known: half of Matroska's."""
_AT_ONCE = 8
"""Frames decoded by one call."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """Decode a clip of each video to [frames, 3, height, width], uint8 unless `image` says otherwise.

    Args:
        frames: frames of a clip. None: all, so that clips differ in length and a batch is a list.
        fps: frames a second of the clip, whatever the video's are: frame i is what is seen i / fps seconds
            after the clip's begin. None: frames as they follow each other in the video.
        size: height and width of the result, as `Image(size=...)`. None: each video's own, and a batch is a
            list.
        image: the rule for each frame, in place of `size`: `Image(size=112, crop="random_resized",
            flip=0.5)`. All frames of a clip have the same part and the same mirroring.
        clip: the position of the clip in its video. Of a LeRobot dataset, its position about the time of its
            row: "start" is from there on, "end" until there, and "random" is none.
        pad: a video that is shorter than the clip is an error, shows its last frame on and on, or begins
            again.
        mask: True if batches have a column `<name>_is_pad` after it, bool [batch, frames]: True where a frame
            is padding, since the clip reaches beyond its video (of a LeRobot dataset, its episode).

    Raises:
        ValueError: a setting is out of range, or settings contradict each other.

    Examples:
        >>> dataset = ShardedDataset("videos/*.tar", decode={"mp4": Video(frames=8, size=112)})
        >>> dataset[0]["mp4"].shape
        torch.Size([8, 3, 112, 112])
    """

    output_by: ClassVar[str] = "dataflow.outputs.media:clip_output"
    takes_lists: ClassVar[bool] = False

    frames: int | None = None
    fps: float | None = None
    size: int | tuple[int, int] | None = None
    image: Image | None = None
    clip: ClipPosition = "random"
    pad: Literal["error", "last", "loop"] = "error"
    mask: bool = False

    def __post_init__(self) -> None:
        if self.mask and self.frames is None:
            raise ValueError(
                "Video(mask=True) needs frames=: without it all frames come, and none is padding"
            )
        if self.frames is not None and self.frames < 1:
            raise ValueError(f"Video frames must be at least 1, got {self.frames}")
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ValueError(f"Video fps must be greater than 0, got {self.fps}")
        check_choices(self, clip=ClipPosition, pad=Literal["error", "last", "loop"])
        if self.image is not None and self.size is not None:
            raise ValueError("Video size is image's: give Video(image=Image(size=...)) alone")
        if self.image is not None and self.image.mode != "RGB":
            raise ValueError(f"Video frames are RGB; got Image(mode={self.image.mode!r})")
        Image(size=self.size)  # raises for a size that is none

    @property
    def frame(self) -> Image:
        """Return what becomes of each frame."""
        return self.image or Image(size=self.size)

    @property
    def dtype(self) -> str:
        """The dtype of results: "uint8", or "float32" where `image` normalises."""
        return self.frame.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of each result; None where videos differ."""
        if self.frames is None or self.frame.size is None:
            return None
        return (self.frames, *self.frame.shape)

    @property
    def random(self) -> bool:
        """Return whether decoding needs draws."""
        return self.frame.random or (self.frames is not None and self.clip == "random")

    @property
    def reads_parts(self) -> bool:
        """Return whether a clip may need less than the whole file: not if all frames are wanted."""
        return self.frames is not None

    @property
    def pads_shape(self) -> tuple[int, ...] | None:
        """The shape of a mask of padding, [frames]; None where clips differ in length."""
        return None if self.frames is None else (self.frames,)

    def cut(self, read: ReadBytes, length: int, draws: Draws | None) -> Bytes:
        """Return what a clip needs of a video; all of what is not MP4, or not cut by us.

        See `MediaRule.cut`.
        """
        try:
            index = read_index(read, length)
            if index is not None:
                return self.cut_by(index, self._frames_of(index, draws), read, length)
        except ValueError as error:
            return with_reason(str(error))
        return read(0, length)

    def cut_by(self, index: FrameIndex, frames: Ints, read: ReadBytes, length: int) -> Bytes:
        """Some of the frames shown of an MP4. Raises `ValueError` where it lacks them."""
        clip, numbers, ticks = cut(index, np.unique(frames), read, length)
        positions = np.unique(frames, return_inverse=True)[1]
        return with_frames(clip, numbers[positions], ticks[positions])

    def decode(
        self,
        data: Bytes,
        draws: Draws | None,
        out: NDArray[Any] | None = None,
        *,
        most_bytes: int = sys.maxsize,
    ) -> NDArray[Any]:
        """The clip, [frames, 3, height, width]. See `MediaRule.decode`.

        Raises `ValueError` for a video that is shorter than the clip, or that is damaged.
        """
        if not len(data):
            raise ValueError("the video is empty")
        chosen = frames_of(data)
        if chosen is None and self.reads_parts:
            data = self.cut(read_from(data), len(data), draws)
            chosen = frames_of(data)
        video = data if chosen is None else chosen[0]
        decoder = decoders().VideoDecoder(
            as_tensor(video), dimension_order="NHWC", num_ffmpeg_threads=1, device="cpu"
        )
        height, width = decoder.metadata.height or 1, decoder.metadata.width or 1
        frame = self._sized(height, width)
        frame_bytes = math.prod(frame.shape) * np.dtype(frame.dtype).itemsize
        at_once = max(1, min(_AT_ONCE, most_bytes // (_AT_ONCE * 3 * height * width)))
        if chosen is not None:
            numbers, ticks = chosen[1:]
            check_fits(len(numbers) * frame_bytes, most_bytes)
            return self._decoded(decoder.get_frames_at, numbers, ticks / CLIP_TICKS, draws, out, at_once)
        if self.fps is None:
            check_fits((self.frames or len(decoder)) * frame_bytes, most_bytes)
            numbers = self._numbers(len(decoder), draws)
            return self._decoded(decoder.get_frames_at, numbers, None, draws, out, at_once)
        begin, end = decoder.metadata.begin_stream_seconds, decoder.metadata.end_stream_seconds
        check_fits(int((self.frames or max(1.0, (end - begin) * self.fps)) * frame_bytes), most_bytes)
        seconds = self._seconds(begin, end, draws) + _TICK_S
        seconds = np.clip(seconds, begin, np.nextafter(end, begin))
        return self._decoded(decoder.get_frames_played_at, seconds, None, draws, out, at_once)

    def moments(self, at_s: float, count: int, fps: float) -> NDArray[np.float64]:
        """Frames of a clip about a time in an episode of `count` frames, as float64 [frames] from its first.

        Beyond the episode `pad` says what is seen: its first or last frame, or its other end ("loop").
        Raises `ValueError` where it does not say.
        """
        numbers = self._wanted(np.float64(at_s), fps)
        if self.pad == "error" and self.beyond(np.float64(at_s), np.int64(count), fps).any():
            raise ValueError(
                f"the clip reaches beyond its episode of {count / fps:.3f} s: from {numbers[0] / fps:.3f} s "
                f"to {numbers[-1] / fps:.3f} s; Video(pad='last') repeats the frames at its ends, "
                "'loop' goes around"
            )
        inside = numbers % count if self.pad == "loop" else numbers
        moments: NDArray[np.float64] = np.floor(np.clip(inside, 0, count - 1) + 1e-3)
        return moments

    def beyond(self, at_s: Numbers, count: Numbers, fps: float) -> NDArray[np.bool_]:
        """Return which frames of clips at times in episodes of `count` frames are padding, [..., frames]."""
        numbers = self._wanted(at_s, fps)
        return (numbers < -0.5) | (numbers > np.asarray(count)[..., None] - 0.5)

    def _wanted(self, at_s: Numbers, fps: float) -> NDArray[np.float64]:
        """Frames of clips about times, from the first of the episode, which may lack them: [..., frames]."""
        frames = self.frames or 1
        before = {"start": 0, "middle": (frames - 1) // 2, "end": frames - 1}[self.clip]
        numbers: NDArray[np.float64] = np.rint(np.asarray(at_s) * fps)[..., None] + (
            (np.arange(frames) - before) * (fps / (self.fps or fps))
        )
        return numbers

    # ---- padding --------------------------------------------------------------------------------------

    def pads(self, data: Bytes, most_bytes: int) -> NDArray[np.bool_]:
        """Return which frames of the clip of a stored video are padding, [frames]. Raises as `decode`."""
        pads = self.pads_by_index(read_from(data), len(data))
        if pads is not None:
            return pads
        decoder = decoders().VideoDecoder(as_tensor(data), num_ffmpeg_threads=1, device="cpu")
        if self.fps is None:
            return self._beyond_end(len(decoder))
        shown = decoder.metadata
        return self._beyond_end(shown.end_stream_seconds - shown.begin_stream_seconds)

    def pads_by_index(self, read: ReadBytes, length: int) -> NDArray[np.bool_] | None:
        """Do as `pads`, by the list of frames of an MP4; None where it must be read whole."""
        index = read_index(read, length)
        if index is None:
            return None
        begin, end = self._shown(index)
        return self._beyond_end(len(index.shown) if self.fps is None else end - begin)

    def _beyond_end(self, have: float) -> NDArray[np.bool_]:
        """Return which frames a video lacks that has so many, or so many seconds; it begins the clip."""
        return np.arange(self.frames or 0) / (self.fps or 1) >= have

    # ---- which frames ---------------------------------------------------------------------------------

    def _frames_of(self, index: FrameIndex, draws: Draws | None) -> Ints:
        if self.fps is None:
            return self._numbers(len(index.shown), draws)
        return index.at(self._seconds(*self._shown(index), draws))

    def _shown(self, index: FrameIndex) -> tuple[float, float]:
        """Return from when to when a video is shown, in seconds."""
        begin = int(index.times[index.shown[0]])
        return begin / index.ticks_per_s, index.end / index.ticks_per_s

    def _numbers(self, count: int, draws: Draws | None) -> Ints:
        """Numbers of the clip's frames in a video of `count`."""
        frames = count if self.frames is None else self.frames
        if frames > count:
            self._check_short(f"{count} frames")
        room = max(0, count - frames)
        first = int(begins_at(room + (self.clip == "random"), self.clip, draws))
        numbers = np.arange(first, first + frames)
        return numbers % count if self.pad == "loop" else np.minimum(numbers, count - 1)

    def _seconds(self, begin: float, end: float, draws: Draws | None) -> NDArray[np.float64]:
        """Return when the clip's frames are seen in a video that is shown from `begin` to `end`."""
        assert self.fps is not None
        length = end - begin
        if not 0 < length < float("inf"):
            raise ValueError(f"the video is shown from {begin:g} s to {end:g} s")
        frames = max(1, int(np.ceil(length * self.fps - 1e-6))) if self.frames is None else self.frames
        if (frames - 1) / self.fps >= length:
            self._check_short(f"{length:.3f} s")
        first = begins_at(max(0.0, length - frames / self.fps), self.clip, draws)
        seconds = first + np.arange(frames) / self.fps
        return begin + (seconds % length if self.pad == "loop" else seconds)

    def _check_short(self, have: str) -> None:
        if self.pad == "error":
            each = "" if self.fps is None else f" at {self.fps:g} a second"
            raise ValueError(
                f"the video has {have}, too short for a clip of {self.frames} frames{each}; "
                "Video(pad='last') or 'loop' fills it, on_error='skip' leaves it out"
            )

    # ---- pixels ---------------------------------------------------------------------------------------

    def _sized(self, height: int, width: int) -> Image:
        """Return what becomes of a frame of this size. Raises `ValueError` for one that is too large."""
        image = self.frame
        if height * width > image.max_pixels:
            raise ValueError(f"{height} x {width} pixels are more than max_pixels={image.max_pixels}")
        return replace(image, size=(height, width)) if image.size is None else image

    def _decoded(
        self,
        get: Callable[[list[Any]], Any],
        positions: NDArray[Any],
        expected_s: NDArray[np.float64] | None,
        draws: Draws | None,
        out: NDArray[Any] | None,
        at_once: int,
    ) -> NDArray[Any]:
        """Decode and resize the frames at some positions, a few at a time."""
        resize: Callable[[Bytes, NDArray[Any]], None] | None = None
        for first in range(0, len(positions), at_once):
            batch = get(positions[first : first + at_once].tolist())
            pixels = batch.data.numpy()
            if expected_s is not None:
                have_s = batch.pts_seconds.numpy()
                if (np.abs(have_s - expected_s[first : first + at_once]) > 1e-3).any():
                    raise ValueError("a frame of the clip cannot be decoded: the video is damaged")
            if resize is None:
                height, width = pixels.shape[1:3]
                image = self._sized(height, width)
                if out is None:
                    out = np.empty((len(positions), *image.shape), image.dtype)
                resize = resize_part(image, (height, width), draws)
            assert out is not None
            for i, frame in enumerate(pixels, first):
                resize(frame, out[i])
        assert out is not None
        return out
