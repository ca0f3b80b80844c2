"""The data of the examples: tokens, texts, chats and a tokenizer; a WebDataset tar of JPEGs.

Each function writes a file unless it is there, on one rank while the others wait, and returns its path.
"""

import ast
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from dataflow import ShardWriter

END = 0
"""The token after each text."""


def token_file(folder: Path, texts: Sequence[Path]) -> Path:
    """`folder/tokens.bin`: the bytes of text files, one a token. None given: Python's standard library."""

    def write(path: Path) -> None:
        files = texts or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        path.write_bytes(b"".join(file.read_bytes() + bytes([END]) for file in files))

    return written_once(folder / "tokens.bin", write)


def text_file(folder: Path, texts: Sequence[Path]) -> Path:
    """`folder/text.jsonl`: {"text": ...} a line, of each paragraph of text files or the standard library."""

    def write(path: Path) -> None:
        files = texts or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
        paragraphs = (text for file in files for text in file.read_text("utf-8").split("\n\n") if text)
        write_lines(path, ({"text": text} for text in paragraphs))

    return written_once(folder / "text.jsonl", write)


def sum_chats(folder: Path) -> Path:
    """`folder/sums.jsonl`: chats about sums of two numbers."""

    def write(path: Path) -> None:
        rng = np.random.default_rng(0)
        pairs = rng.integers(0, 100, (2000, 2)).tolist()
        write_lines(path, (chat(f"What is {a} + {b}?", f"It is {a + b}.") for a, b in pairs))

    return written_once(folder / "sums.jsonl", write)


def code_chats(folder: Path) -> Path:
    """`folder/code.jsonl`: chats about functions of the standard library, and the first line on each."""

    def write(path: Path) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        trees = (ast.parse(file.read_text("utf-8")) for file in files)
        functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        texts = ((node.name, ast.get_docstring(node)) for node in functions)
        chats = (chat(f"What does {name} do?", text.splitlines()[0]) for name, text in texts if text)
        write_lines(path, chats)

    return written_once(folder / "code.jsonl", write)


def chat(question: str, answer: str) -> dict[str, Any]:
    """A line of a file of chats."""
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def tokenizer_file(folder: Path, sources: Sequence[Path], vocabulary: int = 512) -> Path:
    """`folder/tokenizer.json`: a byte-level BPE, trained on what lies in files of text or chats."""

    def write(path: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        lines = (line for source in sources for line in source.read_text("utf-8").splitlines())
        tokenizer.train_from_iterator((line for line, _ in zip(lines, range(4000), strict=False)), trainer)
        tokenizer.save(str(path))

    return written_once(folder / "tokenizer.json", write)


def image_tar(folder: Path, jpegs: Path | None) -> Path:
    """`folder/images.tar`: JPEGs and their classes, as `0001.jpg` and `0001.cls`.

    With a folder of JPEGs, those below it; a class is a folder with JPEGs in it, numbered in sorted order.
    Without one, 512 made-up pictures of four classes.
    """

    def write(path: Path) -> None:
        pictures = drawn(512) if jpegs is None else found(jpegs)
        with ShardWriter(str(path.with_name("%d.tar")), overwrite=True) as shards:
            for number, (picture, label) in enumerate(pictures):
                shards.write({"__key__": f"{number:06d}", "jpg": picture, "cls": label})
        path.with_name("0.tar").replace(path)

    return written_once(folder / "images.tar", write)


def mixed_tars(folder: str, count: int = 400) -> str:
    """Tars of 100 small pictures of four colours, in every other tar as PNG: `jpg` or `png`, and `cls`."""
    import cv2

    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/train-%06d.tar", max_count=100) as shards:
        for number in range(count):
            label, ending = number % 4, ("jpg", "png")[number // 100 % 2]
            pixels = rng.normal(128, 40, (16, 16, 3)) + 60 * np.eye(4, 3)[label]
            data = cv2.imencode(f".{ending}", pixels.clip(0, 255).astype(np.uint8))[1].tobytes()
            shards.write({"__key__": f"{number:06d}", ending: data, "cls": label})
    return f"{folder}/train-{{000000..{(count - 1) // 100:06d}}}.tar"


def review_lines(folder: str, count: int = 400) -> str:
    """Four files of JSON Lines: {"text": ..., "stars": 0 to 4}."""
    words = ("awful", "poor", "fair", "good", "superb")
    with ShardWriter(f"{folder}/reviews-%d.jsonl", max_count=100) as shards:
        for number in range(count):
            stars = number * 7 % 5
            shards.write({"text": f"review {number} says that it is {words[stars]}", "stars": stars})
    return f"{folder}/reviews-*.jsonl"


def found(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Each JPEG below a folder, and the number of the folder it is in."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    classes = sorted({path.parent for path in paths})
    return ((path.read_bytes(), classes.index(path.parent)) for path in paths)


def drawn(count: int, size: int = 48) -> Iterator[tuple[bytes, int]]:
    """Noisy stripes in four directions."""
    from simplejpeg import encode_jpeg

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    directions = (x, y, x + y, x - y)
    for number in range(count):
        label = number % 4
        stripes = np.sin(directions[label] / rng.uniform(1.5, 3) + rng.uniform(0, 6))[..., None]
        pixels = 128 + 60 * stripes * rng.uniform(0.3, 1, 3) + rng.normal(0, 25, (size, size, 3))
        yield encode_jpeg(np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8))), label


def written_once(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written by rank 0 if nobody has; every rank must call this."""
    if dist.get_rank() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    dist.barrier()
    return path
