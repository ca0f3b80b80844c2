"""Columns that samples may lack: what stands for a missing value, and a column that tells where."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dataflow.outputs.fixed import MASK_SUFFIX, MaskOutput
from dataflow.outputs.output import Output, name_beside


@dataclass(frozen=True)
class Optional:
    """Let samples lack a column: nulls of Parquet, Arrow and JSON Lines, absent members of tar.

        decode={"age": Optional(default=-1)}                        -1 where it is missing
        decode={"age": Optional(mask=True)}                         and "age_mask": True where it is there
        decode={"caption.txt": Optional()}                          None where it is missing
        decode={"jpg": Optional(Image(size=224), mask=True)}        a black image, and "jpg_mask"

    In lists of objects (text, JSON, images without size=, what functions of bytes make) a missing value is
    None, or the default. Tensors have no place for None, and take a default or a mask; with a mask alone a
    missing value is 0 (NaN of floats, an empty row of `Ragged`). Columns that are not declared so have none
    missing, NaN of floats apart: such a sample is a bad one, see `on_error=`.

    Args:
        rule: the rule for values that are there: anything else that `decode=` takes.
        default: the value in place of a missing one: a number, an array of the value's shape, bytes, text, an
            object.
        mask: True if batches have a column `<name>_mask` after it, bool [batch] ([batch, n] of n stacked
            columns): True where the value is there.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> dataset = ShardedDataset("people.jsonl", decode={"age": Optional(default=-1)})
        >>> [int(dataset[i]["age"]) for i in range(len(dataset))]
        [41, -1]
    """

    rule: object = "auto"
    _: KW_ONLY
    default: Any = None
    mask: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rule, Optional):
            raise ValueError(f"one Optional is enough, got {self.rule!r} in another")
        if not isinstance(self.mask, bool):
            raise ValueError(f"mask must be True or False, got {self.mask!r}")


def mask_of(output: Output, names: Collection[str]) -> MaskOutput:
    """The column that tells where another has values. `ValueError` if one of the batch has its name."""
    name = name_beside(output, MASK_SUFFIX, names)
    shape = (len(output.sources),) if len(output.sources) > 1 else ()
    return MaskOutput(name=name, sources=output.sources, dtype="bool", source_dtype="bool", shape=shape)
