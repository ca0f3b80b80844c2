"""Ways to say how much of each dataset a training sees.

python examples/mixture_shares.py
"""

import tempfile

from dataflow import DataLoader, Mixture, ShardedDataset, ShardWriter

with tempfile.TemporaryDirectory() as folder:
    for name, count in (("web", 800), ("code", 200), ("math", 100)):
        with ShardWriter(f"{folder}/{name}-%d.jsonl") as shards:
            for i in range(count):
                shards.write({"source": name, "id": i})
    web, code, math = (ShardedDataset(f"{folder}/{name}-0.jsonl") for name in ("web", "code", "math"))
    # [shares]
    mixtures = {
        "shares of the samples": Mixture({web: 0.7, code: 0.3}),
        "every sample of each once": Mixture([web, code]),
        "code two and a half times": Mixture([web, code], repeats=[1, 2.5]),
        "by size ** (1/3)": Mixture([web, code, math], temperature=3),
        "web alone for 400 samples": Mixture([web, code], schedule={0: [1, 0], 400: [0.5, 0.5]}),
        "until each was seen": Mixture({web: 0.5, code: 0.5}, stop="all"),
        "nested": Mixture({web: 0.5, Mixture({code: 3, math: 1}): 0.5}),
    }
    # [end]
    for name, mixture in mixtures.items():
        with DataLoader(mixture, batch_size=10, shuffle=True) as loader:
            sources = [source for batch in loader for source in batch["source"]]
        counts = {source: sources.count(source) for source in ("web", "code", "math") if source in sources}
        print(f"{name:26}{counts}")
