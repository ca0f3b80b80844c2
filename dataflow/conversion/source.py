"""The source of a conversion: its samples, the shards they are cut into, and what the first of them show."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.conversion.folder import OutputFolder
from dataflow.conversion.identity import described
from dataflow.conversion.plan import Plan, bounds_by_bytes
from dataflow.conversion.rows import KEY, DeliveredRows, GivenRows, Rows, StoredRows
from dataflow.conversion.target import TOKENS, Target, targets_of, with_schema
from dataflow.conversion.values import with_types
from dataflow.conversion.work import (
    ROW_GROUP_BYTES,
    WINDOW_BLOCKS,
    ProducedSamples,
    TaskSpec,
    fitted_rows,
)
from dataflow.dataset import ShardedDataset
from dataflow.limits import parse_bytes
from sharding.errors import DataflowError
from sharding.formats.arrow.columns import TabularFormat
from sharding.formats.arrow.schema import leaves
from sharding.printable import listed
from sharding.write.values import check_row, plain_value

DEFAULT_SHARD_BYTES = 128 << 20
DEFAULT_SHARD_SAMPLES = 10_000
_PROBED = 64
"""Samples whose types decide those of all."""
_LOOKED_AT = 4096
"""Samples that are read, at most, to find so many."""
_UNVIEWED = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Types in place of those that pyarrow writes to no Parquet file."""


def opened_source(
    inputs: Any,
    columns: Any,
    filter: Any,  # noqa: A002
    options: Mapping[str, Any],
    progress: bool | None,
) -> Any:
    """The dataset of a source; of one that is no source of shards, itself."""
    items = inputs if isinstance(inputs, (list, tuple)) and inputs else [inputs]
    if all(isinstance(item, (str, os.PathLike)) for item in items):
        inputs = ShardedDataset(inputs, columns=columns, storage_options=options, progress=progress)
    elif columns is not None:
        if not isinstance(inputs, ShardedDataset) or isinstance(columns, Mapping):
            raise ValueError(
                "columns= picks or renames columns of a source by name; give the dataset with them"
            )
        inputs = inputs.select(columns)
    if isinstance(filter, pc.Expression):
        if not isinstance(inputs, ShardedDataset):
            raise ValueError("a pyarrow expression filters shards; give a function of a sample")
        inputs = inputs.filter(filter)
    return inputs


