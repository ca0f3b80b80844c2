"""The base of outputs: a column from stored bytes to the value in a batch, one class for each kind of value.

A column arrives per block, as an array or as spans (`sharding.blocks`). It is *staged*: copied into one array
of the window, or left where it was read, of which only addresses are kept. For each chunk the output then
*builds* the column: it says what has to be copied from where into which slot, as a part of the chunk's plan
(`prefetch.core.copy_table`), what has to be decoded, and how the slot is split into batches. A new kind of
value is one more class in a file of its own, and a line in `dataflow.outputs.resolve`. Outputs are values,
shared by all windows and threads.
"""

from __future__ import annotations

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from msgspec import Struct, structs
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.values import LACKING
from dataflow.outputs.columns import ChunkColumns, ChunkRows
from dataflow.ragged import Ragged
from dataflow.staging.columns import StagedOutput
from prefetch.core.copy_table import PlanColumn
from prefetch.core.kernels import kernels
from sharding.blocks import ALTERNATIVE
from sharding.spans import Bytes, Ints

Task = Callable[[], None]


Views = Callable[[Bytes, int, Sequence[int]], Iterable[Any]]
"""Memory that rows of a column were copied to, the first of these rows, batch sizes -> one value a batch."""


class BuiltColumn(Struct, kw_only=True):
    """The work that is left for one output column of a chunk."""

    split: Callable[[Sequence[int]], Iterable[Any]] | None = None
    """Batch sizes -> one value a batch; of Python objects each is made when asked for. None: see `views`."""
    copies: PlanColumn | None = None
    """Copies of values from where they were read to where nobody has said yet."""
    views: Views | None = None
    """Turns what was copied into values."""
    decodes: Sequence[Task] = ()
    """Decoding into a slot: parts that may run in parallel, after the copies."""
    each: Callable[[int], Any] | None = None
    """Row of the chunk -> its value, decoded when it is asked for and kept by nobody; of values without a
    fixed size, for who takes them one by one."""
    ahead: Callable[[int], int] | None = None
    """Size of the next batch -> bytes of slots that its value will take: to be asked before each value."""

    def whole(self, columns: ChunkColumns) -> Any:
        """Do everything, and give the value of one batch of all rows."""
        size = columns.rows.num_rows
        make_copies([self], columns)
        for task in self.decodes:
            task()
        if self.ahead is not None:
            self.ahead(size)
        assert self.split is not None
        return next(iter(self.split([size])))


def make_copies(built: Sequence[BuiltColumn], columns: ChunkColumns) -> None:
    """Make the copies of all rows, into a slot for each column.

    Raises `ShardReadError` for a value whose bytes are gone.
    """
    placed = []
    for column in built:
        if column.copies is not None:
            assert column.views is not None
            memory = columns.slot(column.copies.nbytes)
            placed.append(structs.replace(column.copies, out=memory))
            column.split = partial(column.views, memory, 0)
    if not placed:
        return
    status = kernels().run(columns.rows.num_rows, placed)
    if status.any():
        row = int(np.flatnonzero(status)[0])
        raise columns.rows.truncated(row, placed[int(status[row]) - 1].name)


