"""Clips of encoded sound: what `decode={"flac": Audio(rate=16000, seconds=2)}` does.

torchcodec decodes from the first sample of the file on, as FFmpeg cannot jump to an exact sample of most
formats, and resamples what is wanted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.media import ClipPosition, as_tensor, begins_at, check_choices, decoders
from dataflow.decode.rules import ReadBytes
from dataflow.decode.values import Draws, check_fits
from sharding.spans import Bytes


@dataclass(frozen=True, kw_only=True)
class Audio:
    """Decode sound to a tensor [channels, samples], float32 in [-1, 1].

    Args:
        rate: samples a second; sound of another rate is resampled. None: each file's own, and a batch is a
            list.
        seconds: length of a clip. None: all of each file, and a batch is a list.
        mono: True if all channels are mixed into one. False: each file's own, and a batch is a list.
        channels: with `mono=False`: every file is mixed into so many channels.
        clip: the position of the clip in its file.
        pad: a file that is shorter than the clip is an error, has silence at its end, or begins again.
        mask: True if batches have a column `<name>_is_pad` after it, bool [batch, samples] (without `rate` a
            list): True where a sample is padding, since the file is shorter than the clip.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> dataset = ShardedDataset("sounds/*.tar", decode={"wav": Audio(rate=16_000, seconds=0.5)})
        >>> dataset[0]["wav"].shape
        torch.Size([1, 8000])
    """

    output_by: ClassVar[str] = "dataflow.outputs.media:clip_output"
    takes_lists: ClassVar[bool] = False

    rate: int | None = None
    seconds: float | None = None
    mono: bool = True
    channels: int | None = None
    clip: ClipPosition = "random"
    pad: Literal["error", "zeros", "loop"] = "error"
    mask: bool = False

    def __post_init__(self) -> None:
        if self.mask and self.seconds is None:
            raise ValueError(
                "Audio(mask=True) needs seconds=: without it all of a file comes, and no padding"
            )
        for field in ("rate", "seconds", "channels"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"Audio {field} must be greater than 0, got {value}")
        if self.rate is not None and self.seconds is not None and self._num_samples(self.rate) < 1:
            raise ValueError(f"Audio seconds={self.seconds} at rate={self.rate} has no sample")
        if self.mono and self.channels not in (None, 1):
            raise ValueError(f"Audio channels={self.channels} needs mono=False")
        check_choices(self, clip=ClipPosition, pad=Literal["error", "zeros", "loop"])

    @property
    def dtype(self) -> str:
        """The dtype of results: "float32"."""
        return "float32"

    @property
    def num_channels(self) -> int | None:
        """Channels of results; None: each file's own."""
        return 1 if self.mono else self.channels

    @property
    def shape(self) -> tuple[int, ...] | None:
        """[channels, samples] of each result; None where files differ."""
        if self.rate is None or self.seconds is None or self.num_channels is None:
            return None
        return (self.num_channels, self._num_samples(self.rate))

    @property
    def random(self) -> bool:
        """Return whether decoding needs draws."""
        return self.seconds is not None and self.clip == "random"

    @property
    def pads_shape(self) -> tuple[int, ...] | None:
        """The shape of a mask of padding, [samples]; None where clips differ in length."""
        return None if self.rate is None or self.seconds is None else (self._num_samples(self.rate),)

    @property
    def reads_parts(self) -> bool:
        """False: files of sound are read whole."""
        return False

    def cut(self, read: ReadBytes, length: int, draws: Draws | None) -> Bytes:
        """All of the file. See `MediaRule.cut`."""
        return read(0, length)

    def decode(
        self,
        data: Bytes,
        draws: Draws | None,
        out: NDArray[Any] | None = None,
        *,
        most_bytes: int = sys.maxsize,
    ) -> NDArray[Any]:
        """The clip, [channels, samples]. See `MediaRule.decode`.

        Raises `ValueError` for sound that is shorter than the clip.
        """
        if not len(data):
            raise ValueError("the sound is empty")
        decoder = decoders().AudioDecoder(
            as_tensor(data), sample_rate=self.rate, num_channels=self.num_channels
        )
        room = _Room(decoder.metadata, self.rate, self.num_channels, most_bytes)
        room.check_rate(data, decoder.metadata)
        samples, count = self._clip(decoder, draws, room)
        if samples.shape[1] < count:
            samples = self._padded(samples, count, self.rate or decoder.metadata.sample_rate)
        if out is None:
            return samples
        np.copyto(out, samples)
        return out

    def pads(self, data: Bytes, most_bytes: int) -> NDArray[np.bool_]:
        """Return which samples of the clip of a stored sound are padding, [samples]. Raises as `decode`."""
        decoder = decoders().AudioDecoder(as_tensor(data), sample_rate=self.rate, num_channels=1)
        room = _Room(decoder.metadata, self.rate, 1, most_bytes)
        room.check_rate(data, decoder.metadata)
        samples, count = replace(self, clip="start")._clip(decoder, None, room)
        have: int = samples.shape[1]
        return np.arange(count) >= have

    def pads_by_index(self, read: ReadBytes, length: int) -> None:
        """None: files of sound have no list of what they hold."""
        return

    def _num_samples(self, rate: int) -> int:
        assert self.seconds is not None
        return round(self.seconds * rate)

    def _clip(self, decoder: Any, draws: Draws | None, room: _Room) -> tuple[NDArray[np.float32], int]:
        """Return what a sound has of the clip, [channels, samples], and how many samples it should have."""
        if self.seconds is None:
            whole = room.all_samples(decoder)
            return whole, whole.shape[1]
        stored_rate = decoder.metadata.sample_rate
        count = self._num_samples(self.rate or stored_rate)
        room.check(count)
        begin_s = decoder.metadata.begin_stream_seconds_from_header or 0.0
        length_s = decoder.metadata.duration_seconds_from_header
        if length_s is not None:
            # At a sample of the file; what its header says of its length may be rounded.
            rest = max(0, int(length_s * stored_rate + 0.5) - round(self.seconds * stored_rate))
            first_s = begin_s + int(begins_at(rest + (self.clip == "random"), self.clip, draws)) / stored_rate
            samples = _array(
                decoder.get_samples_played_in_range(
                    first_s, first_s + (count + 1) / (self.rate or stored_rate)
                )
            )
            if samples.shape[1] >= count:
                return samples[:, :count], count
        whole = room.all_samples(decoder)
        have = whole.shape[1]
        if have < count:
            return whole, count
        first = int(begins_at(have - count + (self.clip == "random"), self.clip, draws))
        return whole[:, first : first + count], count

    def _padded(self, samples: NDArray[np.float32], count: int, rate: int) -> NDArray[np.float32]:
        have = samples.shape[1]
        if self.pad == "error" or not have:
            raise ValueError(
                f"the sound has {have / rate:.3f} s, too short for a clip of {self.seconds:g} s; "
                "Audio(pad='zeros') or 'loop' fills it, on_error='skip' leaves it out"
            )
        if self.pad == "loop":
            return samples[:, np.arange(count) % have]
        return np.pad(samples, ((0, 0), (0, count - have)))


