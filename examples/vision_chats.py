"""Train a small Qwen3-VL on chats with pictures, packed: the loss is that of each chat alone.

torchrun --standalone --nproc-per-node 2 examples/vision_chats.py

A run that was stopped goes on from its last checkpoint, also with another number of processes.
"""

import io
import os
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import numbered_batches
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dataflow import DataLoader, Packed, ShardedDataset, ShardWriter, VisionChat
from dataflow.integrations.transformers import model_inputs

COLOURS = ["red", "green", "blue", "white", "black", "orange", "purple", "yellow"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{% for part in message.content %}{% if part.type == "image" %}
<|vision_start|><|image_pad|><|vision_end|>
{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}"""


def write_data(folder: Path) -> None:
    """Write 240 chats about 0 to 3 pictures, and a tokenizer; yours are there already."""
    with ShardWriter(f"{folder}/chats-%02d.tar", max_count=60) as shards:
        for i in range(240):
            colours = [COLOURS[(i + 3 * place) % 8] for place in range(i % 4)]
            parts = [{"type": "image"} for _ in colours] + [{"type": "text", "text": "Which colours?"}]
            answer = {"role": "assistant", "content": " ".join(colours) or "none"}
            sample = {"__key__": f"{i:03d}", "json": [{"role": "user", "content": parts}, answer]}
            for place, colour in enumerate(colours):
                Image.new("RGB", (40 + i * 37 % 80, 40 + i * 53 % 80), colour).save(
                    file := io.BytesIO(), "JPEG"
                )
                sample[f"{place}.jpg"] = file.getvalue()
            shards.write(sample)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([" ".join(COLOURS)] * 3, trainer)
    tokenizer.save(f"{folder}/tokenizer.json")


def make_model() -> Qwen3VLForConditionalGeneration:
    """Make a model of random weights."""
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    text = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"bos_token_id": 0, "eos_token_id": 2, "head_dim": 16}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
    names = ("vision_start", "vision_end", "image", "video")
    tokens = {f"{name}_token_id": number for number, name in enumerate(names, 3)}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")


# [loader]
def as_arguments(batch: dict[str, Any], chats: VisionChat, config: Qwen3VLConfig) -> dict[str, Any]:
    """Return the model's arguments; levels of pixels become normalised numbers."""
    batch["pixel_values"] = chats.normalized(batch["pixel_values"])
    return model_inputs(batch, config)


def make_loader(folder: Path, rows: int, config: Qwen3VLConfig) -> DataLoader:
    """Make a loader of packed rows of 256 tokens, as arguments of the model."""
    pixels = {"min_pixels": 32**2, "max_pixels": 16 * 32**2}
    chats = VisionChat(folder, family="qwen3_vl", template=TEMPLATE, max_length=256, **pixels)
    dataset = ShardedDataset(
        f"{folder}/*.tar",
        columns={"messages": "json", "images": "*.jpg"},
        decode={"images": None},  # the files' bytes
        transform=chats,
        batch_transform=partial(as_arguments, chats=chats, config=config),
    )
    batching = Packed(
        256,
        columns=["input_ids", "loss_mask"],
        whole=["pixel_values", "image_grid_thw"],  # an entry for each chat
        overlong="error",  # `max_length` leaves no longer chat
    )
    return DataLoader(dataset, rows, shuffle=True, seed=1, drop_last=True, batching=batching)


# [end]
def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]
) -> float:
    """One step on this process's rows; the mean loss of what the assistant says, over all processes."""
    count = (arguments["labels"][0, 1:] != -100).sum()
    loss = model(**arguments).loss * count
    totals = torch.stack([loss.detach(), count])
    dist.all_reduce(totals)
    optimizer.zero_grad()
    # DDP takes the mean over processes; what is wanted is the sum over tokens, divided by their number.
    (loss * dist.get_world_size() / totals[1]).backward()
    optimizer.step()
    return float(totals[0] / totals[1])


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Train a small Qwen3-VL on chats with pictures.")
    parser.add_argument("--out", type=Path, default="out/vision", help="folder for data and checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, over all processes")
    parser.add_argument("--kill-at", type=int, help="a step after which the processes are lost")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not (args.out / "tokenizer.json").exists():
        write_data(args.out)
    dist.barrier()
    # A process whose rows have no picture makes no use of the vision tower.
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with make_loader(args.out, args.rows // dist.get_world_size(), model.module.config) as loader:
        saving = {"folder": args.out, "steps": args.steps, "save_every": args.save_every}
        for step, arguments in numbered_batches(loader, model, optimizer, **saving):
            loss = train_step(model, optimizer, arguments)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
            if step == args.kill_at:
                os.kill(os.getpid(), 9)  # SIGKILL
    del model  # else DDP may wait for gloo's threads with the interpreter lock held, as Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
