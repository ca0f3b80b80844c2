"""What `transforms` runs on each sample: Python that only takes time, PIL's augmentation, a chat template.

A kind names its shards, the field it reads and the function that makes a tensor of that field's bytes: the
same function for every loader. Random numbers come from `draw`, uniform in [0, 1): ours gives its
`rng.random`, the others `random.random`.
"""

from __future__ import annotations

import functools
import io
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import Data
from benchmarks.peers.measured import burn
from benchmarks.tars import TarIndex, write_tar

SIZE, LENGTH, VOCABULARY = 224, 512, 8_000
JITTER = 0.4
Draw = Callable[[], float]


@dataclass(frozen=True)
class Kind:
    """A transform and what it reads."""

    name: str
    folder: Path
    field: str
    make: Callable[[Any, Draw], torch.Tensor]
    """Of the bytes of the field, in any object with a buffer."""
    batch: int = 64
    """Fewer where a sample takes long, or a run would see too few batches."""
    is_random: bool = False

    @property
    def files(self) -> list[str]:
        return sorted(str(path) for path in self.folder.glob("*.tar"))

    @property
    def index(self) -> TarIndex:
        return TarIndex.load(self.folder / "index.npz")


def kind(name: str, data: Data) -> Kind:
    """`pil`, `wait`, `template`, or milliseconds of Python a sample. Makes what it reads, if need be.

    `wait` reads what `pil` does and sleeps as long: many workers of a machine with few cores.
    """
    if name == "pil":
        data.make("W1")
        return Kind(name, data.root / "W1", "jpg", augmented, batch=16, is_random=True)
    if name == "wait":
        data.make("W1")
        return Kind(name, data.root / "W1", "jpg", waited, batch=16)
    if name == "template":
        folder = data.converted("transforms-texts", functools.partial(write_texts, data=data))
        return Kind(
            name,
            folder,
            "json",
            functools.partial(templated, tokenizer=str(folder / "tokenizer.json")),
        )
    cost_s = float(name) / 1e3
    data.make("W4")
    make = functools.partial(burned, cost_s=cost_s)
    return Kind(name, data.root / "W4", "bin", make, batch=64 if cost_s < 1e-3 else 16)


def burned(value: Any, draw: Draw, *, cost_s: float) -> torch.Tensor:
    """The first bytes as floats, after so much Python."""
    burn(cost_s)
    return torch.from_numpy(np.frombuffer(value, np.uint8)[:1024].astype(np.float32)) / 255


def augmented(value: Any, draw: Draw) -> torch.Tensor:
    """uint8 [224, 224, 3]: a resized random crop, mirrored half of the time, with colours changed.

    As torchvision's first transforms do it on PIL's images: `RandomResizedCrop` (a crop that does not fit is
    cut down rather than drawn again), `RandomHorizontalFlip`, `ColorJitter` without hue.
    """
    from PIL import Image, ImageEnhance

    image = Image.open(io.BytesIO(value)).convert("RGB")
    area = image.width * image.height * (0.08 + 0.92 * draw())
    aspect = (3 / 4) ** (1 - 2 * draw())
    width = min(image.width, max(1, round(math.sqrt(area * aspect))))
    height = min(image.height, max(1, round(math.sqrt(area / aspect))))
    left, top = int(draw() * (image.width - width + 1)), int(draw() * (image.height - height + 1))
    box = (left, top, left + width, top + height)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    if draw() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(1 + JITTER * (2 * draw() - 1))
    return torch.from_numpy(np.array(image))


def waited(value: Any, draw: Draw) -> torch.Tensor:
    """uint8 [224, 224, 3], after 4 ms without a core: the first bytes, and zeros."""
    time.sleep(0.004)
    made = torch.zeros(SIZE * SIZE * 3, dtype=torch.uint8)
    made[:1024] = torch.from_numpy(np.frombuffer(value, np.uint8)[:1024].copy())
    return made.view(SIZE, SIZE, 3)


def templated(value: Any, draw: Draw, *, tokenizer: str) -> torch.Tensor:
    """int64 [512]: the tokens of a chat's template, cut or padded."""
    chat = json.loads(str(value, "utf-8"))
    turns = [f"<|{turn['role']}|>\n{turn['content'].strip()}<|end|>\n" for turn in chat["messages"]]
    return torch.tensor(_tokenizer(tokenizer).encode("".join(turns) + "<|assistant|>\n").ids)


@functools.cache
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def write_texts(folder: Path, *, data: Data) -> None:
    """Chats of about 280 words as JSON in tars, and a BPE tokenizer trained on some of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    num_shards = max(1, data.sizes.record_shards // 10)
    per_shard = data.sizes.records // 10 // num_shards
    chats = _chats(data.sizes.seed)
    names, indexes, texts = [f"shard-{i:05d}.tar" for i in range(num_shards)], [], []
    labels = np.arange(num_shards * per_shard) % 1000
    for shard, name in enumerate(names):
        numbers = range(shard * per_shard, (shard + 1) * per_shard)
        members = [{"json": next(chats).encode(), "cls": b"%d" % labels[i]} for i in numbers]
        indexes.append(write_tar(folder / name, zip((f"{i:08d}" for i in numbers), members, strict=True)))
        texts += [member["json"].decode() for member in members[: 1 + 2000 // num_shards]]
    TarIndex.of_shards(names, indexes, labels).save(folder / "index.npz")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", *(f"<|{role}|>" for role in ("system", "user", "assistant"))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=0, pad_token=special[0])
    tokenizer.save(str(folder / "tokenizer.json"))


def _chats(seed: int) -> Iterator[str]:
    """Words of 5,000, the n-th 1/n as frequent as the first."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "er", "on")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(5_000)]
    weights = list(np.cumsum(1 / np.arange(1, 5_001)))
    while True:
        messages = [
            {
                "role": role,
                "content": " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(20, 90))),
            }
            for role in ("system", "user", "assistant", "user", "assistant")
        ]
        yield json.dumps({"messages": messages})
