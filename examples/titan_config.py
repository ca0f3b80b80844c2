"""A configuration of torchtitan that mixes two sources of raw text, tokenized and packed while it trains.

cd examples && python titan_config.py  # writes shards and a tokenizer: yours are there already
torchrun --nproc-per-node 2 -m torchtitan.train --module titan_config --config pretrain
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from dataflow import ShardWriter
from dataflow.integrations.torchtitan import ShardedDataLoader, ShardSource

OUT = Path("out/titan")


def pretrain() -> Trainer.Config:
    """Return the small Llama of torchtitan on two sources, 80 to 20 by tokens."""
    counts = ShardSource(path=f"{OUT}/counts-*.jsonl", weight=0.8)
    sums = ShardSource(path=f"{OUT}/sums-*.jsonl", weight=0.2)
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(OUT), str(OUT)  # the folder of tokenizer.json
    config.training = TrainingConfig(local_batch_size=2, global_batch_size=8, seq_len=64, steps=10)
    config.dataloader = ShardedDataLoader.Config(sources=[counts, sums], seed=1, global_batch_size=8)
    held_out = ShardedDataLoader.Config(dataset_path=f"{OUT}/held-out.jsonl")
    config.validator = Validator.Config(enable=True, freq=5, steps=-1, dataloader=held_out)
    config.checkpoint = CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False)
    return config


def main() -> None:
    """Write the data."""
    counts = [f"Document {i} counts: {', '.join(map(str, range(i % 40)))}." for i in range(500)]
    sums = [f"{i} + {i} = {i + i}" for i in range(500)]
    for name, texts in (("counts-%02d", counts[:450]), ("held-out", counts[450:]), ("sums-%02d", sums)):
        with ShardWriter(f"{OUT}/{name}.jsonl", overwrite=True) as shards:
            for text in texts:
                shards.write({"text": text})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    begin, end = special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*counts, *sums], trainer)
    tokenizer.save(f"{OUT}/tokenizer.json")
    (OUT / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin, "eos_token": end}))


if __name__ == "__main__":
    main()
