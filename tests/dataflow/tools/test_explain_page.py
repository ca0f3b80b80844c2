"""What the page of `dataflow explain --html` shows of pictures, sound, clips, and a step's neighbours."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from datasets_kit import write_tar
from programs_kit import run_command

from dataflow import Audio, DataLoader, Image, Mixture, Optional, Packed, ShardedDataset, ShardWriter, Video
from dataflow.batch.packed import PackedRows
from dataflow.decode.image import resize_part
from dataflow.ragged import Ragged
from dataflow.tools.explain import neighbours, stored, values
from dataflow.tools.explain.neighbours import StepMeasures, compared, unusual
from dataflow.tools.explain.values import PageRoom, TokenWords, kind_of, png_of, values_of, wav_of

Page = Callable[..., str]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """The page of steps of a loader that has run."""

    def made(loader: Callable[[], DataLoader], *options: str, steps: int = 1) -> str:
        monkeypatch.setattr(sys.modules[__name__], "loader", loader, raising=False)
        with loader() as running:
            for _, _ in zip(range(steps), running, strict=False):
                pass
            (tmp_path / "state.json").write_text(json.dumps(running.state_dict()))
        given = (f"{__name__}:loader", "--state", f"{tmp_path}/state.json", "--html", f"{tmp_path}/page.html")
        code, text = run_command("explain", *given, *options)
        assert code == 0, text
        return (tmp_path / "page.html").read_text()

    return made


def files_in(made: str, kind: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(rf'src="data:{kind};base64,([\w+/=]+)"', made)]


def noise(n: int, height: int = 40, width: int = 60) -> Any:
    return np.random.default_rng(n).integers(0, 256, (height, width, 3), np.uint8)


def test_a_whole_picture_has_a_box_around_the_part_that_was_delivered(page: Page, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{n}.png", png_of(noise(n))) for n in range(4)])
    rule = Image(size=16, crop="random_resized", interpolation="area")

    def loader() -> DataLoader:
        dataset = ShardedDataset(f"{tmp_path}/a.tar", decode={"png": rule})
        return DataLoader(dataset, 4, shuffle=True, seed=5, num_workers=0)

    made = page(loader)
    boxes = re.findall(r'viewBox="0 0 60 40".*?<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', made)
    assert len(boxes) == 4
    shown = files_in(made, "image/png")
    delivered, whole = shown[::2], shown[1::2]
    for part, picture, box in zip(delivered, whole, boxes, strict=True):
        pixels = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
        left, top, width, height = map(int, box)
        assert pixels.shape == (40, 60, 3)
        cut = np.ascontiguousarray(pixels[top : top + height, left : left + width])
        again = np.empty((3, 16, 16), np.uint8)
        resize_part(Image(size=16, interpolation="area"), cut.shape[:2], None)(cut, again)
        got = cv2.imdecode(np.frombuffer(part, np.uint8), cv2.IMREAD_COLOR)
        assert np.array_equal(got, again.transpose(1, 2, 0))


def test_a_large_picture_is_shown_smaller_and_its_box_counts_its_own_pixels(
    page: Page, tmp_path: Path
) -> None:
    write_tar(tmp_path / "a.tar", [("0.png", png_of(noise(0, 400, 300)))])

    def loader() -> DataLoader:
        dataset = ShardedDataset(
            f"{tmp_path}/a.tar", decode={"png": Image(size=32, crop="center", resize_shorter=40, flip=1.0)}
        )
        return DataLoader(dataset, 1, num_workers=0)

    made = page(loader)
    assert '<svg viewBox="0 0 300 400"' in made
    assert ", mirrored of 400 x 300" in made
    small = cv2.imdecode(np.frombuffer(files_in(made, "image/png")[1], np.uint8), cv2.IMREAD_COLOR)
    assert small.shape == (256, 192, 3)


def test_sound_is_played_as_it_was_delivered_and_as_it_is_stored(page: Page, tmp_path: Path) -> None:
    media = pytest.importorskip("media_kit")
    write_tar(tmp_path / "a.tar", [(f"{n}.wav", media.sound(8000 + n)) for n in range(2)])

    def loader() -> DataLoader:
        dataset = ShardedDataset(f"{tmp_path}/a.tar", decode={"wav": Audio(seconds=0.25)})
        return DataLoader(dataset, 2, shuffle=True, seed=1, num_workers=0)

    made = page(loader)
    with loader() as again:
        batch = next(iter(again))["wav"]
    played = files_in(made, "audio/wav")
    files = {media.sound(8000 + n) for n in range(2)}
    assert {played[1], played[3]} == files
    for clip, data in zip(batch, played[::2], strict=True):
        with wave.open(io.BytesIO(data)) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
            levels = np.frombuffer(sound.readframes(10**6), "<i2")
        assert np.array_equal(levels, np.rint(np.asarray(clip[0]) * 32767).astype("<i2"))
    assert made.count("<audio controls") == 4
    assert "0.250 s at 16,000 a second, played in 16 bits" in made


def test_a_clip_is_shown_by_its_frames_and_as_a_player(page: Page, tmp_path: Path) -> None:
    media = pytest.importorskip("media_kit")
    write_tar(tmp_path / "a.tar", [("0.mp4", media.video(30))])

    def loader() -> DataLoader:
        dataset = ShardedDataset(f"{tmp_path}/a.tar", decode={"mp4": Video(frames=4, size=64, clip="start")})
        return DataLoader(dataset, 1, num_workers=0)

    made = page(loader)
    assert files_in(made, "video/mp4") == [media.video(30)]
    frames = [
        torch.from_numpy(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)).permute(2, 0, 1)
        for data in files_in(made, "image/png")
    ]
    assert media.numbers_of(torch.stack(frames)) == [0, 1, 2, 3]
    assert "4 of 4 frames" in made


def test_what_is_too_large_for_a_page_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    room = PageRoom(100)
    assert "<img" in room.shown(b"x" * 60, "image/png")
    assert room.shown(b"x" * 60, "audio/wav") == (
        f"<p class=dim>60 bytes of audio/wav are not shown: a page holds {values.MOST_FILES:,} of all "
        "files</p>"
    )
    assert "<audio" in room.shown(b"x" * 40, "audio/wav")
    monkeypatch.setattr(values, "MOST_FILE", 10)
    assert "11 bytes of image/png are not shown: a page holds 10 of a file" in PageRoom().shown(
        b"x" * 11, "image/png"
    )


def test_a_sample_that_is_too_large_is_not_read_for_its_files(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = pytest.importorskip("media_kit")
    write_tar(tmp_path / "a.tar", [("0.wav", media.sound(9000)), ("1.wav", media.sound(5000))])
    monkeypatch.setattr(stored, "MOST_FILE", 12_000)

    def loader() -> DataLoader:
        dataset = ShardedDataset(f"{tmp_path}/a.tar", decode={"wav": Audio(rate=8000, seconds=0.25)})
        return DataLoader(dataset, 2, num_workers=0)

    made = page(loader)
    assert re.search(r"its 1[89],\d{3} stored bytes are more than the 12,000 that are shown", made)
    clips = files_in(made, "audio/wav")
    assert len(clips) == 3  # of both what was delivered
    assert media.sound(9000) not in clips
    assert media.sound(5000) in clips


def test_files_that_samples_hold_can_do_nothing(page: Page, tmp_path: Path) -> None:
    hostile = b'"></audio><script>alert(1)</script>'
    sounds = {"flac": b"fLaC" + hostile, "bin": b"\x1aE\xdf\xa3" + hostile, "svg": b"<svg onload=alert(1)>"}
    write_tar(tmp_path / "a.tar", [(f"0.{name}", data) for name, data in sounds.items()])

    def loader() -> DataLoader:
        decode = dict.fromkeys(sounds, "bytes")
        return DataLoader(ShardedDataset(f"{tmp_path}/a.tar", decode=decode), 1, num_workers=0)

    made = page(loader)
    assert files_in(made, "audio/flac") == [sounds["flac"]]
    assert files_in(made, "video/webm") == [sounds["bin"]]
    assert {*re.findall(r"<(\w+)", made)} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "b", "span", "div", "pre"),
        *("audio", "video", "table", "tr", "th", "td"),
    }
    assert "alert" not in made
    assert kind_of(b"<svg onload=alert(1)>") == kind_of(b"") == ""


def test_sound_that_is_too_loud_is_cut_and_said_to_be() -> None:
    loud = np.array([[0.0, 1.0, -1.0, 1.5, np.nan]], np.float32)
    with wave.open(io.BytesIO(wav_of(loud, 8000))) as sound:
        assert np.frombuffer(sound.readframes(9), "<i2").tolist() == [0, 32767, -32767, 32767, 0]
    shown = "".join(values_of({"a": loud[None]}, 0, TokenWords(), PageRoom(), {"a": 8000}))
    assert "2 samples beyond -1 to 1 are cut off for it" in shown


# ---- beside its neighbours ------------------------------------------------------------------------------


def table_of(made: str) -> dict[str, list[str]]:
    """The cells of the page's table by the names of their rows; "*" behind what is marked."""
    rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", made)
    return {
        name: [text + "*" * bool(odd) for odd, text in re.findall(r"<td( class=odd)?>(.*?)</td>", cells)]
        for name, cells in rows
    }


