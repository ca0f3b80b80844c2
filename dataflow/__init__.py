"""Feed PyTorch training from sharded data, at the speed of the hardware, exactly and without tuning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataflow.cache import Cache
    from dataflow.dataset import ShardedDataset
    from dataflow.decode import Pad
    from dataflow.grad.schedule import GradSchedule
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
    "GradSchedule",
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

# Imported when first used: the fork server of worker processes needs none of them, nor what they import.
_MODULES = {
    "Bucketed": "sharding.batching",
    "Cache": "dataflow.cache",
    "DataLoader": "dataflow.loader",
    "DataflowError": "sharding.errors",
    "GradSchedule": "dataflow.grad.schedule",
    "Image": "dataflow.image",
    "Mixture": "dataflow.mixture",
    "Packed": "sharding.batching",
    "Pad": "dataflow.decode",
    "Ragged": "dataflow.ragged",
    "ShardWriter": "sharding.writer",
    "ShardedDataset": "dataflow.dataset",
    "Shuffle": "sharding.order",
    "TokenBudget": "sharding.batching",
    "Topology": "sharding.topology",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dataflow' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    if name in ("ShardedDataset", "Mixture"):
        import_module("dataflow.shard_order")  # a loader over them needs it: not at its first batch
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
