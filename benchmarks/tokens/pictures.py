"""Chats with pictures into packed rows, beside the model's own processor, Energon and torchtitan.

    python -m benchmarks.tokens.pictures --json result.json
    python -m benchmarks.tokens.pictures --peers uint8,float32,processor

All read the same JPEGs and messages, and use two builders of one thread. This loader, in uint8 and float32,
and Energon deliver packed rows; torch's DataLoader delivers lists of four chats from the processor, as
torchtitan a chat a row: its packer emits only rows that are full to the token. Energon's task encoder is the
best that its docs allow: lengths from headers, best fit among 256 chats, pixels made once they are packed.
Each runs in a process of its own, in turns. Needs transformers, torchvision, megatron-energon, torchtitan,
datasets, torchdata and simplejpeg; a peer whose package is missing is left out with a word.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks.harness import in_own_process
from benchmarks.tokens.picture_peers import SPECIAL, Energon, Ours, Processor, Taken, Titan, write_energon

WORDS = ["the", "a", "picture", "shows", "red", "blue", "house", "tree", "with", "two", "beside", "under"]
FILES = 4
FEW = 13
"""Chats of a packed row; torchtitan's first batch is one."""
RANKS = 8
"""Ranks that would share the batches, in turns: how evenly is told by their patches."""
PEERS: dict[str, Any] = {
    "uint8": partial(Ours, patches="uint8"),
    "float32": partial(Ours, patches="float32"),
    "processor": Processor,
    "energon": Energon,
    "torchtitan": Titan,
}
PACKAGES = {
    "processor": ("transformers", "torchvision"),
    "energon": ("transformers", "torchvision", "megatron.energon"),
    "torchtitan": ("torchvision", "torchtitan", "datasets", "torchdata", "simplejpeg"),
}


def write(folder: Path, chats: int, low: int, high: int) -> None:
    """Write chats of 1 to 3 turns with 0 to 4 pictures of `low` to `high` pixels a side, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2]}))
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
    for number in range(FILES):
        own = {"messages": messages[number::FILES], "images": images[number::FILES]}
        pq.write_table(pa.table(own, schema), folder / f"chats-{number}.parquet", row_group_size=64)


def measured(name: str, folder: str) -> dict[str, float]:
    """Rates, CPU seconds, peak memory and rows of one pass, its start included."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    first, batches = 0.0, list[Taken]()
    loader = PEERS[name](Path(folder), None)
    for batch in loader:
        first = first or time.perf_counter() - start
        batches.append(batch)
    seconds = time.perf_counter() - start
    loader.close()
    kinds = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    chats, tokens, room, patches = np.array(batches, np.int64).T
    steps = patches[: len(patches) // RANKS * RANKS].reshape(-1, RANKS)
    steps = steps[steps.any(axis=1)]
    return {
        "chats": int(chats.sum()),
        "patches": int(patches.sum()),
        "chats_per_s": chats.sum() / seconds,
        "first_batch_s": first,
        "cpu_s": sum(kind.ru_utime + kind.ru_stime for kind in kinds),
        "peak_mb_of_largest_process": max(kind.ru_maxrss for kind in kinds) / 1000,
        "fill": tokens.sum() / room.sum(),
        f"patches_max_over_mean_of_{RANKS}": float((steps.max(axis=1) / steps.mean(axis=1)).mean()),
    }


def resumed(name: str, folder: str, num_batches: int) -> dict[str, float]:
    """Seconds from a state behind so many batches to the next one, and to a row's worth of chats.

    Nothing for what has no state.
    """
    torch.set_num_threads(1)
    loader = PEERS[name](Path(folder), None)
    batches = iter(loader)
    for _ in islice(batches, num_batches):
        pass
    state = loader.state()
    del batches
    loader.close()
    if state is None:
        return {}
    start = time.perf_counter()
    loader = PEERS[name](Path(folder), state)
    batches, first, chats = iter(loader), 0.0, 0
    while chats < FEW:
        chats += next(batches).chats
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    del batches
    loader.close()
    return {"resume_s": first, f"resume_to_{FEW}_chats_s": seconds}


def prepare(folder: str, chats: int, sides: tuple[int, int], names: list[str]) -> None:
    """Write the data."""
    write(Path(folder), chats, *sides)
    if "energon" in names:
        write_energon(Path(folder))


def is_there(package: str) -> bool:
    """Return whether a package is installed."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    """Measure all, and print or write medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chats", type=int, default=2000)
    parser.add_argument("--sides", type=int, nargs=2, default=(200, 700), help="least and most pixels a side")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of " + ", ".join(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.peers.split(",")
    for name in list(names):
        if lacking := [one for one in PACKAGES.get(name, ()) if not is_there(one)]:
            print(f"{name} is left out: {', '.join(lacking)} is not installed", flush=True)
            names.remove(name)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        in_own_process(prepare, folder, arguments.chats, tuple(arguments.sides), names, limit_s=600)
        for _ in range(arguments.repeats):
            for name, found in runs.items():
                figures = in_own_process(measured, name, folder, limit_s=900)
                batches = 4 if name in ("processor", "torchtitan") else 2
                figures |= in_own_process(resumed, name, folder, batches, limit_s=600)
                found.append(figures)
                print(name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
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