_ODD_RATIO = 64
"""Sound is resampled frame by frame, and one frame may have 65,535 samples: to more than so many times as
many only when it is known how many there are."""
_MOST_OF_A_BYTE = 16
"""Samples that a byte can hold where what a header says of the length is believed. Of silence there may be
any number, and of a stream that never knew its length the header says nonsense."""


class _Room:
    """The number of samples that a sound may have.

    Args:
        metadata: of the stream.
        rate: of what is delivered; None: the stream's own.
        num_channels: of what is delivered; None: the stream's own.
        most_bytes: that it may take.
    """

    def __init__(self, metadata: Any, rate: int | None, num_channels: int | None, most_bytes: int) -> None:
        self._stored_rate = max(1, metadata.sample_rate or 1)
        self._rate = rate or self._stored_rate
        self._begin_s = metadata.begin_stream_seconds_from_header or 0.0
        self._each, self._most_bytes = 4 * (num_channels or metadata.num_channels or 1), most_bytes

    def check(self, num_samples: int) -> None:
        """Raise `MemoryLimitError` where so many of them, at the delivered rate, take too much."""
        check_fits(num_samples * self._each, self._most_bytes)

    def check_rate(self, data: Bytes, metadata: Any) -> None:
        """Look at what a file says of itself before anything is resampled; at all of it if that is odd."""
        length_s, ratio = metadata.duration_seconds_from_header, self._rate / self._stored_rate
        if length_s is not None and 0 <= length_s * self._stored_rate <= _MOST_OF_A_BYTE * len(data):
            self.check(int(length_s * self._rate) // 2)  # some headers only guess
        if ratio > _ODD_RATIO:
            decoder = decoders().AudioDecoder(as_tensor(data), num_channels=1)
            most = int(self._most_bytes / self._each / ratio)
            stored = _array(
                decoder.get_samples_played_in_range(stop_seconds=self._end_s(most, self._stored_rate))
            )
            self.check(int(stored.shape[1] * ratio))

    def all_samples(self, decoder: Any) -> NDArray[np.float32]:
        """All of a sound, whatever its header says, but no more than there is room for."""
        if self._most_bytes == sys.maxsize:
            return _array(decoder.get_all_samples())
        most = self._most_bytes // self._each
        samples = _array(decoder.get_samples_played_in_range(stop_seconds=self._end_s(most, self._rate)))
        self.check(samples.shape[1])
        return samples

    def _end_s(self, num_samples: int, rate: int) -> float:
        """Return when one sample more than so many was played."""
        return float(self._begin_s + (num_samples + 2) / rate)


def _array(samples: Any) -> NDArray[np.float32]:
    array: NDArray[np.float32] = samples.data.numpy()
    return array
