"""Chats with pictures into packed rows, beside the model's own processor in torch's DataLoader.

    python -m benchmarks.tokens.pictures --json result.json

All read the same JPEGs and messages of one Parquet file, and use two builders of one thread. torch's loader
has the processor of transformers in each worker, with torchvision's operations, and delivers lists of
samples; this one delivers packed rows. Needs transformers and torchvision. Each runs in a process of its own,
in turns.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks.harness import in_own_process

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
WORDS = ["the", "a", "picture", "shows", "red", "blue", "house", "tree", "with", "two", "beside", "under"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
ROW = 8192
OURS, THEIRS = ("uint8", "float32"), "processor"


def write(folder: Path, chats: int, low: int, high: int) -> None:
    """Write chats of 1 to 3 turns with 0 to 4 pictures of `low` to `high` pixels a side, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    messages, images = [], []
    for number in range(chats):
        rng = np.random.default_rng(number)
        messages.append([])
        images.append([])
        for _ in range(int(rng.integers(1, 4))):
            here = int(rng.integers(0, 3)) if len(images[-1]) < 3 else 0
            for _ in range(here):
                small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
                size = tuple(map(int, rng.integers(low, high, 2)))
                small.resize(size, Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG", quality=90)
                images[-1].append(file.getvalue())
            text = " ".join(rng.choice(WORDS, 20))
            parts = [{"type": "image", "text": None}] * here + [{"type": "text", "text": text}]
            messages[-1].append({"role": "user", "content": parts})
            answer = {"type": "text", "text": " ".join(rng.choice(WORDS, 30))}
            messages[-1].append({"role": "assistant", "content": [answer]})
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    schema = pa.schema({"messages": pa.list_(message), "images": pa.list_(pa.binary())})
    table = pa.table({"messages": messages, "images": images}, schema)
    pq.write_table(table, folder / "chats.parquet", row_group_size=64)


def of_ours(folder: Path, patches: Any) -> Iterator[int]:
    """The chats of each batch of packed rows."""
    from dataflow import DataLoader, Packed, ShardedDataset, VisionChat

    chats = VisionChat(
        folder / "tokenizer.json", family="qwen2_5_vl", template=TEMPLATE, patches=patches, max_length=ROW
    )
    dataset = ShardedDataset(folder / "chats.parquet", decode={"images": None}, transform=chats)
    whole = ["pixel_values", "image_grid_thw"]
    batching = Packed(ROW, columns=["input_ids", "loss_mask"], whole=whole, overlong="error")
    with DataLoader(dataset, 1, shuffle=True, batching=batching, num_workers=2) as loader:
        for batch in loader:
            yield len(batch["input_ids"].segments.length)


class Chats(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What the processor makes of each chat."""

    def __init__(self, folder: Path) -> None:
        table = pq.read_table(folder / "chats.parquet")
        self.messages, self.images = table["messages"].to_pylist(), table["images"].to_pylist()
        real = torch.library.register_fake  # torchvision's compiled part is not needed

        def without_own(name: Any, *arguments: Any, **options: Any) -> Any:
            is_own = str(name).startswith("torchvision::")
            return (lambda function: function) if is_own else real(name, *arguments, **options)

        torch.library.register_fake = without_own  # type: ignore[assignment]
        import transformers as t

        tokenizer = t.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>"
        )
        limits = {"min_pixels": 4 * 28**2, "max_pixels": 16384 * 28**2}
        parts = {"image_processor": t.Qwen2VLImageProcessor(**limits), "tokenizer": tokenizer}
        parts["video_processor"] = t.Qwen2VLVideoProcessor()
        self.processor = t.Qwen2_5_VLProcessor(**parts, chat_template=TEMPLATE)
        torch.library.register_fake = real

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, number: int) -> Any:
        text = self.processor.apply_chat_template(self.messages[number])
        pictures = [Image.open(io.BytesIO(data)) for data in self.images[number]]
        return dict(self.processor(text=[text], images=pictures or None, return_tensors="pt"))


def first_of(samples: list[Any]) -> list[Any]:
    """The samples, as they are."""
    return samples


def of_torch(folder: Path) -> Iterator[int]:
    """The chats of each batch of torch's DataLoader with the processor in two workers."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    options: dict[str, Any] = {"num_workers": 2, "shuffle": True, "collate_fn": first_of}
    for batch in torch.utils.data.DataLoader(Chats(folder), 4, **options):
        yield len(batch)


def measured(name: str, folder: str) -> dict[str, float]:
    """Chats a second, CPU seconds and peak memory of one pass, its start included."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    batches = of_torch(Path(folder)) if name == THEIRS else of_ours(Path(folder), name)
    first, chats = 0.0, 0
    for size in batches:
        first = first or time.perf_counter() - start
        chats += size
    seconds = time.perf_counter() - start
    kinds = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "chats": chats,
        "chats_per_s": chats / seconds,
        "first_batch_s": first,
        "cpu_s": sum(kind.ru_utime + kind.ru_stime for kind in kinds),
        "peak_mb_of_largest_process": max(kind.ru_maxrss for kind in kinds) / 1000,
    }


def main() -> None:
    """Measure all, and print or write medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chats", type=int, default=2000)
    parser.add_argument("--sides", type=int, nargs=2, default=(200, 700), help="least and most pixels a side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*OURS, THEIRS)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.chats, *arguments.sides)
        for _ in range(arguments.repeats):
            for name, found in runs.items():
                found.append(in_own_process(measured, name, folder, limit_s=600))
                print(name, {key: round(value, 2) for key, value in found[-1].items()}, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    command = " ".join(["python -m benchmarks.tokens.pictures", *sys.argv[1:]])
    result = {"command": command, "medians": medians, "runs": runs, "torch": torch.__version__}
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
