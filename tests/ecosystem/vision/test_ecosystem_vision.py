"""`VisionChat` beside the processors and models of transformers: what it makes is what they make."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vision_kit import PIL, image_bytes, vision_chat

from dataflow import VisionChat

pytest.importorskip("transformers")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from processors_kit import make_processor, theirs_of
    from transformers.image_utils import load_image
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "llava_onevision", "idefics3", "smolvlm", "gemma3"]
MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel, "qwen3_5": Qwen3_5Model}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def processor(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The family's own, with small pictures."""
    return make_processor(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def folder(processor: Any, family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The processor, as a model's folder has it."""
    path = tmp_path_factory.mktemp(family)
    processor.save_pretrained(path)
    return path


IDEFICS = ("pixel_values", "pixel_attention_mask")
BATCHED = {"idefics3": IDEFICS, "smolvlm": IDEFICS}
"""Columns whose first dimension is of samples."""


def rope_of(family: str, made: Any, merge: int) -> torch.Tensor:
    """The model's own positions [3, tokens]."""
    model = MODELS[family]
    config = types.SimpleNamespace(
        vision_config=types.SimpleNamespace(spatial_merge_size=merge, tokens_per_second=4)
    )
    this = types.SimpleNamespace(config=config)
    this.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, this)
    positions, _ = model.get_rope_index(
        this,
        made["input_ids"],
        mm_token_type_ids=made["mm_token_type_ids"],
        image_grid_thw=made["image_grid_thw"],
    )
    return positions[:, 0]


def tiles_of(made: dict[str, Any], family: str) -> dict[str, Any]:
    """The columns, where the processor has the tiles of each picture apart."""
    if family != "llava_onevision":
        return made
    pixels = made["pixel_values"]
    return {**made, "pixel_values": pixels[None] if len(made["image_sizes"]) == 1 else pixels[:, None]}


def test_tokens_masks_patches_and_positions_are_those_of_the_processor(
    processor: Any, folder: Path, family: str
) -> None:
    chats = VisionChat(folder, family=family, patches="float32")
    num_pictures = 0
    for seed in range(30):
        sample = vision_chat(seed, low=20, high=420)
        ours, theirs = chats(sample), theirs_of(processor, sample)
        assert ours["input_ids"].tolist() == theirs["input_ids"][0].tolist()
        assert chats.measure(sample) == {name: len(ours[name]) for name in chats.lists}
        if not sample["images"]:
            if family in MODELS:
                assert ours["mrope"].tolist() == [[at] * 3 for at in range(len(ours["input_ids"]))]
            continue
        num_pictures += len(sample["images"])
        for name in ("pixel_values", *chats.family.columns):
            theirs[name] = theirs[name][0] if name in BATCHED.get(family, ()) else theirs[name]
            assert torch.equal(tiles_of(ours, family)[name], theirs[name]), name
        is_picture = theirs["input_ids"][0] == chats._image_id
        expected = torch.as_tensor(theirs["assistant_masks"][0]).bool() & ~is_picture
        assert torch.equal(ours["loss_mask"], expected)
        if family in MODELS:
            assert torch.equal(ours["mrope"].T.long(), rope_of(family, theirs, chats.family.merge))
    assert num_pictures > 20


def test_lengths_from_headers_are_those_of_the_processor(
    processor: Any, folder: Path, family: str, tmp_path: Path
) -> None:
    """For a thousand chats, by the processor's own function of sizes; OneVision's and Gemma3's are mended.

    SmolVLM's has none, and Idefics3's counts the same.
    """
    chats = VisionChat(folder, family=family)
    rng = np.random.default_rng(0)
    counting = make_processor("idefics3", tmp_path) if family == "smolvlm" else processor
    count = counting._get_num_multimodal_tokens
    blank: dict[tuple[int, int], bytes] = {}
    num_refused = 0
    for _ in range(1000):
        num_pictures = int(rng.integers(0, 4))
        sizes: list[tuple[int, int]] = [
            (int(high), int(wide)) for high, wide in np.exp(rng.uniform(3, 7.5, (num_pictures, 2)))
        ]
        blank |= {size: png_head(*size) for size in sizes}
        parts = [{"type": "image"}] * num_pictures + [{"type": "text", "text": "what ?"}]
        sample = {"messages": [{"role": "user", "content": parts}], "images": [blank[size] for size in sizes]}
        try:
            told = count(image_sizes=[list(size) for size in sizes])
        except ValueError:
            num_refused += 1
            with pytest.raises(ValueError, match="200 times"):
                chats.measure(sample)
            continue
        text = processor.apply_chat_template(sample["messages"])
        tokens = told.num_image_tokens
        if family == "gemma3":
            text = text.replace(processor.boi_token, "\n\n<start_of_image><|pad|><end_of_image>\n\n")
            text = text.replace("<|pad|>", "<image_soft_token>")
        if family == "llava_onevision" and num_pictures > 1:
            tokens = [17] * num_pictures
        measured = chats.measure(sample)
        assert (
            measured["input_ids"] == len(processor.tokenizer(text)["input_ids"]) + sum(tokens) - num_pictures
        )
        if family != "llava_onevision":
            assert measured["pixel_values"] == sum(told.num_image_patches)
    assert num_refused < 500


def png_head(height: int, width: int) -> bytes:
    """A PNG that ends after its header."""
    data = bytearray(image_bytes(8, 8, kind="PNG")[:40])
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(data)


def test_a_picture_that_the_processor_loads_by_itself_is_upright_too(
    processor: Any, folder: Path, family: str, tmp_path: Path
) -> None:
    exif = PIL.Exif()
    exif[0x0112] = 6
    data = image_bytes(100, 200, exif=exif.tobytes())
    parts = [{"type": "image"}, {"type": "text", "text": "what ?"}]
    sample = {"messages": [{"role": "user", "content": parts}], "images": [data]}
    (tmp_path / "x.jpg").write_bytes(data)
    loaded, opened = load_image(str(tmp_path / "x.jpg")), PIL.open(tmp_path / "x.jpg")
    for upright, picture in ((True, loaded), (False, opened)):
        expected = processor.image_processor(images=[[picture]], return_tensors="pt")
        ours = VisionChat(folder, family=family, patches="float32", upright=upright)(sample)
        value = expected["pixel_values"][0] if family in BATCHED else expected["pixel_values"]
        assert torch.equal(tiles_of(ours, family)["pixel_values"], value)
