"""Clips of sound: which samples they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from media_kit import first_sample, ramp, sound

from dataflow import Audio
from dataflow.decode.media import DRAW_CLIP
from dataflow.decode.values import DRAWS


def decoded(rule: Audio, data: bytes, clip: float = 0.0) -> torch.Tensor:
    draws = np.full((1, DRAWS), 0.5)
    draws[0, DRAW_CLIP] = clip
    return torch.from_numpy(rule.decode(np.frombuffer(data, np.uint8), draws))


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_clip_has_the_samples_from_its_first_on(kind: str) -> None:
    clip = decoded(Audio(rate=16000, seconds=0.25), sound(kind=kind), 0.5)
    assert (clip.dtype, clip.shape) == (torch.float32, (1, 4000))
    assert first_sample(clip) == 6000  # half of the 12,001 places
    assert torch.allclose(clip, ramp(16000)[:, 6000:10000], atol=1e-4)


def test_places_of_clips() -> None:
    data = sound(kind="flac")
    places = [
        first_sample(decoded(Audio(rate=16000, seconds=0.25, clip=clip), data, draw))
        for clip, draw in [("start", 0.5), ("middle", 0.0), ("random", 0.0), ("random", 1 - 1e-9)]
    ]
    assert places == [0, 6000, 0, 12000]


def test_sound_is_resampled_and_mixed() -> None:
    data = sound(16000, "wav", 16000, 2)
    assert decoded(Audio(rate=8000, seconds=0.5), data).shape == (1, 4000)
    assert decoded(Audio(rate=8000, seconds=0.5, mono=False, channels=2), data).shape == (2, 4000)
    assert decoded(Audio(mono=False), data).shape == (2, 16000)


def test_the_type_follows_from_the_rule() -> None:
    assert Audio(rate=16000, seconds=0.5).shape == (1, 8000)
    assert Audio(rate=16000, seconds=0.5, mono=False, channels=2).shape == (2, 8000)
    for rule in (Audio(), Audio(rate=16000), Audio(seconds=1), Audio(rate=16000, seconds=1, mono=False)):
        assert rule.shape is None


def test_mp3_gives_clips_of_the_asked_length_at_any_place() -> None:
    try:
        data = sound(kind="mp3")
    except RuntimeError:
        pytest.skip("this FFmpeg cannot encode mp3")
    for place in (0.0, 0.5, 1 - 1e-9):
        assert decoded(Audio(rate=16000, seconds=0.5), data, place).shape == (1, 8000)


def test_sound_shorter_than_its_clip_is_an_error_unless_it_is_filled() -> None:
    short = sound(4000)
    with pytest.raises(ValueError, match=r"has 0.250 s, too short for a clip of 0.5 s; Audio\(pad='zeros'\)"):
        decoded(Audio(rate=16000, seconds=0.5), short)
    zeros = decoded(Audio(rate=16000, seconds=0.5, pad="zeros"), short)
    assert torch.equal(zeros[:, 4000:], torch.zeros(1, 4000))
    loop = decoded(Audio(rate=16000, seconds=0.5, pad="loop"), short)
    assert torch.equal(loop[:, 4000:], loop[:, :4000])


def test_bytes_that_are_no_sound_raise() -> None:
    with pytest.raises(ValueError, match="empty"):
        decoded(Audio(), b"")
    with pytest.raises(Exception, match=r"."):
        decoded(Audio(), b"no sound at all" * 100)
