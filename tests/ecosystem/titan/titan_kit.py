"""torchtitan's trainer on CPUs with gloo, which it does not provide for, and a record of what it trains on.

torchtitan 0.3.0 is written for accelerators and for a torch that is not released yet. Beside its own code the
tests need what follows here, all of it outside of the data:

- a device module for "cpu" with the names, properties and statistics that `torch.cpu` lacks;
- `torch.distributed.set_timeout`, which torch 2.13 has under a private name;
- sums in place of scaled sums in FSDP's reductions, because gloo has no `PREMUL_SUM`;
- attention by `scaled_dot_product_attention`, because flex attention has no backward pass on CPUs and the
  other choice needs CUDA. It does not look at the bounds of documents: their masks are tested by themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule

from dataflow.testing import ranks

# What ranks would import anew, 6 s each, unless the fork server has it.
ranks._PRELOADED.extend(("torchtitan.models.llama3.config_registry", "torchtitan.train", "tokenizers"))
ON_CPU = [
    "--parallelism.spmd_backend=partial_dtensor",
    "--training.mixed_precision_param=float32",
    "--training.disable_cuda_graphs",
    "--loss.num_chunks=1",
]


class CpuModule:
    """What torchtitan asks of `torch.cuda`, answered for CPUs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "cpu"

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""


def use_cpu() -> None:
    """Let torchtitan run on CPUs in this process."""
    from torchtitan import trainer
    from torchtitan.components import metrics
    from torchtitan.distributed import parallel_dims, utils as distributed_utils
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.tools import utils

    for module in (utils, metrics, parallel_dims, distributed_utils):
        vars(module).update(device_type="cpu", device_module=CpuModule())
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda s: None)  # 2 s at the end
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


def write_data(folder: Path) -> None:
    """Write the example's data below a folder."""
    os.chdir(folder)
    import titan_config

    titan_config.main()


def held_out() -> Any:
    """The example's configuration, for two epochs of what it validates on."""
    import titan_config

    from dataflow.integrations.torchtitan import ShardedDataLoader

    config = titan_config.pretrain()
    held_out, batch = config.validator.dataloader.dataset_path, config.training.global_batch_size
    config.dataloader = ShardedDataLoader.Config(
        dataset_path=held_out, infinite=False, num_epochs=2, global_batch_size=batch
    )
    return config


def rows_of_ranks(folder: Path, num_groups: int) -> list[list[int]]:
    """The rows of two optimizer steps on this rank, in a job where two ranks each hold a part of a model."""
    os.chdir(folder)
    import titan_config
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    dist.init_process_group("gloo")
    loader = titan_config.pretrain().dataloader.build(
        dp_world_size=num_groups,
        dp_rank=dist.get_rank() // 2,
        tokenizer=HuggingFaceTokenizer(tokenizer_path="out/titan"),
        seq_len=32,
        local_batch_size=4,
    )
    batches = itertools.islice(loader, 4 // num_groups)
    rows = [row for inputs, _ in batches for row in inputs["input"].tolist()]
    loader.close()
    dist.destroy_process_group()
    return rows


def train(record: Path, folder: Path, options: Sequence[str] = (), kill_at: int | None = None) -> None:
    """Train on this rank as `torchtitan.train` does, by the example's configuration.

    Args:
        record: a folder for a file a rank: a line a step, with its loss and the rows that were trained on.
        folder: the working directory: data and checkpoints are below it.
        options: of torchtitan's command line.
        kill_at: a step before which all ranks are killed, having trained on the one before.
    """
    os.chdir(folder)
    use_cpu()
    from torchtitan.config import ConfigManager

    arguments = ["--module=titan_config", "--config=pretrain", *ON_CPU, *options]
    config = ConfigManager().parse_args(arguments)
    config.activation_checkpoint = None  # recomputing takes longer here
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    record.mkdir(exist_ok=True)
    with open(record / f"{dist.get_rank()}.jsonl", "w", buffering=1) as lines:
        _record(trainer, lines, kill_at)
        try:
            trainer.train()
        finally:
            trainer.close()


def saved_position(checkpoint: Path) -> dict[str, Any]:
    """The loader's state in a checkpoint, without a trainer. There is one, however many ranks saved it."""
    state: dict[str, Any] = {}
    for name in FileSystemReader(checkpoint).read_metadata().state_dict_metadata:
        if name.startswith("dataloader."):
            state[name] = ""
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {name.removeprefix("dataloader."): value for name, value in state.items()}


def _record(trainer: Any, lines: Any, kill_at: int | None) -> None:
    """Have a trainer write what it trains on, and its losses."""
    batches_of, train_step = trainer.batch_generator, trainer.train_step
    rows: list[list[int]] = []
    num_labels: list[int] = []

    def batch_generator(loader: Any) -> Any:
        for inputs, labels in batches_of(loader):
            rows.extend(inputs["input"].tolist())
            num_labels.append(int((labels >= 0).sum()))
            yield inputs, labels

    def step(batches: Any) -> None:
        if trainer.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        rows.clear()
        num_labels.clear()
        train_step(batches)

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        lines.write(
            json.dumps({"step": step, "loss": loss, "rows": rows, "num_labels": sum(num_labels)}) + "\n"
        )

    def log_validation(loss: float, step: int) -> None:
        lines.write(json.dumps({"step": step, "validation": loss}) + "\n")

    trainer.batch_generator, trainer.train_step = batch_generator, step
    trainer.metrics_processor.log, trainer.metrics_processor.log_validation = log, log_validation
