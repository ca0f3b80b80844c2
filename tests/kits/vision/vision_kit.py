"""Chats with pictures, a tokenizer with the tokens of vision-language models, and a template, for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("simplejpeg")
PIL = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% macro said(content) %}{% if content is string %}"
    "{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ said(m.content) }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ said(m.content) }}<|im_end|>{% endif %}\n{% endfor %}"
)
"""A template of Qwen's kind that tells what the assistant says."""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
QWEN_PART = "<|vision_start|><|image_pad|><|vision_end|>"
PARTS = {
    "gemma3": "<start_of_image>",
    **dict.fromkeys(("llava", "llava_onevision", "idefics3", "smolvlm"), "<image>"),
}
"""What a template writes in place of a picture, where it is not Qwen's."""
OTHERS = [
    *("<image>", "<video>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
]
"""Special tokens of the other families."""
WORDS = ["the", "a", "picture", "shows", "red", "blue", "house", "tree", "with", "two", "beside", "under"]


def template_of_family(family: str) -> str:
    """`TEMPLATE` with the family's token of a picture."""
    return TEMPLATE.replace(QWEN_PART, PARTS.get(family, QWEN_PART))


def write_vision_tokenizer(path: Path, special: list[str] | None = None) -> Path:
    """A byte-level BPE with Qwen's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL if special is None else special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(path))
    return path


def image_bytes(height: int, width: int, seed: int = 0, kind: str = "JPEG", **options: Any) -> bytes:
    """A smooth picture, encoded by Pillow."""
    rng = np.random.default_rng(seed)
    small = PIL.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    file = io.BytesIO()
    mode = options.pop("mode", "RGB")
    small.resize((width, height), PIL.Resampling.BICUBIC).convert(mode).save(file, kind, **options)
    return file.getvalue()


def vision_chat(seed: int, low: int = 30, high: int = 260, most: int = 3) -> dict[str, Any]:
    """A sample of one to three exchanges, with so many pictures at most."""
    rng = np.random.default_rng(seed)

    def said() -> dict[str, str]:
        return {"type": "text", "text": " ".join(rng.choice(WORDS, int(rng.integers(1, 12))))}

    messages: list[dict[str, Any]] = []
    images: list[bytes] = []
    left = int(rng.integers(0, most + 1))
    for _ in range(int(rng.integers(1, 4))):
        here = int(rng.integers(0, left + 1))
        left -= here
        images += [image_bytes(*map(int, rng.integers(low, high, 2)), seed=seed) for _ in range(here)]
        parts = [{"type": "image"}] * here + [said()]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": [said()]}]
    return {"messages": messages, "images": images}
