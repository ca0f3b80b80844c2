"""TRL's SFTTrainer on packed rows: attention stays inside each document, and a checkpoint resumes exactly."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from dataflow import DataLoader, Packed, ShardedDataset, ShardWriter
from dataflow.integrations.transformers import resume


# [trainer]
def as_arguments(batch: dict) -> dict:
    """The model's arguments as `DataCollatorWithFlattening` makes them: input_ids, cu_seq_lens_q ..."""
    return batch["tokens"].flattened(mask=batch["mask"])


class PackedTrainer(SFTTrainer):
    """SFTTrainer, or transformers' Trainer, with rows that hold several documents each."""

    def get_train_dataloader(self):
        """Give the trainer a loader of this package."""
        dataset = ShardedDataset("chats.jsonl", batch_transform=as_arguments)
        return DataLoader(dataset, 4, shuffle=True, seed=1, batching=Packed(128, columns=["tokens", "mask"]))


# [end]
def train(checkpoint: str | None = None, **arguments) -> list[float]:
    """Train, from a checkpoint if there is one; returns the losses."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    # [settings]
    shown = Dataset.from_dict(
        {"input_ids": [[1, 2]], "labels": [[1, 2]]}
    )  # to look at; batches are the loader's
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    settings = SFTConfig("sft", use_cpu=True, report_to=[], logging_steps=1, **prepared, **arguments)
    trainer = PackedTrainer(model, settings, train_dataset=shown, processing_class=tokenizer)
    resume(trainer)  # each checkpoint keeps the loader's state
    trainer.train(resume_from_checkpoint=checkpoint)
    # [end]
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    with ShardWriter("chats.jsonl", overwrite=True) as shards:
        for i in range(120):  # of 2 to 100 tokens, of which the second half is to be learned
            tokens = [(i + at) % 64 for at in range(2 + i * 37 % 99)]
            shards.write({"tokens": tokens, "mask": [at >= len(tokens) // 2 for at in range(len(tokens))]})
    whole = train(max_steps=6, save_steps=4)
    resumed = train("sft/checkpoint-4", max_steps=6)
    print(f"{len(resumed)} losses, 2 of them after the checkpoint, as without a stop: {resumed == whole}")
