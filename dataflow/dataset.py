"""`ShardedDataset`: shards as a dataset, for streaming by `dataflow.DataLoader` and for random access.

It is also a map-style `torch.utils.data.Dataset` (`len`, `[i]`, `__getitems__`; `[i:j]` gives columns), so
torch's own DataLoader and every sampler accept it; random access reads the values of one sample where the
format tells where they lie (tar, tokens), and whole blocks, a few of which are kept, where it does not
(Parquet, Arrow, JSONL).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import TypeVar

from dataflow.batch.random_access import RandomAccess
from dataflow.batch.transforms import fingerprint_of, wants_rng
from dataflow.limits import Cache, told_of_memory
from dataflow.outputs.output import Output, columns_read, staged_outputs
from dataflow.outputs.resolve import resolve_outputs
from dataflow.shard_order import Sharded
from dataflow.sources.listing.claims import SourceArguments
from dataflow.sources.listing.places import Places
from dataflow.sources.missing import raise_missing
from dataflow.sources.opening import OpenOptions
from dataflow.staging.block_source import BlockSource, warn_of_wait
from dataflow.tables import ColumnTable, Row, listed_shortly
from prefetch.memory.guards import FileGuards
from prefetch.memory.mapping import Mappings
from prefetch.retries import RetryPolicy
from prefetch.store.reader import StoreReader
from prefetch.store.retrier import Hosts, Retrier
from sharding.blocks import DEFAULT_BLOCK_BYTES, ColumnSpec, Format
from sharding.cached_property import cached_property
from sharding.catalog.build import is_catalog
from sharding.catalog.schema import DatasetSchema
from sharding.catalog.table import BlockTable, Catalog
from sharding.errors import SampleError
from sharding.hub.names import is_pinned, options_elsewhere, parse_name
from sharding.order.balanced import Balance, BalancedOrder
from sharding.order.permutations import mix_key
from sharding.order.selection import SelectedOrder, Selection
from sharding.order.shuffle import Shuffle
from sharding.printable import listed, printable
from sharding.urls import is_local, local_path

if TYPE_CHECKING:
    from dataflow.joins.join import Join as Join
    from dataflow.sources.manifests import Manifest
    from prefetch.control.pause import ReadPause
    from sharding.mixture.shares import Weight
    from sharding.plan.split import By


WITHOUT = "dataflow.explain.find:without"
_COLUMNS_SHOWN = 20
"""Columns that the table of a notebook has a row for."""

OnError = str | Callable[[SampleError], bool]


S = TypeVar("S", default=dict[str, Any])
"""A sample: what `transform` returns, or else a dict of columns."""


class ShownSchema(ColumnTable, DatasetSchema):
    """A schema that is shown as a table."""


class ShardedDataset(Sharded, Dataset[S]):
    """Samples of sharded files, wherever they lie.

    Args:
        source: path, URL, directory, glob, brace pattern, list of those, or a saved catalog (`*.catalog`);
            `hf://datasets/org/name`: a dataset on the Hugging Face Hub; a Delta or Iceberg table.
        config: the config of a dataset on the Hub, or of a folder with the Hub's layout; of one of
            Megatron-Energon, the name of its dataset.yaml. None: the default.
        split: the split of such a dataset, or of a folder with a folder for each split. None: the only one.
        revision: branch, tag or commit on the Hub (None: "main"), version of a table. Opening fixes it.
        format: "auto" by file ending, or "tar", "parquet", "arrow", "arrow-stream", "jsonl", "tokens",
            "megatron", "files" (each is a sample), "delta", "iceberg", "energon"; "lerobot" (v3).
        columns: columns to deliver; a mapping renames them, and a list as its value stacks numeric
            columns: `{"features": ["f0", "f1"], "label": "y"}`; one of columns of bytes makes lists of what
            each sample has of them: `{"images": ["0.jpg", "1.jpg"]}`, or `"*.jpg"` for all that match.
            `{"image": "jpg|png"}` takes the first of these members. None: all but "__key__" and "__url__".
        decode: "auto", None for raw bytes, or a mapping of column to `Image(...)`, `Video(...)`,
            `Audio(...)`, `Pad(...)`, a function of bytes, or "int", "float", "text", "json", "npy", "image",
            "bytes", "pil", "pickle", "torch", or `Optional(...)` of one of these, where samples may lack it.
        transform: called with each sample (a dict); if it takes `rng=`, it gets a `numpy.random.Generator`
            that is a function of (seed, epoch, sample). A `batch` form, as of `Tokenize(...)`, gets many.
        batch_transform: called with each batch.
        storage_options: keyword arguments for the fsspec filesystem.
        retry: a `RetryPolicy`: when a store that fails is asked again, and when it is given up. None: 120 s
            after its last byte; 2 s where a host cannot be reached that never answered.
        cache: a `Cache`, which keeps blocks of remote shards on this machine; a `DataLoader` that streams
            the dataset uses it, random access does not. None: every epoch reads from the store.
        catalog: path of a saved catalog, or a `Catalog`. Without it, one is kept in the user's cache folder.
        dtype: type of a token in a raw token file, such as "uint16". None: as its header or a `.json` says.
        length: tokens of a sample, for the formats "tokens", "megatron" and "litdata".
        header: bytes before the tokens of a raw file. None: llm.c's header is known, and skipped; 0: none.
        allow_unfinished: read the whole samples of tar and Arrow files that end too early, with a warning.
        manifest: a table that names the files of a folder, the source: the path of a CSV, TSV, JSON Lines or
            Parquet file with a column "file_name", or a `Manifest`. None: `metadata.csv` or alike, if there.
        classes: the names of class folders, in the order of their numbers. None: sorted, of all splits.
        types: those of columns in names of folders, `day=5/`: `{"day": "int64"}`. None: int32 or text.
        block_bytes: bytes of a block, the unit of reads and shuffles. Parquet and Arrow have their own.
        on_error: for samples that cannot be decoded or transformed: "raise", "skip", or a function of the
            `SampleError` that says whether to skip. What is skipped is counted and listed in `stats()`.
        error_budget: samples that may be skipped before the error is raised all the same.
        progress: show a progress bar while indexing; None: on a terminal.

    Raises:
        ValueError: arguments that contradict each other, columns that do not exist.
        ShardReadError: shards that cannot be read.
        CorruptShardError: shards that break the rules of their format.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar", decode={"jpg": Image(size=224)})
        >>> len(dataset)
        8
        >>> dataset[0]["jpg"].shape
        torch.Size([3, 224, 224])
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        config: str | None = None,
        split: str | None = None,
        revision: str | int | None = None,
        format: str | Format = "auto",  # noqa: A002
        columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        decode: object = "auto",
        transform: Callable[..., S] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
        cache: Cache | None = None,
        catalog: str | os.PathLike[str] | Catalog | None = None,
        dtype: str | None = None,
        length: int | None = None,
        header: int | None = None,
        allow_unfinished: bool = False,
        manifest: str | os.PathLike[str] | Manifest | None = None,
        classes: Sequence[str] | None = None,
        types: Mapping[str, str] | None = None,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        on_error: OnError = "raise",
        error_budget: int = 1000,
        progress: bool | None = None,
    ) -> None:
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ValueError(f'on_error must be "raise", "skip" or a function, got {on_error!r}')
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, got {block_bytes}")
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f'cache must be a dataflow.Cache, such as Cache("/nvme/cache"), got {cache!r}')
        self.cache = cache
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ValueError(f"retry must be a dataflow.RetryPolicy, got {retry!r}")
        self.storage_options = dict(storage_options or {})
        self.retry, self._hosts = retry or RetryPolicy(), Hosts()
        asked = SourceArguments(
            format=format, catalog=catalog, config=config, split=split, revision=revision, manifest=manifest,
            classes=classes, types=types, columns=columns, decode=decode,
        )  # fmt: skip
        with Retrier(self.retry, self._hosts) as retrier:
            opening = OpenOptions(
                asked=asked, places=Places(self.storage_options, retrier), dtype=dtype, length=length,
                header=header, block_bytes=block_bytes, progress=progress, allow_unfinished=allow_unfinished,
            )  # fmt: skip
            listing, self.catalog = opening.find(source)
        location = source if catalog is None and is_catalog(source) else catalog
        path = str(location) if isinstance(location, (str, os.PathLike)) else ""
        self.catalog_path = local_path(path) if path and is_local(path) else None
        """The file where its catalog was saved, if the user said where, and on this machine."""
        self.transform, self.batch_transform = transform, batch_transform
        self.on_error, self.error_budget = on_error, error_budget
        self.codec = self.catalog.codec(None if isinstance(format, str) else format)
        self.decoding = decode if decode is None or decode == "auto" else "own"
        self._resolve: Callable[..., tuple[Output, ...]] | None = partial(
            resolve_outputs, columns=listing.columns, decode=listing.decode, codec=self.codec,
            cameras=listing.cameras,
        )  # fmt: skip
        self.outputs = self._resolve(self.catalog.schema, check=self.catalog.schema.check)
        self.catalog = self.catalog.reading(columns_read(self.outputs))
        self._all_columns = columns is None
        self.selection = Selection.whole(self.catalog.blocks.num_samples)
        """The samples this dataset consists of: all of the catalog's, or fewer in a view."""
        self.joins: tuple[Join, ...] = ()
        """The joins that were made to it, in this order."""
        self.balance: Balance | None = None
        """The times that samples come in an epoch, in a view that is `balanced`; None: once each."""
        self._is_joined = False
        """True if its samples are read beside those of another dataset, by whose numbers they draw."""
        self._num_splits = 0
        self.seed = self.epoch = 0
        if listing.selects is not None:
            self.selection = listing.selects(self.source())

    @property
    def schema(self) -> DatasetSchema:
        """Column name -> `ColumnSpec`, of all shards (not of `columns=`); `print` shows a table.

        `schema.conflicts` has the columns that shards have in types that do not go together.
        """
        return ShownSchema(**vars(self.catalog.schema))

    @property
    def features(self) -> dict[str, Any]:
        """The features of columns, as `datasets` of Hugging Face wrote them, or folders of classes have them.

        Delivered name -> description, as JSON has it: `dataset.features["label"]["names"]` names classes, and
        `datasets.Features.from_dict(dataset.features)` gives the package's own values. Of the first shard.
        """
        from dataflow.sources.views import features_by_name

        features = features_by_name(self._own_outputs, self.catalog, self.codec)
        for join in self.joins_used:
            brought = [output for output in self.outputs if output.name in join.names]
            features |= features_by_name(brought, join.other.catalog, join.other.codec)
        return features

    # ---- streaming ----------------------------------------------------------------------------------

    def source(
        self,
        keep_mapped_bytes: int = 0,
        guards: FileGuards | None = None,
        pause: ReadPause | None = None,
        *,
        is_awaited: bool = False,
    ) -> BlockSource:
        """Return what the loader reads with; a new reader each, so nothing is shared between loaders.

        `is_awaited`: whether the caller waits for each read, as for single samples: nothing is mapped, and
        what a long read waits for is said.
        """
        how = keep_mapped_bytes, guards, pause
        matches = [join.source(self.outputs, *how, is_awaited=is_awaited) for join in self.joins_used]
        return BlockSource(
            catalog=self.catalog,
            format=self.codec,
            reader=self.new_reader(pause, warn_of_wait if is_awaited else None),
            outputs=staged_outputs(self._own_outputs),
            mappings=Mappings(keep_mapped_bytes, guards),
            pause=pause,
            all_columns=self._all_columns,
            matches=matches,
            reads_whole=self._is_joined or bool(matches),
            may_map=not is_awaited,
        )

    @property
    def _own_outputs(self) -> list[Output]:
        """The outputs of its own columns."""
        joined = {name for join in self.joins for name in join.names}
        return [output for output in self.outputs if output.name not in joined]

    @property
    def joins_used(self) -> Sequence[Join]:
        """The joins that bring along a column that is delivered."""
        return [join for join in self.joins if any(output.name in join.names for output in self.outputs)]

    @cached_property
    def reads_values(self) -> bool:
        """Return whether single values can be read, and not whole blocks only."""
        source = self.source()
        with closing(source.reader):
            return source.locates(np.flatnonzero(self.selection.num_samples)[:1])

    @property
    def datasets_read(self) -> tuple[ShardedDataset[Any], ...]:
        """Itself, and what is joined to it."""
        return (self, *(join.other for join in self.joins_used))

    def options_elsewhere(self) -> dict[str, Any]:
        """The storage options for another machine: it asks the Hub that this one asks, with its token."""
        return options_elsewhere(self.catalog.urls, self.storage_options)

    def new_reader(
        self, pause: ReadPause | None = None, say: Callable[[str], None] | None = None
    ) -> StoreReader:
        """Return a reader of ranges of its shards; to be closed by the caller."""
        return StoreReader(self.storage_options, policy=self.retry, hosts=self._hosts, pause=pause, say=say)

    @property
    def sources(self) -> tuple[ShardedDataset[Any], ...]:
        """Itself, as a `Mixture` has its datasets."""
        return (self,)

    @property
    def kept_blocks(self) -> BlockTable:
        """The blocks, how many samples of each are in the view, and bytes, with those of their matches."""
        table, num_samples = self.catalog.blocks, self.selection.num_samples
        beside = np.zeros(len(num_samples), np.int64)
        for join in self.joins_used:
            other = join.other.catalog.blocks
            each = np.maximum(other.length, other.nbytes).sum() / max(1, other.num_samples.sum())
            beside += (num_samples * each).astype(np.int64)
        length, nbytes = table.length + beside, table.nbytes + beside
        return structs.replace(table, num_samples=num_samples, length=length, nbytes=nbytes)

    def num_samples(self, epoch: int) -> int:
        """Samples of an epoch: of any, the same."""
        return len(self)

    def windows(self, epoch: int, shuffle: Shuffle, *, seed: int) -> SelectedOrder:
        """The order of one epoch."""
        if self.balance is not None:
            return BalancedOrder(self.selection, self.balance, shuffle, seed=seed, epoch=epoch)
        return SelectedOrder(self.selection, shuffle, seed=seed, epoch=epoch)

    @property
    def transform_wants_rng(self) -> bool:
        """Return whether `transform` takes `rng=`."""
        return self.transform is not None and wants_rng(self.transform)

    def fingerprint(self) -> str:
        """Return the text that identifies shards and selection in a state: another one means other samples.

        The fingerprint of a transform that has one follows behind "~".
        """
        mark = self.catalog.fingerprint()
        if not self.selection.is_whole:
            mark += f"-{self.selection.digest}"
        if self.balance is not None:
            mark += f"*{self.balance.digest}"
        if self.joins:  # hashed: a state has room for so many characters, whatever was joined
            joined = " ".join(join.other.fingerprint() for join in self.joins)
            mark += f"+{hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()}"
        if transform := fingerprint_of(self.transform):
            mark += f"~{transform}"
        return mark

    @property
    def commit(self) -> str:
        """The commit that was opened of a dataset on the Hub, or the version of a table; "": it has none."""
        if is_pinned(first := self.catalog.shard(0).url):
            return str(parse_name(first).revision)
        is_table = self.catalog.format in ("delta", "iceberg")
        return str(self.catalog.options["version"]) if is_table else ""

    def check_missing(self) -> None:
        """Raise `SampleError` where a sample is known to lack a column that is not `Optional`.

        A `DataLoader` asks when it is made: a dataset may be opened, and such samples filtered out. Costs
        nothing where indexing found that none is missing; of a view, its blocks' indexes are looked at. What
        is joined is not: which of its samples are used, no index tells.
        """
        if self.on_error == "raise" and self.catalog.missing:
            raise_missing(self.catalog, self.codec, self.selection, self._own_outputs)

    # ---- views --------------------------------------------------------------------------------------

    def subset(self, indices: slice | Sequence[int] | Any) -> ShardedDataset[S]:
        """The samples at some indices: a slice, or ascending integers, or a bool for every sample.

        A view, like all that follow: it reads nothing, and shares catalog and settings with this dataset.
        Samples keep their order, so indices may neither fall nor repeat. Raises `ValueError` if they do.
        """
        from dataflow.sources.views import picked

        with told_of_memory(
            f"pick among {len(self):,} samples", "take a slice without a step, or fewer", [self.catalog]
        ):
            return self._view(picked(self.selection, indices))

    def take(self, n: int) -> ShardedDataset[S]:
        """The first n samples, or all if there are fewer."""
        return self.subset(slice(0, _not_negative(n)))

    def skip(self, n: int) -> ShardedDataset[S]:
        """All but the first n samples."""
        return self.subset(slice(_not_negative(n), None))

    def split(
        self, fractions: Mapping[str, float], *, by: By = "hash", seed: int = 0
    ) -> dict[str, ShardedDataset[S]]:
        """Parts of about these fractions, none of which shares a sample: `split({"train": .9, "val": .1})`.

        A sample's part depends on the seed, its shard's file name and its row in the shard: it stays when
        shards are added. `by="shard"` gives whole shards to a part. See `sharding.plan.split`.
        """
        from sharding.plan.split import split_selection

        # A part that is split again draws anew, or its parts would be skewed.
        drawn = mix_key(seed, self._num_splits) if self._num_splits else seed
        with told_of_memory(f"split {len(self):,} samples", 'split whole shards: by="shard"', [self.catalog]):
            parts = split_selection(self.selection, self.catalog, fractions, by=by, seed=drawn)
        views = {name: self._view(selection) for name, selection in parts.items()}
        for view in views.values():
            view._num_splits += 1
        return views

    def select(self, columns: Sequence[str]) -> ShardedDataset[S]:
        """Only these columns of what this dataset delivers, in this order. `ValueError` for unknown ones."""
        outputs = {output.name: output for output in self.outputs}
        unknown = [name for name in columns if name not in outputs]
        if unknown or not columns or isinstance(columns, str):
            raise ValueError(f"columns must be a list out of {listed(outputs)}; got {columns!r}")
        view = self._view(self.selection)
        view.outputs, view._all_columns = tuple(outputs[name] for name in columns), False
        return view

    def filter(self, expression: Any) -> ShardedDataset[S]:
        """The samples for which a pyarrow expression is true: `filter(pyarrow.compute.field("n") > 3)`.

        The columns are the stored ones, whether delivered or not. Row groups that Parquet statistics rule
        out are not touched; of what remains, the columns in question are read now, in parallel. Of MDS,
        LitData, TFRecord and ArrayRecord these are numbers, text and bytes, and whole blocks are read, unless
        values of a known place lie far apart. Of tar nothing is read: what can be asked is which members a
        sample has, and their sizes in bytes, as in `field("txt").is_valid() & (field("jpg", "size") > 1000)`.
        So it is of loose files; the values of `cls` and of a manifest's columns are known, too.
        Raises `ValueError` for other formats, and for a condition that does not fit the columns.
        """
        from dataflow.sources.views import matching

        return self._view(matching(self.source(), self.selection, expression))

    def without(self, samples: Any, *, on: str = "__key__") -> ShardedDataset[S]:
        """All samples but those of some keys, an expression or numbers, as `dataflow.find` takes them."""
        view: ShardedDataset[S] = resolve_name(WITHOUT)(self, samples, on)
        return view

    def balanced(
        self, by: str, weights: Mapping[Any, Weight] | Sequence[Weight] | None = None
    ) -> ShardedDataset[S]:
        """The samples with classes in equal shares of an epoch as long as before, or in those of `weights`.

        How often a sample comes is a function of seed and epoch: as often as any of its class, or once more,
        which over the epochs evens out. An epoch reads each block once. What is drawn at random for a sample
        (crops, `rng=`) is the same each time that it comes in one epoch. Labels are read now and kept in the
        user's cache folder. Other views come before this one, which has no samples by index.

        Args:
            by: a column of integers, text or bytes that is delivered.
            weights: label -> share of the samples, `{"cat": 2, "dog": 1}`, for every class, or one number a
                class in the order of labels; 0 leaves a class out. None: all alike.

        Raises `ValueError` for another column, and weights that do not fit, or by which a class never comes.
        """
        from dataflow.sources.views import balance_of

        view = self._view(self.selection)
        view.balance = balance_of(self, by, weights)
        return view

    def join(
        self,
        other: ShardedDataset[Any],
        *,
        on: str | tuple[str, str] = "__key__",
        suffix: str | None = None,
        amplification: float = 2.0,
    ) -> ShardedDataset[S]:
        """Its samples, each with the columns of the sample of `other` that has the same key.

        `captions = ShardedDataset("captions.parquet"); images.join(captions, on=("__key__", "id"))`

        A view in the order of this dataset, as long as its samples that have a match: the others are left
        out, with a warning that counts and names some, as `joins[-1].report` does. Reads the key columns of
        both, once, and nothing else; what is streamed later is the blocks of `other` that hold matches of a
        window's samples. Join to the dataset with more bytes a sample: its blocks are what a window counts.

        Args:
            other: each of its keys comes once. Its transforms must be None: that of this dataset gets the
                joined sample. Its `on_error` does not count.
            on: the key column, or that of this dataset and that of `other`: "__key__" of a tar, or a stored
                column of text, bytes or integers, delivered or not. Missing keys match nothing.
            suffix: what is added to names that both deliver. A common key column is delivered once.
            amplification: how often each byte of `other` may be read in an epoch, on average; beyond that
                the join is refused, or the loader whose shuffle it does not go with.

        Raises `ValueError` for names that both deliver, keys that repeat in `other`, keys of unlike types, no
        key in common, and an order of `other` that takes more reads than `amplification` allows.
        """
        from dataflow.joins.join import Join, match_datasets

        if not isinstance(other, ShardedDataset):
            raise TypeError(f"a ShardedDataset is joined to another one, got {type(other).__name__}")
        outputs, match = match_datasets(self, other, on, suffix=suffix, amplification=amplification)
        brought = other._view(other.selection)
        brought.outputs, brought._all_columns, brought._is_joined = outputs, False, True
        view = self._view(match.selection)
        join = Join(other=brought, matches=match.matches, amplification=amplification, report=match.report)
        view.joins, view.outputs = (*self.joins, join), (*self.outputs, *outputs)
        return view

    def stored_specs(self, output: Output) -> dict[str, ColumnSpec]:
        """The stored columns that a column is made of; none where these are joined, or keep their types."""
        if not self.codec.widens or output not in self._own_outputs:
            return {}
        return {name: self.schema.stored(name) for name in output.sources if name in self.schema}

    def delivering(self, names: Sequence[str], types: Mapping[str, ColumnSpec]) -> ShardedDataset[S]:
        """Columns in this order, which are made of stored ones in wider types."""
        if not types and names == [output.name for output in self.outputs]:
            return self
        view = self._view(self.selection)
        outputs = {output.name: output for output in self.outputs}
        if types and self._resolve is not None:
            view.catalog = self.catalog.reading(self.catalog.columns, {**self.catalog.types, **types})
            local_names = {output.name for output in self._own_outputs}
            resolved = self._resolve(view.catalog.schema)
            outputs |= {output.name: output for output in resolved if output.name in local_names}
        view.outputs = tuple(outputs[name] for name in names)
        return view

    def _view(self, selection: Selection) -> ShardedDataset[S]:
        if self.balance is not None and selection is not self.selection:
            raise ValueError("a balanced dataset has no other samples: choose or join them, then balanced()")
        view = object.__new__(type(self))
        view.__dict__.update(self.__getstate__())
        view.selection, view._resolve = selection, self._resolve
        return view

    # ---- random access ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.selection)

    @overload
    def __getitem__(self, index: SupportsIndex) -> S: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[np.integer] | Tensor) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """One sample: a dict of its columns, transformed. Negative indices count from the end.

        A slice or a list of integers gives the samples' columns, as a batch has them: made of transformed
        samples where there is a `transform`, before `batch_transform`. `subset` gives a view.
        """
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if np.ndim(index):
            return self._access.columns(self, index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[S]:
        """Several samples at once; torch's DataLoader calls it with a batch of indices."""
        return self._access.samples(self, indices)

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes get: all but what is open, and how outputs were made."""
        return {name: value for name, value in self.__dict__.items() if name != "_access"} | {
            "_resolve": None
        }

    @cached_property
    def _access(self) -> RandomAccess:
        return RandomAccess()

    def _shown(self) -> Iterator[Row]:
        of = "" if self.selection.is_whole else f" of {self.catalog.num_samples:,}"
        yield "samples", f"{len(self):,}{of}"
        yield "shards", f"{self.catalog.num_shards:,}"
        yield "format", self.catalog.format
        for output in self.outputs[:_COLUMNS_SHOWN]:
            yield f"column {printable(output.name)}", output.description()
        yield "classes", "balanced" if self.balance else ""
        yield "joined to", "; ".join(f"{join.other!r}" for join in self.joins)

    def _line(self) -> Iterator[str]:
        (_, samples), (_, shards) = islice(self._shown(), 2)
        num, _, of = samples.partition(" ")
        columns = listed_shortly(output.name for output in self.outputs)
        yield f"{num} samples {of}{' ' if of else ''}in {shards} shards"
        yield f"{self.catalog.format}, columns {columns}{', classes balanced' if self.balance else ''}"
        yield from (f"joined to {join.other!r}" for join in self.joins)


def _not_negative(n: int) -> int:
    if n < 0:
        raise ValueError(f"a number of samples must be >= 0, got {n}")
    return n