def tokenizing(
    tokenizer: str | os.PathLike[str], column: str, to: str, dtype: str | None, end_token: int | str | None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The map that tokenizes, and what token shards are told of it."""
    from dataflow.text.tokenize import Tokenize

    transform = Tokenize(tokenizer, column=column, into="tokens")
    ends = transform.file.token_ids("end_token", end_token)
    size = transform.file.tokenizer.get_vocab_size()
    chosen = dtype or ("uint16" if size <= 1 << 16 else "uint32" if to == "tokens" else "int32")
    options = {"dtype": chosen, "tokenizer": transform.file.hash, "end_token": ends[0] if ends else None}
    return transform, options


def are_stored(dataset: ShardedDataset[Any]) -> bool:
    """Return whether a dataset delivers its stored columns, decoded as their kind says."""
    return (
        dataset.transform is None
        and not dataset.joins
        and dataset.decoding != "own"
        and all(len(output.sources) == 1 and output.sources[0] != "__url__" for output in dataset.outputs)
    )


class ConvertSource:
    """The samples to be converted, and what is done to them."""

    def __init__(
        self,
        inputs: Any,
        *,
        to: str,
        map: Any,  # noqa: A002
        batch_size: int | None,
        filter: Any,  # noqa: A002
        shuffle: int | None,
        schema: Any,
        token_options: Mapping[str, Any],
    ) -> None:
        self.source, self.to, self.map, self.filter, self.shuffle = inputs, to, map, filter, shuffle
        self._schema, self._batch_size, self._token_options = schema, batch_size, token_options
        self.rows: Rows
        self._has_whole_blocks = False
        """True if each shard has whole blocks of the source, which can be copied, as `plan` finds."""
        self._are_members = False
        """True if values are members of tars that go to tars as they are."""
        self._iterated: Iterator[Any] | None = None
        self._datasets: list[ShardedDataset[Any]] = []
        self._failed: Exception | None = None
        if isinstance(inputs, ShardedDataset):
            if not len(inputs):
                raise ValueError("there are no samples to convert")
            if inputs.balance is not None:
                raise ValueError(
                    "a balanced dataset has other samples each epoch: convert what it was made of"
                )
            raw = to == "tar" and map is None and filter is None and inputs.codec.columns_are_extensions
            self.rows = StoredRows(inputs, raw=raw) if are_stored(inputs) else DeliveredRows(inputs)
            self._are_members = raw and isinstance(self.rows, StoredRows)
            is_column = any(output.name == KEY for output in inputs.outputs)
            if is_column and to in ("mds", "parquet") and self.way == "samples":
                cure = f"columns={{'key': {KEY!r}, ...}} gives it a name of its own, or leave it out"
                raise ValueError(
                    f"the column {KEY!r} is the key of samples, which to={to!r} does not keep: {cure}"
                )
        elif hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):
            self.rows = DeliveredRows(inputs)
        elif not isinstance(inputs, Iterable):
            raise TypeError(
                f"a source is a path, a ShardedDataset, a dataset or an iterable, got {type(inputs)!r}"
            )
        elif shuffle is not None:
            raise ValueError(
                "an iterable has no order to shuffle: write it first, and shuffle what was written"
            )
        else:
            self.rows = GivenRows([])  # its first samples, once they are looked at

    def files(self) -> Iterator[str]:
        """Yield the URLs of all shards that are read, also by functions, once `identities` found them."""
        return chain.from_iterable(dataset.catalog.locations for dataset in self._datasets)

    @property
    def way(self) -> str:
        """Return how samples go from the source to the shards; see `TaskSpec.way`."""
        rows = self.rows
        if (
            not isinstance(rows, StoredRows)
            or self.map is not None
            or not rows.all_columns
            or any(name != source for name, source in rows.columns.items())
        ):
            return "samples"
        codec, catalog = rows.codec, rows.catalog
        if (
            self.to == "parquet"
            and isinstance(codec, TabularFormat)
            and "jsonl" not in (codec.name, codec.of)
        ):
            return "tables" if self._schema is None else "samples"
        is_whole = (self.filter, self.shuffle) == (None, None) and rows.selection.is_whole
        if self._has_whole_blocks and is_whole and self.to == "tar" == codec.name:
            first = np.unique(catalog.blocks.shard, return_index=True)[1]
            if all(codec.locate(catalog.block(number), []) is not None for number in first.tolist()):
                return "members"
        return "samples"

    def identities(self) -> tuple[str, dict[str, str], dict[str, str]]:
        """Return what tells source and functions from others; and what cannot be told apart, and why."""
        inputs = self.source
        values = {"map": self.map, "filter": self.filter}
        if isinstance(inputs, ShardedDataset):
            self._datasets.append(inputs)
            catalog = inputs.catalog
            named = f"{catalog.fingerprint()} {' '.join(output.name for output in inputs.outputs)}"
            facts: Any = catalog.rows.column("version").to_pylist(), inputs.selection.digest
            drawn = (inputs.seed, inputs.epoch) if inputs.transform_wants_rng else ()
            values |= {"transform": inputs.transform, "decode": inputs.outputs, "seed": drawn}
            values["join"] = tuple((join.other, join.matches) for join in inputs.joins)
        else:
            named, facts = f"{type(inputs).__module__}.{type(inputs).__qualname__}", inputs
            named += "" if isinstance(self.rows, GivenRows) else f" of {len(self.rows)}"
        identities, unknown = described({"source": facts, **values}, self._known)
        return f"{named} {identities.pop('source').rpartition(' ')[2]}", identities, unknown

    def _known(self, value: Any) -> Any:
        """Return what a dataset counts by."""
        if not isinstance(value, ShardedDataset):
            return None
        self._datasets.append(value)
        return (
            (value.catalog.fingerprint(), value.catalog.rows.column("version").to_pylist()),
            (value.selection.digest, value.outputs, value.decoding),
            (value.transform, [(join.other, join.matches) for join in value.joins]),
            (value.seed, value.epoch, value.on_error),
        )

    def plan(
        self, shard_size: int | str | None, shard_samples: int | None, checksum: bool, identity: str | None
    ) -> Plan:
        """The plan without what the first samples show."""
        bounds: list[int] | None = None
        if shard_size is not None and not isinstance(self.source, ShardedDataset):
            raise ValueError("shard_size counts bytes of shards; of other sources, give shard_samples")
        if isinstance(self.source, ShardedDataset) and shard_samples is None:
            size = parse_bytes(shard_size) if isinstance(shard_size, str) else shard_size
            bounds = self._by_bytes(DEFAULT_SHARD_BYTES if size is None else size)
        elif not isinstance(self.rows, GivenRows):
            total = len(self.rows)
            bounds = [*range(0, total, shard_samples or DEFAULT_SHARD_SAMPLES), total]
        else:
            shard_samples = shard_samples or DEFAULT_SHARD_SAMPLES
        if bounds is not None and isinstance(self.rows, StoredRows):
            is_first = np.isin(bounds[:-1], self.rows.catalog.blocks.first_sample)
            self._has_whole_blocks = bool(is_first.all())
        input_name, functions, unknown = self.identities()
        options = {
            "to": self.to,
            "shard_size": shard_size,
            "shard_samples": shard_samples,
            "shuffle": self.shuffle,
            "window_blocks": WINDOW_BLOCKS if isinstance(self.rows, StoredRows) else None,
            "checksum": checksum,
            "way": self.way,
            "schema": None if self._schema is None else str(self._schema),
            "batch_size": self._batch_size,
            **self._token_options,
        }
        return Plan(
            source=input_name, functions=functions, unknown=unknown, identity=identity,
            options=options, bounds=bounds, target=Target(to=self.to, columns={}),
        )  # fmt: skip

    def _by_bytes(self, size: int) -> list[int]:
        if size < 1:
            raise ValueError(f"shard_size must be at least a byte, got {size}")
        num_samples, blocks = self.source.selection.num_samples, self.source.catalog.blocks
        share = num_samples / np.maximum(1, blocks.num_samples)
        return bounds_by_bytes(num_samples, np.ceil(blocks.length * share).astype(np.int64), size)

    def target(self) -> Target:
        """The target, as the first samples decide it."""
        if self.way == "tables":
            assert isinstance(self.rows, StoredRows)
            target = with_schema(Target(to=self.to, columns={}), self._unified())
            return replace(target, row_group_size=1 << 20)
        if self._are_members:
            return Target(to=self.to, columns={}, is_strict=False, are_members=True)
        rows = self.rows
        if self.to not in TOKENS and self.map is self._schema is None and isinstance(rows, StoredRows):
            stored = chain.from_iterable(map(leaves, self._stored_schemas))
            times = {name for name, field in stored if pa.types.is_temporal(field.type)}
            if names := [repr(name) for name, source in rows.columns.items() if source in times]:
                what = f"times in {listed(names)} become integers, as they are delivered"
                warnings.warn(f"{what}: in Parquet, without columns=, they keep their types", stacklevel=2)
        samples, nbytes = self._first_samples()
        row_group = max(1, min(1 << 14, ROW_GROUP_BYTES // max(1, nbytes)))
        # Of stored samples, a column may lack; what a function returns is the same each time.
        return targets_of(
            self.to,
            samples,
            is_strict=self.map is not None and self.to not in TOKENS,
            schema=self._schema,
            row_group_size=row_group,
            **self._token_options,
        )

    @property
    def _stored_schemas(self) -> list[pa.Schema]:
        """The schemas that shards of tables have; of others none."""
        if not isinstance(self.rows, StoredRows) or not isinstance(self.rows.codec, TabularFormat):
            return []
        catalog = self.rows.catalog
        used = np.flatnonzero(catalog.blocks.num_samples)
        firsts = used[np.unique(catalog.shard_schemas[catalog.blocks.shard[used]], return_index=True)[1]]
        stored = (self.rows.codec.schema(bytes(catalog.block(n).footer)) for n in sorted(firsts.tolist()))
        return [with_types(schema, lambda kind: _UNVIEWED.get(kind, kind)) for schema in stored]

    def _unified(self) -> pa.Schema:
        try:
            return pa.unify_schemas(self._stored_schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(
                f"the source's shards have no types in common: {error}; name columns="
            ) from error

    def _first_samples(self) -> tuple[list[Any], int]:
        """The first samples as functions leave them, and the mean of their bytes."""
        probe = self._task(_Probe(to=self.to, columns={}), OutputFolder("."))
        if isinstance(self.rows, GivenRows):
            self._look(self.rows.samples)
        samples = _some_of(fitted_rows(probe, np.arange(min(len(self.rows), _LOOKED_AT), dtype=np.int64)))
        if not samples:
            raise ValueError(f"no sample is left of the first {_LOOKED_AT:,}: see filter= and map=")
        sizes = [sum(_size_of(value) for value in sample.values()) for sample in samples]
        return samples, sum(sizes) // len(sizes)

    def _look(self, seen: list[Any]) -> None:
        """Take the first items of an iterable; an error of it is for whoever comes to its item."""
        self._iterated = iter(self.source)
        try:
            seen.extend(islice(self._iterated, _PROBED))  # those before an error stay
        except Exception as error:
            self._failed = error

    def items(self) -> Iterator[Any]:
        """The items of an iterable, those that were looked at included."""
        yield from self.rows.samples if isinstance(self.rows, GivenRows) else ()
        if self._failed is not None:
            raise self._failed
        yield from iter(self.source) if self._iterated is None else self._iterated

    def task(self, plan: Plan, folder: OutputFolder) -> TaskSpec:
        """Return what workers are told."""
        chosen = {name: plan.options[name] for name in ("checksum", "way")}
        return self._task(plan.target, folder, digest=plan.digest(), bounds=plan.bounds or (), **chosen)

    def _task(self, target: Target, folder: OutputFolder, **of_plan: Any) -> TaskSpec:
        return TaskSpec(
            rows=self.rows,
            map=self.map,
            filter=self.filter,
            target=target,
            folder=folder,
            seed=self.shuffle,
            batch_size=self._batch_size,
            **of_plan,
        )


def _some_of(rows: Iterator[ProducedSamples]) -> list[dict[str, Any]]:
    """The first samples, up to one that fails: whoever writes its shard will tell."""
    samples: list[dict[str, Any]] = []
    try:
        for part in rows:
            samples.extend(part.samples)
            if len(samples) >= _PROBED:
                break
    except DataflowError:
        if not samples:
            raise
    return samples[:_PROBED]


class _Probe(Target):
    """Leaves samples as they are."""

    def fitted(self, sample: Any, key: Any) -> dict[str, Any]:
        """Return the sample."""
        if not isinstance(sample, Mapping):
            return super().fitted(sample, key)
        check_row(sample)
        return {name: plain_value(value) for name, value in sample.items()}


def _size_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, (bytes, str)) else 8 * (len(value) if type(value) is list else 1)
