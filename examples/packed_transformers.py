"""Train a model of transformers on packed documents: position_ids keep them apart.

python examples/packed_transformers.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dataflow import DataLoader, Packed, PackedRows, ShardedDataset, ShardWriter

VOCABULARY = 64


def one_by_one(model: LlamaForCausalLM, rows: PackedRows) -> float:
    """The mean loss of a batch's tokens, with each document in a call of its own."""
    total, count = 0.0, 0
    for row, start, length in zip(rows.segments.row, rows.segments.start, rows.segments.length, strict=True):
        if length > 1:
            document = rows.tokens[row, start : start + length][None]
            total += float(model(input_ids=document, labels=document).loss) * (int(length) - 1)
            count += int(length) - 1
    return total / count


def main() -> None:
    """Print the loss of each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Without use_cache=False transformers would let documents see each other.
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(f"{folder}/%d.jsonl") as shards:
            for i in range(200):  # documents of 1 to 100 tokens
                shards.write({"tokens": [(i + place) % VOCABULARY for place in range(1 + i * 37 % 100)]})
        dataset = ShardedDataset(f"{folder}/*.jsonl")
        with DataLoader(dataset, 8, shuffle=True, seed=1, batching=Packed(128, "tokens")) as loader:
            for step, batch in enumerate(loader):
                rows = batch["tokens"]
                if step == 0:
                    with torch.inference_mode():
                        print(f"each document alone: loss {one_by_one(model, rows):.4f}")
                # [step]
                loss = model(**rows.flattened()).loss  # input_ids, labels, position_ids ... without padding
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # [end]
                print(f"step {step}: {len(rows.segments.length)} documents, loss {loss:.4f}")


if __name__ == "__main__":
    main()
