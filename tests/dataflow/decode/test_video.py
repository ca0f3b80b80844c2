"""Clips of videos: which frames they have, and which bytes of a file they need."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from media_kit import CODECS, FPS, number_of, numbers_of, video

from dataflow import Image, Video
from dataflow.decode.media import DRAW_CLIP
from dataflow.decode.mp4 import cut, read_index
from dataflow.decode.values import DRAWS


def draws(clip: float) -> np.ndarray:
    out = np.full((1, DRAWS), 0.5)
    out[0, DRAW_CLIP] = clip
    return out


def decoded(rule: Video, data: bytes, clip: float = 0.0) -> torch.Tensor:
    return torch.from_numpy(rule.decode(np.frombuffer(data, np.uint8), draws(clip)))


def shown(rule: Video, data: bytes, clip: float = 0.0) -> list[int]:
    return numbers_of(decoded(rule, data, clip))


def test_a_clip_about_a_row_goes_on_at_the_other_end_of_its_episode() -> None:
    def frames(pad: Any, clip: Any, at_s: float) -> list[int]:
        return Video(frames=4, fps=5, clip=clip, pad=pad).moments(at_s, 6, 10.0).astype(int).tolist()

    assert frames("loop", "start", 0.3) == [3, 5, 1, 3]
    assert frames("last", "start", 0.3) == [3, 5, 5, 5]
    assert frames("loop", "end", 0.1) == [1, 3, 5, 1]
    with pytest.raises(ValueError, match="goes around"):
        frames("error", "end", 0.1)


def test_frames_without_fps_follow_each_other() -> None:
    assert shown(Video(frames=5, clip="start"), video()) == [0, 1, 2, 3, 4]
    assert shown(Video(frames=4, clip="middle"), video()) == [28, 29, 30, 31]


def test_a_random_clip_begins_anywhere_from_the_first_to_the_last_place() -> None:
    assert shown(Video(frames=4), video(), 0.0) == [0, 1, 2, 3]
    assert shown(Video(frames=4), video(), 1 - 1e-9) == [56, 57, 58, 59]


def test_frames_at_fps_are_those_seen_then() -> None:
    # 30 frames a second, every third of them, and one shown twice where the clip is faster.
    assert shown(Video(frames=4, fps=10, clip="start"), video()) == [0, 3, 6, 9]
    assert shown(Video(frames=4, fps=60, clip="start"), video()) == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["mkv", "avi", "webm"])
def test_other_containers_give_the_frames_that_mp4_gives(kind: str) -> None:
    try:
        data = video(kind=kind)
    except RuntimeError:
        pytest.skip(f"this FFmpeg cannot encode {CODECS[kind]}")
    for rule in (Video(frames=4, fps=10), Video(frames=3), Video(frames=4, fps=15, clip="middle")):
        assert shown(rule, data, 0.7) == shown(rule, video(), 0.7)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("mpeg4", {"bf": "2"}),
        ("libx264", {"bf": "2"}),
        ("libx264", {"bf": "3", "x264-params": "open-gop=1"}),
        ("libx265", {"x265-params": "log-level=none"}),
        ("libsvtav1", {}),
    ],
    ids=["mpeg4", "h264", "h264-open", "hevc", "av1"],
)
def test_any_frames_of_a_clip_that_was_cut_are_exact(codec: str, options: dict[str, str]) -> None:
    from torchcodec.decoders import VideoDecoder

    try:
        data = np.frombuffer(video(codec=codec, **options), np.uint8)
    except RuntimeError:
        pytest.skip(f"this FFmpeg cannot encode {codec}")
    index = read_index(lambda offset, n: data[offset : offset + n], len(data))
    assert index is not None
    rng = np.random.default_rng(0)
    for turn in range(12):  # by turns frames far apart, and frames that follow each other
        first = int(rng.integers(0, 55))
        frames = np.sort(rng.choice(60, 4, replace=False)) if turn % 2 else np.arange(first, first + 5)
        clip, numbers, _ = cut(index, frames, lambda offset, n: data[offset : offset + n], len(data))
        decoder = VideoDecoder(torch.from_numpy(clip))
        assert [number_of(frame) for frame in decoder.get_frames_at(numbers.tolist()).data] == frames.tolist()


def test_a_clip_of_an_mp4_reads_its_list_of_frames_and_their_groups_only() -> None:
    data = np.frombuffer(video(600), np.uint8)
    ranges: list[tuple[int, int]] = []

    def read(offset: int, nbytes: int) -> np.ndarray:
        ranges.append((offset, nbytes))
        return data[offset : offset + nbytes]

    rule = Video(frames=6)
    value = rule.cut(read, len(data), draws(0.9))
    index = read_index(lambda offset, n: data[offset : offset + n], len(data))
    assert index is not None
    pixels = ranges[-1][1]
    assert pixels <= int(np.sort(index.sizes)[-24:].sum())  # two groups of 12
    assert numbers_of(torch.from_numpy(rule.decode(value, draws(0.9)))) == list(range(535, 541))


def test_a_video_shorter_than_its_clip_is_an_error_unless_it_is_filled() -> None:
    short = video(4)
    with pytest.raises(
        ValueError, match=r"has 4 frames, too short for a clip of 6 frames; Video\(pad='last'\)"
    ):
        decoded(Video(frames=6), short)
    with pytest.raises(ValueError, match=r"has 0.133 s, too short for a clip of 3 frames at 10 a second"):
        decoded(Video(frames=3, fps=10), short)
    assert shown(Video(frames=6, pad="last"), short) == [0, 1, 2, 3, 3, 3]
    assert shown(Video(frames=6, pad="loop"), short) == [0, 1, 2, 3, 0, 1]
    assert shown(Video(frames=3, fps=10, pad="last"), short) == [0, 3, 3]
    assert shown(Video(frames=3, fps=10, pad="loop"), short) == [0, 3, 2]


def test_all_frames_have_the_same_part_and_mirroring() -> None:
    rule = Video(frames=3, clip="start", image=Image(size=32, flip=1.0))
    plain = decoded(Video(frames=3, clip="start", size=32), video())
    assert torch.equal(decoded(rule, video()), plain.flip(-1))


def test_frames_are_normalised_as_images_are() -> None:
    rule = Video(frames=2, image=Image(size=16, mean=(0.5,) * 3, std=(0.5,) * 3))
    clip = decoded(rule, video())
    assert (clip.dtype, clip.shape) == (torch.float32, (2, 3, 16, 16))


def test_a_video_without_size_keeps_its_own() -> None:
    assert decoded(Video(fps=10), video()).shape == (20, 3, 64, 64)
    assert Video(fps=10).shape is None


def test_a_truncated_video_says_so() -> None:
    data = video()
    with pytest.raises(ValueError, match="truncated"):
        decoded(Video(frames=4), data[: len(data) // 2])
    with pytest.raises(ValueError, match="empty"):
        decoded(Video(frames=4), b"")
    with pytest.raises(Exception, match=r"."):
        decoded(Video(frames=4), b"no video" * 100)


@pytest.mark.full
def test_damaged_lists_of_frames_raise_errors_and_nothing_else() -> None:
    data = np.frombuffer(video(), np.uint8)
    at = data.tobytes().index(b"moov")
    rng = np.random.default_rng(1)
    rule = Video(frames=4)
    for _ in range(300):
        damaged = data.copy()
        damaged[rng.integers(at, len(data), 3)] = rng.integers(0, 256, 3)
        value = rule.cut(
            partial(lambda d, offset, n: d[offset : offset + n], damaged), len(damaged), draws(0.5)
        )
        assert value.dtype == np.uint8


def test_frame_rate_of_the_clips_is_the_one_that_was_encoded() -> None:
    data = np.frombuffer(video(), np.uint8)
    index = read_index(lambda offset, n: data[offset : offset + n], len(data))
    assert index is not None
    assert index.end / index.ticks_per_s == pytest.approx(60 / FPS)
