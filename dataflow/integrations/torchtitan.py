"""A data loader of torchtitan over shards: its configuration builds it, its trainer reads and saves it.

Order, shares, packing and state are those of `DataLoader`, `Mixture` and `Packed`. This module turns
torchtitan's configuration into them and their batches into what its trainer takes: inputs, positions that
begin at 0 in each document (from which it makes attention masks), and labels.

A batch of the loader inside is this rank's part of one optimizer step, which is cut into the trainer's
microbatches. So an epoch ends between two steps at any data-parallel degree, and the steps of a run that
goes on with another number of ranks hold the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dataflow.dataset import ShardedDataset
from dataflow.integrations.versions import needed_for, warn_if_untried
from dataflow.loader import DataLoader
from dataflow.mixture import Mixture
from dataflow.shard_order import ShardOrder
from dataflow.text.chat import ChatTemplate
from dataflow.text.tokenize import Tokenize
from dataflow.topology_exchange import DataParallel, detect_topology
from sharding.lengths.batching import Packed
from sharding.topology.topology import Topology

with needed_for(__name__, extra="titan"):
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX

warn_if_untried("torchtitan", ("0.3", "0.3"))

_TOKENS, _MASK = "tokens", "loss_mask"
_COLUMNS = {"text": "text", "chat": "messages", "tokens": _TOKENS}
_REPEAT = "__repeat__"
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(kw_only=True, slots=True)
class ShardSource:
    """One of the sources that are mixed.

    Examples:
        >>> web = ShardSource(path="web/*.jsonl", weight=0.7)
        >>> code = ShardSource(path="code/*.bin", weight=0.3, kind="tokens", format="megatron")
    """

    path: str = ""
    """Its shards: a folder, a glob, a catalog or an address, as for `ShardedDataset`."""

    weight: float = 1.0
    """Its share of the tokens, in proportion to the weights of the other sources."""

    kind: Literal["text", "chat", "tokens"] = "text"
    """Documents to be tokenized, lists of messages, or token ids."""

    column: str = ""
    """The column that is read. Empty: "text", "messages" or "tokens", by the kind."""

    format: str = "auto"
    """The format of the shards. "tokens" (flat files of token ids) is read in windows of `seq_len` tokens."""

    dtype: str | None = None
    """The type of a token in `.bin` files of format "tokens", such as "uint16"."""

    split: str | None = None
    """The split of a dataset of the Hub."""


@dataclass(kw_only=True, slots=True)
class ShardedDataLoaderConfig(BaseDataLoader.Config):  # type: ignore[misc]
    """The settings of a `ShardedDataLoader`, which torchtitan's command line may change."""

    dataset_path: str | None = None
    """The shards of the only source, of texts, in place of `sources`."""

    sources: list[ShardSource] = field(default_factory=list)
    """The sources, mixed by their weights."""

    shuffle: bool = True
    """True for a random order, False for that of the files."""

    seed: int = 0
    """With the epoch, decides the order."""

    infinite: bool = True
    """True if a new epoch follows for ever."""

    num_epochs: int = 1
    """Epochs until the data ends, where `infinite` is False."""

    stop: Literal["first", "all"] = "first"
    """The end of an epoch of several sources: when the "first" was seen once, or "all" of them."""

    global_batch_size: int = -1
    """The value of `training.global_batch_size`, so that epochs end between two optimizer steps. -1: the
    trainer does not accumulate gradients."""

    tail: Literal["drop", "pad"] | None = None
    """The rule for an epoch's last rows, too few for a step: "drop" leaves them out. "pad" fills the step up
    with rows that have no labels. None: "drop" where `infinite` is True, else "pad"."""

    overlong: Literal["split", "truncate", "error"] = "split"
    """The rule for documents longer than a row, as in `Packed`."""

    on_error: Literal["raise", "skip"] = "raise"
    """The rule for samples that cannot be read or tokenized."""

    window: int | None = None
    """Documents that are packed together. None: about 16,384."""

    num_workers: int | None = None
    """Builders of batches on this rank. None: as many as it has cores."""

    memory_limit: str | None = None
    """Bytes that the loader may hold, such as "2GB". None: an eighth of the memory, at most 1 GiB."""

    pin_memory: bool = False
    """True to make rows in page-locked memory."""


class ShardedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Packed rows of tokens over shards, in the place of torchtitan's own loaders.

    Each call of `next` gives `({"input": ..., "positions": ...}, labels)`, int64 [local_batch_size, seq_len].
    A label is the next token of the same document, or -100. The state is the same on all ranks, and resumes
    at any data-parallel degree.

    Args:
        config: the sources and how they are read, as torchtitan's configuration has it.
        dp_world_size: the number of ranks that get different rows.
        dp_rank: the number of this rank among them.
        tokenizer: torchtitan's tokenizer, whose folder has a `tokenizer.json`.
        seq_len: tokens of a row.
        local_batch_size: rows of a microbatch on this rank.
        snapshot_every_n_steps: microbatches between two checkpoints; None: unknown.

    Raises:
        ValueError: settings that contradict each other, or do not fit the data.

    Examples:
        >>> web = ShardSource(path="web/*.jsonl", weight=0.7)
        >>> code = ShardSource(path="code/*.jsonl", weight=0.3)
        >>> config = ShardedDataLoader.Config(sources=[web, code])  # for Trainer.Config
    """

    Config = ShardedDataLoaderConfig

    def __init__(
        self,
        config: ShardedDataLoaderConfig,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **_: Any,
    ) -> None:
        self._rows = local_batch_size
        self._microbatches = _microbatches(config, local_batch_size, dp_world_size, snapshot_every_n_steps)
        self._left = 0
        """Microbatches of the step that the trainer has not taken yet."""
        self._num_epochs = None if config.infinite else config.num_epochs
        sources = _sources(config)
        by_windows = all(source.format == "tokens" for source in sources)
        datasets = [_opened(source, config, tokenizer, seq_len, by_windows) for source in sources]
        dataset: ShardedDataset | Mixture = datasets[0]
        if len(datasets) > 1:
            weights: dict[Any, float] = dict(zip(datasets, (each.weight for each in sources), strict=True))
            dataset = Mixture(weights, stop=config.stop, shares="samples" if by_windows else "tokens")
        tail = config.tail or ("drop" if config.infinite else "pad")
        packed = Packed(
            seq_len,
            columns=[_TOKENS, _MASK] if sources[0].kind == "chat" else [_TOKENS],
            overlong=config.overlong,
            pad={_TOKENS: getattr(tokenizer, "eos_id", None) or 0},
            window=config.window,
        )
        self.loader: DataLoader[Any, dict[str, Tensor]] = DataLoader(
            dataset,
            local_batch_size * self._microbatches,
            config.shuffle,
            seed=config.seed,
            tail=tail,
            mark_repeats=tail == "pad",
            batching=None if by_windows else packed,
            topology=_topology(dp_rank, dp_world_size),
            num_workers=config.num_workers,
            workers="auto" if config.num_workers else None,
            memory_limit=config.memory_limit,
            pin_memory=config.pin_memory,
        )
        """The loader inside, for `stats()` and `close()`."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield microbatches until the last epoch ends."""
        loader, order = self.loader, cast("ShardOrder", self.loader.sampler)
        while self._num_epochs is None or loader.epoch < self._num_epochs:
            if loader.resumed and order.nothing_left:
                loader.set_epoch(loader.epoch + 1)  # the state was taken at the end of an epoch
                continue
            is_empty = not loader.resumed
            for batch in loader:
                is_empty = False
                yield from self._parts(batch)
                del batch  # while the next one is made, only the trainer has this one
            if is_empty:
                raise ValueError(
                    "an epoch has not enough rows for one optimizer step "
                    f"({self._rows * self._microbatches} on each rank); take a smaller batch, more data or "
                    'tail="pad"'
                )

    def _parts(self, batch: dict[str, Tensor]) -> Iterator[Batch]:
        """Cut this rank's part of a step into microbatches: views, without a copy."""
        labels, repeats = batch["labels"], batch.get(_REPEAT)
        if repeats is not None and repeats.any():
            labels = labels.masked_fill(repeats[:, None], IGNORE_INDEX)
        for i in range(self._microbatches):
            rows = slice(i * self._rows, (i + 1) * self._rows)
            self._left = self._microbatches - i - 1
            yield {"input": batch["input"][rows], "positions": batch["positions"][rows]}, labels[rows]

    def state_dict(self) -> dict[str, Any]:
        """Return where the steps that the trainer took end; the same on every rank.

        Raises:
            ValueError: the trainer has taken a part of a step, so its batch is another than this loader's.
        """
        if self._left:
            raise ValueError(
                f"the trainer saves with {self._left} of {self._microbatches} microbatches of a step left: "
                "set dataloader.global_batch_size to training.global_batch_size"
            )
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. An empty state changes nothing, as in torchtitan.

        Raises:
            ValueError: it is the state of another loader, or of other data.
        """
        if state_dict:
            self.loader.load_state_dict(state_dict)
            self._left = 0

    def close(self) -> None:
        """End threads and processes. torchtitan does not call it; they end with the loader, too."""
        self.loader.close()


class _TrainerColumns:
    """Makes the trainer's columns of a batch of packed rows, or of windows of `seq_len + 1` tokens."""

    releases_gil = True

    def __call__(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        rows = batch[_TOKENS]
        if isinstance(rows, Tensor):
            length = rows.shape[1] - 1
            positions = torch.arange(length).expand(len(rows), length)
            # Copies: a view with gaps between its rows cannot be sent to a device at once.
            inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            return {"input": inputs, "positions": positions.contiguous(), "labels": labels}
        inside = rows.segment_ids > 0
        # Padding counts as one more document: the trainer takes each 0 for the beginning of one.
        padding = torch.arange(inside.shape[1]) - inside.sum(1, keepdim=True)
        positions = torch.where(inside, rows.positions, padding)
        return {
            "input": rows.tokens,
            "positions": positions,
            "labels": rows.targets(mask=batch.get(_MASK), ignore=IGNORE_INDEX),
        }


_trainer_columns = _TrainerColumns()
"""One object, because the sources of a mixture must have the same `batch_transform`."""


def _microbatches(
    config: ShardedDataLoaderConfig, local: int, num_ranks: int, between_saves: int | None
) -> int:
    """Return the microbatches of an optimizer step on each rank."""
    rows = local * num_ranks
    total = rows if config.global_batch_size < 0 else config.global_batch_size
    if total == 0 or total % rows:
        raise ValueError(
            f"dataloader.global_batch_size must be a multiple of the {local} rows of a microbatch times "
            f"{num_ranks} data-parallel ranks, got {total}"
        )
    if between_saves is not None and between_saves % (total // rows):
        raise ValueError(
            f"the trainer saves every {between_saves} microbatches, and dataloader.global_batch_size={total} "
            f"makes steps of {total // rows}: give it the value of training.global_batch_size"
        )
    return total // rows


def _sources(config: ShardedDataLoaderConfig) -> list[ShardSource]:
    """Return the sources that a configuration names."""
    if config.dataset:
        raise ValueError(
            f"dataloader.dataset={config.dataset!r} names a dataset of torchtitan: give dataset_path or "
            "sources"
        )
    sources = list(config.sources)
    if config.dataset_path:
        if sources:
            raise ValueError(
                f"dataloader has dataset_path={config.dataset_path!r} and {len(sources)} sources: leave one "
                "of the two out"
            )
        sources = [ShardSource(path=config.dataset_path)]
    if not sources or not all(source.path for source in sources):
        raise ValueError("dataloader names no shards: give dataset_path, or sources with a path each")
    if len(kinds := sorted({source.kind for source in sources})) > 1:
        raise ValueError(
            f"the sources of a mixture must be of one kind, got {' and '.join(kinds)}: tokenize texts once, "
            'with ShardWriter(..., format="megatron"), to mix them with tokens'
        )
    return sources


def _opened(
    source: ShardSource, config: ShardedDataLoaderConfig, tokenizer: Any, seq_len: int, by_windows: bool
) -> ShardedDataset:
    """Open a source, so that it delivers the column of token ids."""
    column = _COLUMNS[source.kind]
    transform: Tokenize | ChatTemplate | None = None
    length: int | None = None
    if source.kind == "text":
        transform = Tokenize(
            _tokenizer_file(tokenizer),
            column=column,
            into=_TOKENS,
            bos=None if tokenizer.hf_adds_bos else tokenizer.bos_id,
            eos=None if tokenizer.hf_adds_eos else tokenizer.eos_id,
            add_special_tokens=True,
            dtype="int64",
        )
    elif source.kind == "chat":
        transform = ChatTemplate(_tokenizer_file(tokenizer), column=column, into=_TOKENS, mask=_MASK)
    elif source.format == "tokens":
        # In packed rows a window is a row; by itself it has the last label, too.
        length = seq_len if by_windows else seq_len - 1
    return ShardedDataset(
        source.path,
        split=source.split,
        format=source.format,
        columns={column: source.column or column},
        transform=transform,
        batch_transform=_trainer_columns,
        dtype=source.dtype,
        length=length,
        on_error=config.on_error,
    )


def _tokenizer_file(tokenizer: Any) -> Path:
    """Return the file of torchtitan's tokenizer."""
    folder = Path(getattr(tokenizer, "tokenizer_path", ""))
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"texts are tokenized by the tokenizer.json of hf_assets_path, and {folder} has none; "
            "save_pretrained of transformers writes it"
        )
    return folder / "tokenizer.json"


def _topology(dp_rank: int, dp_world_size: int) -> Topology:
    """Return the topology of a rank whose data-parallel rank the trainer tells."""
    if not dist.is_initialized():
        return Topology(dp_rank, dp_world_size, source="torchtitan")
    if (dp_rank, dp_world_size) == (dist.get_rank(), dist.get_world_size()):
        return detect_topology()
    return detect_topology(replicate=DataParallel(dp_rank, dp_world_size))
