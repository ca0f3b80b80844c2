"""Keep the two answers of a preference pair in one row, and take them apart in the batch.

python examples/preference_pairs.py
"""

import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers

from dataflow import (
    ChatTemplate,
    DataLoader,
    Packed,
    PreferencePairs,
    ShardedDataset,
    ShardWriter,
    split_pairs,
)

TEMPLATE = """{% for message in messages %}{{ message.role }}: \
{% if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
{% else %}{{ message.content }}
{% endif %}{% endfor %}"""


def write_data(folder: str) -> str:
    """Forty pairs, and a tokenizer of single bytes."""
    with ShardWriter(f"{folder}/pairs-%02d.jsonl") as shards:
        for i in range(40):
            question = [{"role": "user", "content": f"What is {i} + 1?"}]
            better, worse = ([{"role": "assistant", "content": str(i + n)}] for n in (1, 2))
            shards.write({"prompt": question, "chosen": better, "rejected": worse})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(f"{folder}/tokenizer.json")
    return f"{folder}/tokenizer.json"


with tempfile.TemporaryDirectory() as folder:
    tokenizer = write_data(folder)
    # [pairs]
    stage = ChatTemplate(tokenizer, template=TEMPLATE, max_length=128)
    pairs = PreferencePairs(stage, prompt="prompt")  # columns: prompt, chosen, rejected
    dataset = ShardedDataset(f"{folder}/pairs-*.jsonl", transform=pairs, batch_transform=split_pairs)
    # Whole pairs only: two answers of at most 128 tokens fit a row of 256.
    batching = Packed(256, columns=["input_ids", "loss_mask"], overlong="error")
    # [end]
    with DataLoader(dataset, 2, shuffle=True, seed=1, batching=batching) as loader:
        batch = next(iter(loader))
        rows, chosen = batch["input_ids"], batch["chosen_length"]
        print(f"{len(chosen)} pairs, {len(rows.segments.length)} segments in {len(rows.tokens)} rows")
        print(f"the first pair: {rows.segments.length[:2].tolist()} tokens")
