"""A small tokenizer, chats and datasets of text, for tests of tokenizing, which skip without the extra."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TEXTS = [
    "",
    "one",
    "two words",
    "é, ünïcode \U0001f600",
    "def f(x):\n    return x + 1\n",
    "a b c d e f g h " * 9,
]
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A chat template that tells what the assistant says."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without telling."""
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_tokenizer(path: Path, vocabulary: int = 300) -> Path:
    """A byte-level BPE of the texts here; its file asks for padding and truncation, which nobody wants."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(60)
    tokenizer.save(str(path))
    return path


def ids_of(path: Path, text: str) -> list[int]:
    """The tokens of a text, by the library alone."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def text_in(path: Path, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return str(tokenizers.Tokenizer.from_file(str(path)).decode(list(ids), skip_special_tokens=False))


def chat(number: int) -> list[dict[str, str]]:
    """Turns of a user and an assistant, of texts that differ."""
    said = TEXTS[1:]
    turns = [
        {"role": role, "content": said[(number + at) % len(said)]}
        for at in range(1 + number % 3)
        for role in ("user", "assistant")
    ]
    return [{"role": "system", "content": "be brief"}, *turns] if number % 2 else turns


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
