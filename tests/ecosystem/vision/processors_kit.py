"""Small processors of each family, with a tokenizer of their own. Nothing is fetched."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_kit import OTHERS, SPECIAL, template_of_family, write_vision_tokenizer

SIDE = 56
PINPOINTS = [[SIDE * high, SIDE * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]


def import_torchvision() -> None:
    """Import it where its compiled part is of another build than torch: processors need none of it."""
    real = torch.library.register_fake

    def without_own(name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return real(name, *arguments, **options)

    torch.library.register_fake = without_own
    try:
        pytest.importorskip("torchvision")
    finally:
        torch.library.register_fake = real


import_torchvision()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")


def make_processor(family: str, folder: Path, **options: Any) -> Any:
    """The processor of a family, with small pictures; its tokenizer is written to a folder.

    `options`: settings of its image processor.
    """
    t = transformers
    path = write_vision_tokenizer(folder / "tokenizer.json", [*SPECIAL, *OTHERS])
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"} if family == "gemma3" else {}
    if family == "gemma3":
        named["image_token"] = "<image_soft_token>"
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="<|endoftext|>", extra_special_tokens=named
    )
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "chat_template": template_of_family(family),
    }
    square = {"height": SIDE, "width": SIDE}
    if family.startswith("qwen"):
        side = 14 if family == "qwen2_5_vl" else 16
        mean = {} if family == "qwen2_5_vl" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        limits = {"min_pixels": (2 * side) ** 2 * 4, "max_pixels": (10 * side) ** 2 * 2}
        images = t.Qwen2VLImageProcessor(**{"patch_size": side, **limits, **mean, **options})
        is_old = family == "qwen2_5_vl"
        given["video_processor"] = t.Qwen2VLVideoProcessor() if is_old else t.Qwen3VLVideoProcessor()
        kind = t.Qwen2_5_VLProcessor if is_old else t.Qwen3VLProcessor
    elif family == "llava":
        sizes = {"size": {"shortest_edge": SIDE}, "crop_size": square}
        images = t.CLIPImageProcessor(**{**sizes, **options})
        given |= {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        kind = t.LlavaProcessor
    elif family == "llava_onevision":
        images = t.LlavaOnevisionImageProcessor(
            **{"size": square, "image_grid_pinpoints": PINPOINTS, **options}
        )
        given["video_processor"] = t.LlavaOnevisionVideoProcessor()
        given |= {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
        kind = t.LlavaOnevisionProcessor
    elif family in ("idefics3", "smolvlm"):
        sizes = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
        is_old = family == "idefics3"
        make = t.Idefics3ImageProcessor if is_old else t.SmolVLMImageProcessor
        images = make(**{**sizes, **options})
        given["image_seq_len"] = 4
        if not is_old:
            given["video_processor"] = t.SmolVLMVideoProcessor()
        kind = t.Idefics3Processor if is_old else t.SmolVLMProcessor
    else:
        images = t.Gemma3ImageProcessor(**{"size": square, **options})
        given["image_seq_length"] = 4
        kind = t.Gemma3Processor
    return kind(image_processor=images, **given)


def theirs_of(processor: Any, sample: dict[str, Any]) -> Any:
    """What the processor makes of a sample, given its pictures by Pillow."""
    import io

    from PIL import Image

    pictures = iter(sample["images"])

    def with_picture(part: dict[str, Any]) -> dict[str, Any]:
        return part if part["type"] == "text" else {**part, "image": Image.open(io.BytesIO(next(pictures)))}

    messages = [
        {**message, "content": [with_picture(part) for part in message["content"]]}
        for message in sample["messages"]
    ]
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
