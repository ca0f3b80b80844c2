"""Feed PyTorch training from sharded data, at the speed of the hardware, exactly and without tuning."""

from dataflow.cache import Cache
from dataflow.dataset import ShardedDataset
from dataflow.decode import Pad
from dataflow.image import Image
from dataflow.loader import DataLoader
from dataflow.mixture import Mixture
from dataflow.ragged import Ragged
from sharding.batching import Bucketed, Packed, TokenBudget
from sharding.errors import DataflowError
from sharding.order import Shuffle
from sharding.topology import Topology
from sharding.writer import ShardWriter

__all__ = [
    "Bucketed",
    "Cache",
    "DataLoader",
    "DataflowError",
    "Image",
    "Mixture",
    "Packed",
    "Pad",
    "Ragged",
    "ShardWriter",
    "ShardedDataset",
    "Shuffle",
    "TokenBudget",
    "Topology",
]