def test_a_step_is_told_beside_its_neighbours(page: Page, tmp_path: Path) -> None:
    """Of six steps the third has texts that repeat words, are long, and values that are missing."""
    with ShardWriter(f"{tmp_path}/a.jsonl") as shards:
        for n in range(24):
            odd = 8 <= n < 12
            words = ["buy", "now"] * 40 if odd else [f"w{n}x{i}" for i in range(12)]
            shards.write({"text": " ".join(words), "size": None if odd and n > 8 else 1.5})

    def loader() -> DataLoader:
        dataset = ShardedDataset(f"{tmp_path}/a.jsonl", decode={"size": Optional(mask=True)})
        return DataLoader(dataset, 4, num_workers=0)

    made = page(loader, "--step", "2", "--around", "3", steps=6)
    table = table_of(made)
    assert table["share of text repeated"] == ["0.0%", "0.0%", "99.3%*", "0.0%", "0.0%", "0.0%"]
    assert table["share of size missing"] == ["0.0%", "0.0%", "75.0%*", "0.0%", "0.0%", "0.0%"]
    assert [cell.endswith("*") for cell in table["characters of text"]] == [n == 2 for n in range(6)]
    told = "buy now " * 4
    assert f"Step 2: the same 8 tokens or words of text come 148 times: {told.strip()}" in made
    assert "Step 1: the same" not in made