class Default(Struct, frozen=True, eq=False):
    """The value that stands for a missing one."""

    value: Any
    """For tensors, an array of the stored type: a row, or the elements of a list. For objects, the object."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Default) and pickle.dumps(self.value) == pickle.dumps(other.value)

    def __hash__(self) -> int:
        return hash(pickle.dumps(self.value))


@dataclass(frozen=True, kw_only=True)
class Output(StagedOutput, ABC):
    """One column of the batches."""

    is_copied: ClassVar[bool] = False
    """True if values are views of copies of what was stored, and `build` gives `copies` and `views`."""
    is_decoded: ClassVar[bool] = False
    """True if values are decoded one by one when a batch is built, not copied as they were staged."""
    releases_gil: ClassVar[bool] = False
    """True if decoding runs without the lock of the interpreter, but for moments."""

    default: Default | None = None
    """The value in place of a missing one; None: a sample without one is a bad sample."""
    is_member: bool = field(default=False, compare=False)
    """True if its columns are members of samples; else "a.b" is a field b of a struct."""
    others: tuple[str, ...] = field(default=(), compare=False)
    """Members of the same kind, which a sample without its own may have in its place."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return what messages call it."""

    @property
    def is_view(self) -> bool:
        """True if a batch's value is a view of the chunk's slot, so that nothing is made batch by batch."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Return whether every row takes `row_bytes`."""
        return False

    @property
    def one_shape_cure(self) -> str:
        """The part of `decode=` that gives all values one shape, and what it does; "" where nothing does."""
        return ""

    @property
    def missing_cure(self) -> str:
        """Return what in `decode=` lets values be missing."""
        return "Optional(default=...)"

    @property
    def suffix(self) -> str:
        """Return what its name has behind that of the column which it tells about; "": it tells of itself."""
        return ""

    @property
    def function(self) -> Callable[[bytes], Any] | None:
        """The user's function that makes its values; None: there is none."""
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row; 0, or about, where rows differ."""
        return 0

    @property
    def list_length(self) -> int | None:
        """Elements of each row, where rows are lists of one length."""
        return self.shape[0] if self.is_fixed and len(self.shape) == 1 else None

    @property
    def staged(self) -> tuple[StagedOutput, ...]:
        """Return what windows hold of it."""
        return (self,)

    @property
    def required(self) -> tuple[str, ...]:
        """The sources that every sample must have."""
        return self.sources

    def as_array(self) -> Output:
        """The output of the same values that other formats give it."""
        return self

    def description(self) -> str:
        """Return what it delivers, for messages: kind, dtype, the one shape, and what else decides."""
        missing = "" if self.default is None else f" ({self.default.value!r} where missing)"
        shape = f" {list(self.shape)}" if self.is_fixed else ""
        return f"{self.kind} {self.dtype}{missing}{shape}"

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """The output of a column that samples may lack, as `Optional` says.

        Raises `ValueError` for a default that is none of its values, or where there must be one.
        """
        raise ValueError(f"column {self.name!r} is of kind {self.kind!r}, of which no value may be missing")

    def pads_beside(self, names: Collection[str]) -> Sequence[Output]:
        """The columns that tell which parts of its values are padding, where its rule asks for that.

        Raises `ValueError` if a column of the batch, `names`, has the name of one.
        """
        return ()

    def _without_default(self, default: Any, missing: str) -> Self:
        """`optional` of an output that has one value alone for what is missing; `missing`: that, in words."""
        if default is not None:
            raise ValueError(f"column {self.name!r}: a missing value is {missing}: leave default= out")
        return replace(self, default=Default(None))

    @property
    def default_array(self) -> NDArray[Any] | None:
        """The array that stands for a missing value of a tensor; None where there is none."""
        return None if self.default is None else self.default.value

    @property
    def lacking(self) -> str | None:
        """Why a sample without a value is bad, and what to do; None: it is not."""
        return f"{LACKING}; {self.cure}" if self.default is None else None

    @property
    def cure(self) -> str:
        """Return what to do about samples that lack it."""
        if self.is_member:
            each = [source.split(ALTERNATIVE) for source in self.sources]
            terms = [" | ".join(f"field({name!r}).is_valid()" for name in names) for names in each]
            is_there = " & ".join(f"({t})" if " | " in t and len(terms) > 1 else t for t in terms)
        else:
            paths = (source.split(".") for source in self.sources)
            is_there = " & ".join(f"field({', '.join(map(repr, path))}).is_valid()" for path in paths)
        offer = ""
        if self.others:
            name = "image" if self.name in self.sources else self.name
            offer = f'columns={{"{name}": "{"|".join([*self.sources, *self.others])}"}} takes the first of '
            offer += "these members that a sample has, "
        return (
            f"{offer}decode={{{self.name!r}: {self.missing_cure}}} puts something in its place, "
            f"dataset.filter({is_there}) leaves such samples out"
        )

    @abstractmethod
    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of the slot that `build` takes; known once the windows are staged."""

    @abstractmethod
    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Take the slot, and say what has to be done to fill it."""

    def row_sizes(self, rows: ChunkRows) -> int | Ints:
        """Bytes of each row of a column whose values are views of copies, [rows] where they differ."""
        return self.row_bytes


def staged_outputs(outputs: Sequence[Output]) -> list[StagedOutput]:
    """Return what windows hold of several."""
    return [staged for output in outputs for staged in output.staged]


def columns_read(outputs: Sequence[Output]) -> list[str]:
    """The stored columns that several are made of."""
    names = (name for staged in staged_outputs(outputs) for name in staged.sources)
    return [name for name in dict.fromkeys(names) if name != "__url__"]


def name_beside(output: Output, suffix: str, names: Collection[str]) -> str:
    """The name of a column that tells about another. `ValueError` if one of the batch has it."""
    name = output.name + suffix
    if name in names:
        raise ValueError(
            f"mask=True of column {output.name!r} adds a column {name!r}, and there is one: rename either by "
            "columns={...}"
        )
    return name


def split_rows(out: NDArray[Any], sizes: Sequence[int]) -> list[Tensor]:
    """One view of memory a batch. numpy slices it: `Tensor.split` would give up the GIL in the middle."""
    if len(sizes) == 1:
        return [torch.from_numpy(out)]
    ends = list(itertools.accumulate(sizes))
    return [torch.from_numpy(out[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def split_ragged(values: NDArray[Any], offsets: Ints, sizes: Sequence[int]) -> Iterator[Ragged]:
    """The rows of each batch; offsets count from the batch's own first element."""
    row = 0
    for size in sizes:
        cuts = offsets[row : row + size + 1]
        # numpy slices it, as above.
        yield Ragged(torch.from_numpy(values[int(cuts[0]) : int(cuts[-1])]), torch.from_numpy(cuts - cuts[0]))
        row += size


def split_list(values: list[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """The values of each batch."""
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size
