"""Turn text into packed rows of tokens while the training runs; a chat's loss counts its answers only.

python examples/text_to_rows.py
"""

import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dataflow import ChatTemplate, DataLoader, Packed, ShardedDataset, ShardWriter, Tokenize

TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}"""


def write_data(folder: str) -> str:
    """Documents, chats and a small tokenizer for both; yours are there already."""
    texts = [f"Document {i} counts: {', '.join(map(str, range(i)))}" for i in range(40)]
    with ShardWriter(f"{folder}/text-%02d.jsonl") as shards:
        for text in texts:
            shards.write({"text": text})
    with ShardWriter(f"{folder}/chats-%02d.jsonl") as shards:
        for i in range(40):
            question = {"role": "user", "content": f"What is {i} + 1?"}
            shards.write({"messages": [question, {"role": "assistant", "content": str(i + 1)}]})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, show_progress=False))
    tokenizer.save(f"{folder}/tokenizer.json")
    return f"{folder}/tokenizer.json"


def main() -> None:
    """Print what the batches hold."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_data(folder)
        documents = ShardedDataset(f"{folder}/text-*.jsonl", transform=Tokenize(tokenizer, eos="<|end|>"))
        with DataLoader(documents, 4, shuffle=True, seed=1, batching=Packed(128, "input_ids")) as loader:
            for batch in loader:
                rows = batch["input_ids"]
                print(f"{list(rows.tokens.shape)} tokens of {len(rows.segments.length)} documents")
            print(f"{loader.stats().lengths.efficiency:.1%} of the places hold tokens")

        stage = ChatTemplate(tokenizer, template=TEMPLATE)
        chats = ShardedDataset(f"{folder}/chats-*.jsonl", transform=stage)
        batching = Packed(128, columns=["input_ids", "loss_mask"])
        with DataLoader(chats, 4, shuffle=True, seed=1, batching=batching) as loader:
            batch = next(iter(loader))
            targets = batch["input_ids"].targets(mask=batch["loss_mask"])
            print(f"{(targets >= 0).sum()} of {targets.numel()} places of the first batch are to be learned")


if __name__ == "__main__":
    main()