def test_the_step_that_is_asked_for_is_shown_and_others_unfold(page: Page, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.jsonl") as shards:
        for n in range(80):
            shards.write({"n": n})

    def loader() -> DataLoader:
        return DataLoader(ShardedDataset(f"{tmp_path}/a.jsonl"), 20, num_workers=0)

    made = page(loader, "--step", "3", "--around", "2", steps=4)
    folded = "".join(re.findall(r"<details>.*?</details>", made, re.DOTALL))
    assert (made.count("<details>"), folded.count("<div class=row>"), made.count("<div class=row>")) == (
        2,
        32,
        52,
    )
    assert folded.count("4 more rows are not shown") == 2


def test_the_sources_of_a_step_are_told_beside_those_of_its_neighbours(page: Page, tmp_path: Path) -> None:
    for name in "ab":
        with ShardWriter(f"{tmp_path}/{name}.jsonl") as shards:
            for n in range(40):
                shards.write({"n": n})

    def loader() -> DataLoader:
        a, b = (ShardedDataset(f"{tmp_path}/{name}.jsonl") for name in "ab")
        return DataLoader(Mixture({a: 3, b: 1}), 8, num_workers=0)

    made = page(loader, "--around", "2", steps=5)
    assert table_of(made)["share of source 1"] == ["25.0%"] * 3


def measured(**columns: Any) -> dict[str, float]:
    step = StepMeasures("Step 0", [], 1)
    step.add(columns, TokenWords(column="ids", mask="mask"))
    return step.values


def test_of_tokens_it_is_told_what_is_trained_and_what_comes_again() -> None:
    rows = [torch.arange(20), torch.cat([torch.arange(10), torch.arange(100, 106)]), torch.arange(3)]
    mask = Ragged.of_rows([torch.ones(20), torch.zeros(16), torch.ones(3)])
    ids = Ragged.of_rows(rows)
    told = measured(ids=ids, mask=mask, labels=torch.tensor([[1, -100], [3, -100]]))
    assert told["share of ids repeated"] == 3 / 22  # of 13 and 9 windows, three are in both
    assert told["share of mask trained"] == 23 / 39
    assert told["share of labels trained"] == 0.5
    assert told["tokens of ids in a piece"] == 13


def test_pieces_of_packed_rows_are_counted_apart_and_padding_is_not(page: Page, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.jsonl") as shards:
        for n in range(8):
            shards.write({"tokens": [n] * 10})

    def loader() -> DataLoader:
        batching = Packed(29, "tokens", window=8)
        return DataLoader(ShardedDataset(f"{tmp_path}/a.jsonl"), 2, batching=batching, num_workers=0)

    with loader() as running:
        batch = next(iter(running))
    assert isinstance(batch["tokens"], PackedRows)
    told = measured(**batch)
    assert told["tokens of tokens in a piece"] == 10
    assert told["share of tokens repeated"] == 2 / 3  # three windows a piece are one
    assert table_of(page(loader))["tokens of tokens in a piece"] == ["10"]


def test_missing_values_are_counted() -> None:
    told = measured(
        a=[None, "x", None, "y"],
        b=torch.tensor([1.0, np.nan]),
        c=torch.zeros(2),
        c_mask=torch.tensor([True, False]),
    )
    missing = {name: value for name, value in told.items() if name.endswith("missing")}
    assert missing == {"share of a missing": 0.5, "share of b missing": 0.5, "share of c missing": 0.5}


def test_columns_of_any_kind_are_measured_or_left_out() -> None:
    told = measured(
        text=[None, "a b", "c"],
        labels=["x", None],
        loss_mask=[torch.ones(3, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)],
        ids=torch.zeros(2, 3),
        other={"a": 1},
        packed=PackedRows(
            *[torch.zeros(2, 8), torch.ones(2, 8), *[torch.zeros(2)] * 5][: len(PackedRows._fields)]
        ),
    )
    assert {name: value for name, value in told.items() if value} == {
        "share of text missing": 1 / 3,
        "characters of text": 2,
        "share of labels missing": 0.5,
        "share of loss_mask trained": 0.75,
    }


def test_of_many_tokens_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MOST_TOKENS", 20)
    step = StepMeasures("Step 0", [], 1)
    step.add({"ids": [torch.zeros(30, dtype=torch.int64), torch.arange(30)]}, TokenWords(column="ids"))
    assert step.values["share of ids repeated"] == 12 / 13
    assert "of repeats the first 20 tokens" in "".join(compared([step]))


@pytest.mark.parametrize(
    ("steps", "marked"),
    [
        ([5.0, 50.0], []),
        ([5.0, 5.0, 5.0], []),
        ([5.0, 5.1, 9.0], [2]),
        ([5.0, None, 5.1, 4.9, 0.0], [4]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], []),
    ],
)
def test_what_is_far_from_the_median_of_steps_is_unusual(
    steps: list[float | None], marked: list[int]
) -> None:
    assert [at for at, odd in enumerate(unusual(steps)) if odd] == marked


def test_a_share_that_differs_a_little_is_not_unusual() -> None:
    assert unusual([0.0, 0.0, 0.05], 0.02) == [False, False, False]
    assert unusual([0.0, 0.0, 0.07], 0.02) == [False, False, True]
