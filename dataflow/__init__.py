"""Feed PyTorch training from sharded data, at the speed of the hardware, exactly and without tuning."""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    # Shared memory, leases of files, signals, affinity, copies by the kernel: nowhere below is asked again.
    raise ImportError(f"dataflow runs on Linux only, and this is {sys.platform}")

if TYPE_CHECKING:
    from dataflow.actors.cluster import (
        BuilderActorError as BuilderActorError,
        RayClusterError as RayClusterError,
    )
    from dataflow.batch.packed import PackedRows as PackedRows
    from dataflow.conversion.folder import ConversionError as ConversionError
    from dataflow.conversion.run import Converted as Converted, convert as convert
    from dataflow.dataset import ShardedDataset
    from dataflow.decode.audio import Audio as Audio
    from dataflow.decode.image import Image, MissingImageSupportError as MissingImageSupportError
    from dataflow.decode.media import MissingMediaSupportError as MissingMediaSupportError
    from dataflow.decode.video import Video as Video
    from dataflow.explain.find import find as find
    from dataflow.explain.provenance import provenance as provenance
    from dataflow.explain.verify import verify as verify
    from dataflow.grad.agreement import DisagreementError as DisagreementError, RankLostError as RankLostError
    from dataflow.grad.schedule import GradSchedule
    from dataflow.limits import Cache
    from dataflow.loader import DataLoader
    from dataflow.mixture import Mixture
    from dataflow.outputs.optional import Optional as Optional
    from dataflow.outputs.ragged import Pad
    from dataflow.ragged import Ragged
    from dataflow.sources.manifests import Manifest as Manifest
    from dataflow.stats import LoaderStats as LoaderStats, WorkerStats as WorkerStats
    from dataflow.telemetry.serving.serve import serve_metrics as serve_metrics
    from dataflow.telemetry.timing.health import LoaderHealth as LoaderHealth
    from dataflow.telemetry.timing.phases import StepInfo as StepInfo
    from dataflow.text.chat import ChatTemplate as ChatTemplate
    from dataflow.text.pairs import PreferencePairs as PreferencePairs, split_pairs as split_pairs
    from dataflow.text.tokenize import Tokenize as Tokenize
    from dataflow.text.tokenizer import MissingTextSupportError as MissingTextSupportError
    from dataflow.vision.chat import VisionChat as VisionChat
    from dataflow.vision.processor import Processor as Processor
    from prefetch.errors import (
        MemoryLimitError as MemoryLimitError,
        SampleTooLargeError as SampleTooLargeError,
        StallError as StallError,
    )
    from prefetch.retries import RetryPolicy as RetryPolicy
    from sharding.errors import (
        CorruptShardError as CorruptShardError,
        DataflowError,
        OldCatalogError as OldCatalogError,
        SampleError as SampleError,
        ShardChangedError as ShardChangedError,
        ShardError as ShardError,
        ShardReadError as ShardReadError,
        ShardWriteError as ShardWriteError,
    )
    from sharding.lengths.batching import Bucketed, Packed, TokenBudget
    from sharding.order.shuffle import Shuffle
    from sharding.topology.topology import Topology
    from sharding.write.writer import ShardWriter

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
    # Beside `__all__`: what one catches, what calls return, and what few give.
    "Audio": "dataflow.decode.audio",
    "BuilderActorError": "dataflow.actors.cluster",
    "ChatTemplate": "dataflow.text.chat",
    "ConversionError": "dataflow.conversion.folder",
    "Converted": "dataflow.conversion.run",
    "CorruptShardError": "sharding.errors",
    "DisagreementError": "dataflow.grad.agreement",
    "LoaderHealth": "dataflow.telemetry.timing.health",
    "LoaderStats": "dataflow.stats",
    "Manifest": "dataflow.sources.manifests",
    "MemoryLimitError": "prefetch.errors",
    "MissingImageSupportError": "dataflow.decode.image",
    "MissingMediaSupportError": "dataflow.decode.media",
    "MissingTextSupportError": "dataflow.text.tokenizer",
    "OldCatalogError": "sharding.errors",
    "Optional": "dataflow.outputs.optional",  # not `typing.Optional`, which a star import would hide
    "PackedRows": "dataflow.batch.packed",
    "PreferencePairs": "dataflow.text.pairs",
    "Processor": "dataflow.vision.processor",
    "RankLostError": "dataflow.grad.agreement",
    "RayClusterError": "dataflow.actors.cluster",
    "RetryPolicy": "prefetch.retries",
    "SampleError": "sharding.errors",
    "SampleTooLargeError": "prefetch.errors",
    "ShardChangedError": "sharding.errors",
    "ShardError": "sharding.errors",
    "ShardReadError": "sharding.errors",
    "ShardWriteError": "sharding.errors",
    "StallError": "prefetch.errors",
    "StepInfo": "dataflow.telemetry.timing.phases",
    "Tokenize": "dataflow.text.tokenize",
    "Video": "dataflow.decode.video",
    "VisionChat": "dataflow.vision.chat",
    "WorkerStats": "dataflow.stats",
    "convert": "dataflow.conversion.run",
    "find": "dataflow.explain.find",
    "provenance": "dataflow.explain.provenance",
    "verify": "dataflow.explain.verify",
    "serve_metrics": "dataflow.telemetry.serving.serve",
    "split_pairs": "dataflow.text.pairs",
    # `__all__`:
    "Bucketed": "sharding.lengths.batching",
    "Cache": "dataflow.limits",
    "DataLoader": "dataflow.loader",
    "DataflowError": "sharding.errors",
    "GradSchedule": "dataflow.grad.schedule",
    "Image": "dataflow.decode.image",
    "Mixture": "dataflow.mixture",
    "Packed": "sharding.lengths.batching",
    "Pad": "dataflow.outputs.ragged",
    "Ragged": "dataflow.ragged",
    "ShardWriter": "sharding.write.writer",
    "ShardedDataset": "dataflow.dataset",
    "Shuffle": "sharding.order.shuffle",
    "TokenBudget": "sharding.lengths.batching",
    "Topology": "sharding.topology.topology",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dataflow-loader")
    if name not in _MODULES:
        raise AttributeError(f"module 'dataflow' has no attribute {name!r}")
    # What is imported stays: to look through all that torch has made, twice, costs a fifth of a second.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        if name in ("ShardedDataset", "Mixture"):
            import_module("dataflow.stream.loader")  # a loader over them needs it: not at its first batch
    finally:
        if collects and not gc.get_freeze_count():
            gc.freeze()  # both together: all that was made is old, or the next object would have it looked at
            gc.unfreeze()
        if collects:
            gc.enable()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
