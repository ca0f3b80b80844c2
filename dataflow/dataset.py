"""`ShardedDataset`: shards as a dataset, for streaming by `dataflow.DataLoader` and for random access.

It is also a map-style `torch.utils.data.Dataset` (`len`, `[i]`, `__getitems__`), so torch's own DataLoader
and every sampler accept it; random access reads the values of one sample where the format tells where they
lie (tar, tokens), and whole blocks, a few of which are kept, where it does not (Parquet, Arrow, JSONL).
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dataflow.batches import ColumnBuilder, Randomness, Run, samples_of
from dataflow.decode import Output, resolve_outputs
from dataflow.staging import Source, StagedWindow
from dataflow.stream import sample_rng
from prefetch.arena import Arena
from prefetch.mapping import Mappings
from prefetch.store import StoreReader
from sharding.blocks import DEFAULT_BLOCK_BYTES, Format
from sharding.catalog import (
    Catalog,
    build_catalog,
    changes,
    changes_text,
    default_catalog_path,
    find_catalog,
    is_catalog,
    options_of,
)
from sharding.errors import SampleError, ShardChangedError
from sharding.formats import resolve_format
from sharding.source import expand
from sharding.storage import open_url
from sharding.urls import is_local

_INDEX_THREADS = 16
_KEPT_BLOCKS = 4

OnError = str | Callable[[SampleError], bool]


class ShardedDataset(Dataset[Any]):
    """Samples of sharded files, wherever they lie.

    Args:
        source: path, URL, directory, glob, brace pattern, list of those, or a saved catalog (`*.catalog`).
        format: "auto" by file ending, or "tar", "parquet", "arrow", "arrow-stream", "jsonl", "tokens",
            "megatron".
        columns: columns to deliver; a mapping renames them, and a list as its value stacks numeric
            columns: `{"features": ["f0", "f1"], "label": "y"}`. None: all, without "__key__" and "__url__".
        decode: "auto", None for raw bytes, or a mapping of column to `Image(...)`, `Pad(...)`, a function
            of bytes, or "int", "float", "text", "json", "npy", "image", "bytes", "pickle", "torch".
        transform: called with each sample (a dict); if it takes `rng=`, it gets a `numpy.random.Generator`
            that is a function of (seed, epoch, sample).
        batch_transform: called with each batch.
        storage_options: keyword arguments for the fsspec filesystem.
        catalog: path of a saved catalog, or a `Catalog`. Without it, one is kept in the user's cache folder.
        dtype, length: type of a token, and tokens of a sample, for format "tokens" (and "megatron").
        on_error: for samples that cannot be decoded or transformed: "raise", "skip", or a function of the
            `SampleError` that says whether to skip. What is skipped is counted and listed in `stats()`.
        error_budget: samples that may be skipped before the error is raised all the same.
        progress: show a progress bar while indexing; None: on a terminal.

    Raises:
        ValueError: arguments that contradict each other, columns that do not exist.
        ShardReadError, CorruptShardError: shards that cannot be indexed.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: str | Format = "auto",  # noqa: A002
        columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        decode: object = "auto",
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | os.PathLike[str] | Catalog | None = None,
        dtype: str | None = None,
        length: int | None = None,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        on_error: OnError = "raise",
        error_budget: int = 1000,
        progress: bool | None = None,
    ) -> None:
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ValueError(f'on_error must be "raise", "skip" or a function, got {on_error!r}')
        self.storage_options = dict(storage_options or {})
        self.catalog = self._find_catalog(source, format, catalog, dtype, length, block_bytes, progress)
        self.transform, self.batch_transform = transform, batch_transform
        self.on_error, self.error_budget = on_error, error_budget
        self._codec = self.catalog.codec() if isinstance(format, str) else format
        self.outputs: tuple[Output, ...] = resolve_outputs(
            self.catalog.schema, columns, decode, format_name=self.catalog.format
        )
        self._all_columns = columns is None
        self.seed = 0
        self.epoch = 0
        self._local = threading.local()
        self._lock = threading.Lock()  # guards _windows
        self._windows: OrderedDict[int, StagedWindow] = OrderedDict()

    # ---- catalog ------------------------------------------------------------------------------------

    def _find_catalog(
        self,
        source: Any,
        format_: str | Format,
        catalog: str | os.PathLike[str] | Catalog | None,
        dtype: str | None,
        length: int | None,
        block_bytes: int,
        progress: bool | None,
    ) -> Catalog:
        if isinstance(catalog, Catalog):
            return catalog
        if catalog is None and is_catalog(source):
            catalog = source
            return self._checked(Catalog.load(os.fspath(source), self.storage_options), rebuild=None)
        urls = expand(source, self.storage_options)
        codec = resolve_format(format_, urls, dtype=dtype, length=length, exists=self._exists)
        path = os.fspath(catalog) if catalog is not None else default_catalog_path(urls, codec, block_bytes)

        def build() -> Catalog:
            built = index(
                urls, codec, storage_options=self.storage_options, block_bytes=block_bytes, progress=progress
            )
            _save_quietly(built, path, required=catalog is not None, options=self.storage_options)
            return built

        if catalog is None:
            found = find_catalog(urls, codec, block_bytes)
        else:
            found = Catalog.load(path, self.storage_options) if self._exists(path) else None
        if found is None or (found.urls, found.format, found.options) != (
            urls,
            codec.name,
            options_of(codec),
        ):
            return build()
        return self._checked(found, rebuild=build)

    def _exists(self, url: str) -> bool:
        fs, path = open_url(url, self.storage_options)
        return bool(fs.exists(path))

    def _checked(self, found: Catalog, rebuild: Callable[[], Catalog] | None) -> Catalog:
        """The catalog if its shards are as indexed; says so if not, and indexes again where it may."""
        if all(map(is_local, found.urls)):
            changed = changes(found)
        else:
            with ThreadPoolExecutor(_INDEX_THREADS, thread_name_prefix="dataflow-index") as pool:
                changed = changes(found, self.storage_options, pool.map, fresh=False)
        if not changed:
            return found
        text = changes_text(changed, found.num_shards)
        if rebuild is None:
            raise ShardChangedError(changed[0].url, f"{text}; index the dataset again: dataflow index")
        warnings.warn(f"{text}; indexing again", stacklevel=4)
        return rebuild()

    @property
    def schema(self) -> Mapping[str, Any]:
        """Column name -> `ColumnSpec`, of the shards (not of `columns=`)."""
        return self.catalog.schema

    # ---- streaming ----------------------------------------------------------------------------------

    def source(self, keep_mapped_bytes: int = 0) -> Source:
        """What the loader reads with; a new reader each, so nothing is shared between loaders."""
        return Source(
            self.catalog,
            self._codec,
            StoreReader(self.storage_options),
            self.outputs,
            Mappings(keep_mapped_bytes),
            all_columns=self._all_columns,
        )

    @property
    def transform_wants_rng(self) -> bool:
        """Whether `transform` takes `rng=`."""
        if self.transform is None:
            return False
        try:
            return "rng" in inspect.signature(self.transform).parameters
        except (TypeError, ValueError):
            return False

    # ---- random access ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.catalog.num_samples

    def __getitem__(self, index: int) -> Any:
        """One sample: a dict of its columns, transformed. Negative indices count from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples at once; torch's DataLoader calls it with a batch of indices."""
        samples = np.asarray(indices, np.int64)
        total = len(self)
        if not len(samples):
            return []
        if ((samples < -total) | (samples >= total)).any():
            raise IndexError(f"sample index out of range: {indices} in a dataset of {total}")
        samples = np.where(samples < 0, samples + total, samples)
        builder, values = self._gather(samples)
        if builder.bad:
            raise builder.bad[min(builder.bad)]
        return [self._apply(value, int(n)) for value, n in zip(values, samples, strict=True)]

    def _apply(self, sample: dict[str, Any], number: int) -> Any:
        if self.transform is None:
            return sample
        if self.transform_wants_rng:
            return self.transform(sample, rng=sample_rng(self.seed, self.epoch, number))
        return self.transform(sample)

    def _gather(self, samples: Any) -> tuple[ColumnBuilder, list[dict[str, Any]]]:
        """Stage the blocks of the samples in this thread, and build their columns as a batch would."""
        table = self.catalog.blocks
        blocks = np.searchsorted(table.first_sample, samples, side="right") - 1
        rows = samples - table.first_sample[blocks]
        arena = self._arena()
        runs = []
        for at, (block, row) in enumerate(zip(blocks.tolist(), rows.tolist(), strict=True)):
            window, first = self._window(arena, block, row)
            runs.append(Run(window, np.array([first], np.int64), slice(at, at + 1)))
        builder = ColumnBuilder(arena, runs, len(runs), Randomness(self.seed, self.epoch), None)
        built = [builder.build(output) for output in self.outputs]
        for column in built:
            for part in column.parts:
                part()
        batch = {o.name: b.split([len(runs)])[0] for o, b in zip(self.outputs, built, strict=True)}
        return builder, samples_of(batch, self.outputs, len(runs))

    def _window(self, arena: Arena, block: int, row: int) -> tuple[StagedWindow, int]:
        """A staged window that holds one row of a block, and the row in it."""
        source = self._source()
        if source.format.locate(self.catalog.block(block), source.columns) is not None:
            rows = np.zeros(1, np.int64)
            window = StagedWindow(source, arena, [self.catalog.block(block)], rows, sparse=[np.array([row])])
            _stage(window)
            return window, 0
        with self._lock:
            kept = self._windows.get(block)
            if kept is not None:
                self._windows.move_to_end(block)
                return kept, row
        window = StagedWindow(source, arena, [self.catalog.block(block)], np.zeros(0, np.int64))
        _stage(window)
        with self._lock:
            self._windows[block] = window
            while len(self._windows) > _KEPT_BLOCKS:
                self._windows.popitem(last=False)
        return window, row

    def _source(self) -> Source:
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid, self._local.source = os.getpid(), self.source()
        source: Source = self._local.source
        return source

    def _arena(self) -> Arena:
        if getattr(self._local, "arena_pid", None) != os.getpid():
            self._local.arena_pid, self._local.arena = os.getpid(), Arena(limit_bytes=64 << 20)
        arena: Arena = self._local.arena
        return arena

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: everything but threads' own readers and the kept blocks."""
        state = self.__dict__.copy()
        for name in ("_local", "_lock", "_windows"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local, self._lock, self._windows = threading.local(), threading.Lock(), OrderedDict()

    def __repr__(self) -> str:
        return (
            f"ShardedDataset({len(self):,} samples in {self.catalog.num_shards:,} shards, "
            f"{self.catalog.format}, columns {', '.join(o.name for o in self.outputs)})"
        )


def index(
    urls: Sequence[str],
    codec: Format,
    *,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    progress: bool | None = None,
) -> Catalog:
    """Build a catalog in parallel, with a progress bar (None: on a terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    hidden = not (console.is_terminal if progress is None else progress)
    look = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with (
        Progress(*look, TimeRemainingColumn(), console=console, disable=hidden, transient=True) as bar,
        ThreadPoolExecutor(_INDEX_THREADS, thread_name_prefix="dataflow-index") as pool,
    ):
        task = bar.add_task("", total=len(urls))

        def show(done: int, total: int, samples: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{samples:,} samples")

        return build_catalog(
            urls,
            codec,
            storage_options=storage_options,
            block_bytes=block_bytes,
            map=pool.map,
            progress=show,
        )


def _stage(window: StagedWindow) -> None:
    for read in window.reads():
        read()


def _save_quietly(catalog: Catalog, path: str, *, required: bool, options: Mapping[str, Any]) -> None:
    """Keep a catalog; a cache folder that cannot be written costs only the next start's indexing."""
    try:
        if is_local(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        catalog.save(path, options)
    except Exception:
        if required:
            raise
