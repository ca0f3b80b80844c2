"""The ways from raw text to packed rows that `compare` runs, and what is measured of one.

A second process of the same job goes on from the state that the first has left in the cache folder.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import tree_cpu_s

END = "<|end|>"
RESUMED_AT = 0.9
"""Of the tokens."""
BUFFER = 4_096
"""Documents that the hand-written packer looks at together."""
Counts = tuple[int, int]
"""Rows of a batch, and tokens in them that are no padding."""


@dataclass(frozen=True)
class TextData:
    """Text on disk."""

    folder: str
    documents: int
    tokens: int

    @property
    def shards(self) -> list[str]:
        return sorted(map(str, Path(self.folder).glob("text-*.jsonl")))

    @property
    def tokenizer(self) -> str:
        return str(Path(self.folder) / "tokenizer.json")

    def texts(self) -> list[str]:
        """All documents, for loaders that want them in memory."""
        return [
            json.loads(line)["text"]
            for shard in self.shards
            for line in Path(shard).read_bytes().splitlines()
        ]


@dataclass(frozen=True)
class TokensJob:
    """What a loader is to do."""

    loader: str
    data: TextData
    length: int
    rows: int
    window: int | None
    cache: str
    resumes: bool

    @property
    def state_file(self) -> Path:
        return Path(self.cache) / "state.pickle"


class Feed:
    """A loader of one epoch."""

    def batches(self) -> Iterator[Counts]:
        raise NotImplementedError

    def state(self) -> Any:
        """Where the batches so far end."""
        raise NotImplementedError


def counted(tokens: torch.Tensor, segments: torch.Tensor) -> Counts:
    return len(tokens), int((segments > 0).sum())


class Ours(Feed):
    """`Tokenize` and `Packed`, with defaults."""

    def __init__(self, job: TokensJob, state: Any) -> None:
        from dataflow import DataLoader, Packed, ShardedDataset, Tokenize

        dataset = ShardedDataset(job.data.shards, transform=Tokenize(job.data.tokenizer, eos=END))
        batching = Packed(job.length, "input_ids", window=job.window)
        self._loader = DataLoader(dataset, job.rows, shuffle=True, batching=batching)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[Counts]:
        return (counted(b["input_ids"].tokens, b["input_ids"].segment_ids) for b in self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


_tokenizers: dict[str, Any] = {}


def encoded(path: str, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, with an end behind each; the tokenizer is opened once a process."""
    from tokenizers import Tokenizer

    tokenizer = _tokenizers.get(path)
    if tokenizer is None:
        tokenizer = _tokenizers[path] = Tokenizer.from_file(path)
    end = tokenizer.token_to_id(END)
    return [[*each.ids, end] for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class DatasetsMap(Feed):
    """`datasets.map`, then best-fit decreasing over buffers of documents. A state is a number of batches."""

    def __init__(self, job: TokensJob, state: Any) -> None:
        from datasets import load_dataset

        path = job.data.tokenizer
        raw = load_dataset("json", data_files=job.data.shards, split="train", cache_dir=job.cache)
        self._tokens = raw.map(
            lambda batch: {"input_ids": encoded(path, batch["text"])},
            batched=True,
            num_proc=len(os.sched_getaffinity(0)),
            remove_columns=["text"],
            new_fingerprint="tokens",
        ).shuffle(seed=0)
        self._length, self._rows, self._done = job.length, job.rows, state or 0

    def batches(self) -> Iterator[Counts]:
        rows = self._packed(self._done * self._rows)
        while own := list(itertools.islice(rows, self._rows)):
            tokens = torch.zeros(len(own), self._length, dtype=torch.int64)
            segments = torch.zeros(len(own), self._length, dtype=torch.int32)
            positions = torch.zeros(len(own), self._length, dtype=torch.int32)
            for row, pieces in enumerate(own):
                at = 0
                for number, piece in enumerate(pieces, 1):
                    tokens[row, at : at + len(piece)] = torch.from_numpy(piece)
                    segments[row, at : at + len(piece)] = number
                    positions[row, at : at + len(piece)] = torch.arange(len(piece))
                    at += len(piece)
            self._done += 1
            yield counted(tokens, segments)

    def _packed(self, skipped: int) -> Iterator[list[np.ndarray]]:
        """Rows, each some pieces of documents, from one on."""
        dataset = self._tokens.with_format("numpy")
        for batch in dataset.iter(BUFFER):
            pieces = [
                ids[at : at + self._length]
                for ids in batch["input_ids"]
                for at in range(0, len(ids), self._length)
            ]
            rows = self._best_fit(list(map(len, pieces)))
            for row in rows[skipped:]:
                yield [pieces[number] for number in row]
            skipped = max(0, skipped - len(rows))

    def _best_fit(self, lengths: list[int]) -> list[list[int]]:
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []  # what is left in each row that has room, and which row; ascending
        for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
            at = bisect_left(room, (lengths[number], 0))
            left, row = room.pop(at) if at < len(room) else (self._length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(number)
            if left > lengths[number]:
                insort(room, (left - lengths[number], row))
        return rows

    def state(self) -> Any:
        return self._done


class Grain(Feed):
    """Documents in memory, tokenized and packed by worker processes."""

    def __init__(self, job: TokensJob, state: Any) -> None:
        import grain
        import grain.experimental as experimental

        path, length = job.data.tokenizer, job.length

        class Split(experimental.FlatMapTransform):
            max_fan_out = 1024

            def flat_map(self, ids: Any) -> Any:
                return [{"tokens": ids[at : at + length]} for at in range(0, len(ids), length)]

        def tokens_of(text: str) -> Any:
            return np.array(encoded(path, [text])[0], np.int32)

        source = grain.MapDataset.source(job.data.texts()).shuffle(seed=0).map(tokens_of)
        dataset = source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        dataset = experimental.FlatMapIterDataset(dataset, Split())
        dataset = experimental.BestFitPackIterDataset(
            dataset, length_struct={"tokens": length}, num_packing_bins=64, shuffle_bins=False
        ).batch(job.rows)
        workers = len(os.sched_getaffinity(0))
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        self._batches = iter(dataset.mp_prefetch(options))
        if state is not None:
            self._batches.set_state(state)

    def batches(self) -> Iterator[Counts]:
        for batch in self._batches:
            yield counted(*map(torch.from_numpy, (batch["tokens"], batch["tokens_segment_ids"])))

    def state(self) -> Any:
        return self._batches.get_state()


class Torchtitan(Feed):
    """Its dataset in one worker process: more would each read all of the data."""

    def __init__(self, job: TokensJob, state: Any) -> None:
        from datasets import load_dataset
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchtitan.components.tokenizer import HuggingFaceTokenizer
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        shards, cache = job.data.shards, job.cache
        text_datasets.DATASETS["library"] = DatasetConfig(
            path=job.data.folder,
            loader=lambda _: load_dataset("json", data_files=shards, split="train", cache_dir=cache),
            sample_processor=lambda sample: sample["text"],
        )
        tokenizer = HuggingFaceTokenizer(tokenizer_path=job.data.folder)
        dataset = text_datasets.HuggingFaceTextDataset("library", None, tokenizer, seq_len=job.length)
        self._loader = StatefulDataLoader(dataset, batch_size=job.rows, num_workers=1)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[Counts]:
        return ((len(labels), labels.numel()) for _, labels in self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


class TokenizerAlone(Feed):
    """The limit: the tokenizer, over text in memory, in a thread a core; nothing is packed or delivered."""

    def __init__(self, job: TokensJob, state: Any) -> None:
        if state is not None:
            raise RuntimeError("a limit has no state")
        self._job, self._texts = job, job.data.texts()

    def batches(self) -> Iterator[Counts]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(self._job.data.tokenizer)

        def count(at: int) -> Counts:
            texts = self._texts[at : at + 64]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            tokens = sum(map(len, encodings)) + len(texts)
            return -(-tokens // self._job.length), tokens

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            yield from pool.map(count, range(0, len(self._texts), 64))

    def state(self) -> Any:
        return None


OURS, LIMIT = "dataflow", "tokenizer alone"
LOADERS: Mapping[str, Callable[[TokensJob, Any], Feed]] = {
    OURS: Ours,
    "datasets.map": DatasetsMap,
    "Grain": Grain,
    "torchtitan": Torchtitan,
    LIMIT: TokenizerAlone,
}
LIBRARIES = {
    OURS: ("dataflow.loader", "dataflow.stream.loader", "dataflow.text.tokenize", "tokenizers"),
    "datasets.map": ("datasets", "tokenizers"),
    "Grain": ("grain", "grain.experimental", "tokenizers"),
    "torchtitan": ("datasets", "torchtitan.hf_datasets.text_datasets", "torchdata.stateful_dataloader"),
    LIMIT: ("tokenizers",),
}
"""Imported before the clock starts."""


def measured(fields: dict[str, Any]) -> dict[str, float]:
    """Figures of one epoch, or of the first batch of its end."""
    job = TokensJob(**fields | {"data": TextData(**fields["data"])})
    for library in LIBRARIES[job.loader]:
        import_module(library)
    state = pickle.loads(job.state_file.read_bytes()) if job.resumes else None
    began, cpu_s = time.perf_counter(), tree_cpu_s(os.getpid())
    feed = LOADERS[job.loader](job, state)
    rows = tokens = 0
    for own_rows, own_tokens in feed.batches():
        if not rows:
            first_s = time.perf_counter() - began
            if job.resumes:
                return {"resume_s": first_s}
        rows, tokens = rows + own_rows, tokens + own_tokens
        if state is None and tokens >= RESUMED_AT * job.data.tokens:
            state = feed.state()
    if not rows:
        raise RuntimeError("nothing was left to deliver")
    took_s, cpu_s = time.perf_counter() - began, tree_cpu_s(os.getpid()) - cpu_s
    job.state_file.write_bytes(pickle.dumps(state))
    return {
        "tokens_per_s": tokens / took_s,
        "fill": tokens / (rows * job.length),
        "cpu_s_per_million": 1e6 * cpu_s / tokens,
        "first_batch_s": first_s,
        "lost_tokens": abs(job.data.tokens - tokens),
    }
