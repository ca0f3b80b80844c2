"""`VisionChat` makes tokens, positions and patches of chats, measures them, and refuses bad ones."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from vision_kit import SPECIAL, TEMPLATE, image_bytes, vision_chat, write_vision_tokenizer

from dataflow import Ragged, SampleError, ShardedDataset, ShardWriter, VisionChat
from dataflow.vision.qwen import QWEN_FAMILIES as FAMILIES

SIDE = {"qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32}
"""Pixels along each side of a token."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_tokenizer(tmp_path_factory.mktemp("vision") / "tokenizer.json")


def stage(tokenizer: Path, family: str = "qwen2_5_vl", **options: Any) -> VisionChat:
    limits = {"min_pixels": 4 * SIDE[family] ** 2, "max_pixels": 40 * SIDE[family] ** 2}
    return VisionChat(tokenizer, **{"family": family, "template": TEMPLATE} | limits | options)


def asked(*images: bytes, text: str = "what?") -> dict[str, Any]:
    """A question about pictures and its answer."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a tree"}]
    return {"messages": messages, "images": list(images)}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_from_headers_is_what_is_made(tokenizer: Path, family: str) -> None:
    chats = stage(tokenizer, family)
    for seed in range(12):
        sample = vision_chat(seed)
        made = chats(sample)
        assert chats.measure(sample) == {name: len(made[name]) for name in chats.lists}
        assert made["mrope"].shape == (len(made["input_ids"]), 3)


def test_a_picture_is_image_tokens_that_are_never_learned(tokenizer: Path) -> None:
    made = stage(tokenizer)(asked(image_bytes(84, 140)))
    is_image = made["input_ids"] == SPECIAL.index("<|image_pad|>")
    assert int(is_image.sum()) == 3 * 5
    assert made["image_grid_thw"].tolist() == [[1, 6, 10]]
    assert not made["loss_mask"][is_image].any()
    assert made["loss_mask"].any()
    answer = asked(image_bytes(84, 140))
    answer["messages"][1]["content"] = [{"type": "image"}]
    answer["messages"][0]["content"] = "draw"
    made = stage(tokenizer)(answer)
    assert made["loss_mask"].sum() == 3  # begin and end of the picture, and of the turn


def test_positions_are_those_of_text_and_of_a_grid(tokenizer: Path) -> None:
    made = stage(tokenizer)(asked(image_bytes(56, 84)))
    start = int((made["input_ids"] == SPECIAL.index("<|image_pad|>")).nonzero()[0])
    inside = made["mrope"][start : start + 6] - start
    assert inside.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert made["mrope"][:start].tolist() == [[at] * 3 for at in range(start)]
    assert made["mrope"][start + 6].tolist() == [start + 3] * 3  # behind the longer side


def test_patches_are_the_pixels_in_the_order_of_tokens(tokenizer: Path) -> None:
    values = image_bytes(56, 84, kind="PNG")
    made = stage(tokenizer)(asked(values))["pixel_values"].view(2, 3, 2, 2, 3, 14, 14)
    from PIL import Image

    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(values))).copy())
    whole = made.permute(0, 2, 5, 1, 3, 6, 4).reshape(56, 84, 3)
    assert torch.equal(whole, pixels)


def test_float32_patches_are_uint8_ones_normalised_and_repeated(tokenizer: Path) -> None:
    sample = asked(image_bytes(90, 70), image_bytes(40, 120))
    levels = stage(tokenizer)(sample)["pixel_values"]
    chats = stage(tokenizer, patches="float32")
    numbers = chats(sample)["pixel_values"]
    assert levels.dtype == torch.uint8
    assert torch.equal(numbers, chats.normalized(levels))
    column = Ragged.of_rows([levels[:4], levels[4:]])
    assert torch.equal(chats.normalized(column).row(1), numbers[4:])
    twice = numbers.view(len(levels), 3, 2, -1)
    assert torch.equal(twice[:, :, 0], twice[:, :, 1])
    family = FAMILIES["qwen2_5_vl"]
    expected = (levels.view(-1, 3, 196) / 255 - torch.tensor(family.mean)[:, None]) / torch.tensor(
        family.std
    )[:, None]
    assert torch.allclose(twice[:, :, 0], expected, atol=1e-5)


def test_pictures_come_from_tars_parquet_lists_and_numbered_members(tokenizer: Path, tmp_path: Path) -> None:
    chats = stage(tokenizer)
    samples = [vision_chat(seed, most=12) for seed in range(4)]
    expected = [chats(sample) for sample in samples]
    rows = [
        {
            "messages": json.dumps(s["messages"]),
            "images": [{"bytes": b, "path": "x.jpg"} for b in s["images"]],
        }
        for s in samples
    ]
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"messages": pa.string(), "images": pa.list_(image)})
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "x.parquet")
    with ShardWriter(f"{tmp_path}/x-%d.tar") as shards:
        for number, sample in enumerate(samples):
            members = {f"{at}.jpg": data for at, data in enumerate(sample["images"])}
            shards.write({"__key__": str(number), "json": sample["messages"], **members})
    columns = {"messages": "json", "images": "*.jpg"}
    tar = ShardedDataset(tmp_path / "x-0.tar", columns=columns, decode={"images": None}, transform=chats)
    parquet = ShardedDataset(tmp_path / "x.parquet", decode={"images": None}, transform=chats)
    for dataset in (tar, parquet):
        for number, sample in enumerate(expected):
            made = dataset[number]
            assert all(torch.equal(made[name], sample[name]) for name in chats.lists)
    numbered = {f"{at}.jpg": data for at, data in enumerate(samples[1]["images"])}
    made = chats({"messages": samples[1]["messages"], "id": 3, **dict(reversed(numbered.items()))})
    assert torch.equal(made["pixel_values"], expected[1]["pixel_values"])
    assert made.keys() == {*chats.lists, "id"}


def test_addresses_in_messages_are_never_looked_at(tokenizer: Path) -> None:
    sample = asked(image_bytes(60, 60))
    plain = stage(tokenizer)(sample)
    for part in (
        {"type": "image", "image": "file:///etc/passwd", "text": None},
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"image": "https://example.com/x.jpg", "type": None},
    ):
        sample["messages"][0]["content"][0] = part
        assert torch.equal(stage(tokenizer)(sample)["input_ids"], plain["input_ids"])
    with pytest.raises(ValueError, match=r"picture 0: it has no bytes, only the path 'http://x'"):
        stage(tokenizer)({**sample, "images": [{"bytes": None, "path": "http://x"}]})


def test_parts_of_parquet_have_keys_that_are_null(tokenizer: Path) -> None:
    sample = asked(image_bytes(60, 60))
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what?", "image": None}]
    sample["messages"][0]["content"] = parts
    assert len(stage(tokenizer)(sample)["image_grid_thw"]) == 1


def long_chat() -> dict[str, Any]:
    sample: dict[str, Any] = {"messages": [], "images": []}
    for seed in range(4):
        more = asked(image_bytes(84, 84, seed))
        sample["messages"] += more["messages"]
        sample["images"] += more["images"]
    return sample


def test_max_length_leaves_whole_turns_out_and_counts_them(tokenizer: Path) -> None:
    sample = long_chat()
    whole = stage(tokenizer)(sample)
    turn = len(stage(tokenizer)(asked(image_bytes(84, 84)))["input_ids"])
    chats = stage(tokenizer, max_length=3 * turn - 1)
    with pytest.warns(UserWarning, match=r"the last 4 messages of a chat are left out") as told:
        made = [chats(sample) for _ in range(2)][-1]
    assert len(told) == 1
    assert made["messages_left_out"] == 4
    assert torch.equal(made["input_ids"], whole["input_ids"][: 2 * turn])
    assert len(made["pixel_values"]) == 2 * 36
    assert chats.measure(sample) == {name: len(made[name]) for name in chats.lists}
    assert stage(tokenizer, max_length=4 * turn)(sample)["messages_left_out"] == 0
    with pytest.raises(ValueError, match=r"not even its first turn has room"):
        stage(tokenizer, max_length=turn - 1)(sample)
    with pytest.raises(ValueError, match=f"{4 * turn} tokens, and max_length={turn}"):
        stage(tokenizer, max_length=turn, overlong="error")(sample)


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_are_turned_as_pillow_turns_them(orientation: int, kind: str) -> None:
    from PIL import Image, ImageOps

    from dataflow.vision.pictures import Picture

    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = image_bytes(60, 90, kind=kind, exif=exif.tobytes(), **lossless)
    encoded = np.frombuffer(data, np.uint8)
    for upright in (True, False):
        theirs = Image.open(io.BytesIO(data))
        theirs = ImageOps.exif_transpose(theirs) if upright else theirs
        picture = Picture(encoded, upright)
        pixels = picture.pixels()
        assert picture.size == pixels.shape[:2]
        assert np.array_equal(pixels, np.asarray(theirs.convert("RGB")))


def test_damaged_metadata_says_what_pillow_reads_of_it() -> None:
    from PIL import Image

    from dataflow.vision.pictures import orientation

    rng = np.random.default_rng(0)
    for number in range(300):
        kind, named = ("JPEG", "PNG", "WEBP")[number % 3], int(rng.integers(0, 10))
        exif = Image.Exif()
        exif[0x0112] = named
        xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{named}"/></x:xmpmeta>'.encode()
        is_xmp = kind != "PNG" and number % 2
        data = bytearray(
            image_bytes(9, 12, kind=kind, **({"xmp": xmp} if is_xmp else {"exif": exif.tobytes()}))
        )
        for place in rng.integers(0, min(len(data), 300), number % 4):
            data[place] = rng.integers(0, 256)
        data = data[: int(rng.integers(0, len(data)))] if number % 7 == 0 else data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted = (
                    Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")).getexif().get(0x0112, 1)
                )
            except (OSError, SyntaxError, ValueError, struct.error):
                wanted = 1
            found = orientation(np.frombuffer(bytes(data), np.uint8))
        assert found == (wanted if wanted in range(1, 9) else 1)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataflow.decode.image import MissingImageSupportError
    from dataflow.vision.pictures import Picture

    data = np.frombuffer(image_bytes(9, 12, exif=b"Exif\0\0"), np.uint8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert Picture(data, False).size == (9, 12)
    with pytest.raises(MissingImageSupportError, match=r"dataflow-loader\[image\]"):
        Picture(data, True)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("PNG", "P", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "L", {}),
        ("PNG", "1", {}),
        ("JPEG", "L", {}),
        ("WEBP", "RGBA", {"lossless": True, "exact": True}),
        ("JPEG", "RGB", {"progressive": True}),
        ("WEBP", "RGB", {}),
    ],
)
def test_pixels_are_those_of_pillow(kind: str, mode: str, options: dict[str, Any]) -> None:
    from PIL import Image

    from dataflow.vision.pictures import Picture

    data = image_bytes(50, 70, kind=kind, mode=mode, **options)
    pixels = Picture(np.frombuffer(data, np.uint8), True).pixels()
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(tokenizer: Path, kind: str) -> None:
    from PIL import Image

    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(
        file, kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    levels = stage(tokenizer)(asked(file.getvalue()))["pixel_values"].view(-1, 3, 196)
    assert levels.float().mean((0, 2)).tolist() == [pytest.approx(colour, abs=2) for colour in (254, 0, 0)]


def test_a_cmyk_jpeg_becomes_rgb_about_as_pillow_makes_it(tokenizer: Path) -> None:
    made = stage(tokenizer)(asked(image_bytes(60, 90, mode="CMYK"), image_bytes(60, 90)))
    cmyk, rgb = made["pixel_values"].float().chunk(2)
    assert (cmyk - rgb).abs().mean() < 20


def test_gray_of_16_bits_is_scaled_where_pillow_clips() -> None:
    from PIL import Image

    from dataflow.vision.pictures import Picture

    file, levels = io.BytesIO(), np.arange(0, 65536, 257, np.uint16)[None]
    Image.fromarray(levels).save(file, "PNG")
    pixels = Picture(np.frombuffer(file.getvalue(), np.uint8), True).pixels()
    assert np.array_equal(pixels, np.repeat(levels // 257, 3).reshape(1, -1, 3))


def png_that_claims(height: int, width: int) -> bytes:
    data = bytearray(image_bytes(20, 20, kind="PNG"))
    data[16:24] = struct.pack(">II", width, height)
    return bytes(data)


BAD = {
    "empty": (b"", "picture 1: .*empty"),
    "text": (b"<html>not found</html>", "picture 1: .*not an image"),
    "cut": (image_bytes(200, 200)[:900], "picture 1: "),
    "zero": (png_that_claims(0, 20), "picture 1: .*0 x 20 pixels"),
    "4 GB": (png_that_claims(40_000, 40_000), "picture 1: .*40000 x 40000 pixels are more than"),
    "long": (image_bytes(3, 700), "picture 1: 3 x 700 pixels: one side is more than 200 times"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_pictures_are_named_with_shard_and_key(tokenizer: Path, tmp_path: Path, bad: str) -> None:
    data, message = BAD[bad]
    sample = asked(image_bytes(40, 40), data)
    pq.write_table(
        pa.table({"messages": [json.dumps(sample["messages"])], "images": [sample["images"]]}),
        tmp_path / "x.parquet",
    )
    dataset = ShardedDataset(tmp_path / "x.parquet", transform=stage(tokenizer))
    with pytest.raises(SampleError, match=message) as caught:
        dataset[0]
    assert (Path(caught.value.shard).name, caught.value.key, caught.value.stage) == (
        "x.parquet",
        "0",
        "transform",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.update(images=s["images"] * 2),
            "its messages have 1 pictures, and column 'images' has 2",
        ),
        (lambda s: s.update(images=None), "its messages have 1 pictures, and column 'images' has 0"),
        (
            lambda s: s["messages"].append({"role": "user", "content": "<|image_pad|>"}),
            r"the text of message 2 has the token <\|image_pad\|>",
        ),
        (
            lambda s: s["messages"][0]["content"].append({"type": "text", "text": "a <|video_pad|>"}),
            r"the text of message 0 has the token <\|video_pad\|>",
        ),
        (
            lambda s: s["messages"].append({"role": "<|image_pad|>", "content": "x"}),
            "has 2 tokens <.image_pad.>, for 1 pictures",
        ),
        (
            lambda s: s["messages"][0]["content"].append({"type": "video", "video": "x.mp4"}),
            "only text and images are taken",
        ),
        (
            lambda s: s.update(images=[torch.zeros(3, 4, 4, dtype=torch.uint8)]),
            "picture 0: it is decoded already",
        ),
        (lambda s: s.update(images=["cat.jpg"]), "picture 0: it is str, not the bytes"),
    ],
)
def test_samples_that_contradict_themselves_are_bad(tokenizer: Path, change: Any, message: str) -> None:
    sample = asked(image_bytes(40, 40))
    change(sample)
    for work in (stage(tokenizer), stage(tokenizer).measure):
        with pytest.raises(ValueError, match=message):
            work(sample)


def test_settings_of_the_model_lie_beside_its_tokenizer(tmp_path: Path) -> None:
    path = write_vision_tokenizer(tmp_path / "tokenizer.json")
    config: dict[str, Any] = {
        "min_pixels": 784,
        "max_pixels": 7840,
        "image_mean": [0.5] * 3,
        "patch_size": 14,
    }
    own = tmp_path / "preprocessor_config.json"
    own.write_text(json.dumps(config))
    family = VisionChat(tmp_path, family="qwen2_5_vl", template=TEMPLATE).family
    assert (family.min_pixels, family.max_pixels, family.mean) == (784, 7840, (0.5, 0.5, 0.5))
    assert (
        VisionChat(tmp_path, family="qwen2_5_vl", template=TEMPLATE, max_pixels=8000).family.max_pixels
        == 8000
    )
    for wrong, message in (
        ({"image_processor_type": "CLIPImageProcessor"}, "is for CLIPImageProcessor"),
        ({"resample": 2}, "resample=2; only 3"),
        ({"rescale_factor": 1}, "rescale_factor=1"),
        ({"size": {"height": 3}, "min_pixels": None}, "shortest_edge and longest_edge"),
    ):
        own.write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=message):
            VisionChat(tmp_path, family="qwen2_5_vl", template=TEMPLATE)
    own.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": config}))
    assert VisionChat(tmp_path, family="qwen2_5_vl", template=TEMPLATE).family.max_pixels == 7840
    assert path.exists()


def test_the_transform_pickles_and_its_fingerprint_tells_settings_apart(tokenizer: Path) -> None:
    chats = stage(tokenizer)
    sample = vision_chat(4)
    copy = pickle.loads(pickle.dumps(chats))
    assert all(torch.equal(copy(sample)[name], chats(sample)[name]) for name in chats.lists)
    others = [
        *(stage(tokenizer, family) for family in FAMILIES if family != "qwen3_5"),
        stage(tokenizer, max_pixels=30_000),
        stage(tokenizer, patches="float32"),
        stage(tokenizer, max_length=9),
        stage(tokenizer, upright=False),
    ]
    assert len({other.fingerprint for other in others}) == len(others)
    assert copy.fingerprint == chats.fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "messages_left_out" not in chats(sample)
