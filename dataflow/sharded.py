"""What tells a loader that a dataset is read as shards.

In a module of its own: a loader over any other dataset imports neither `ShardedDataset` nor pyarrow and
pandas, which would cost it 0.3 s and 40 MB.
"""


class Sharded:
    """Base of datasets that have an order of their own: `ShardedDataset`, `Mixture`."""
