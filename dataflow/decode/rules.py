"""The rules of `decode=`: which output decodes by it, and what is read of a column for it.

`Image`, `Audio` and `Video` are such rules; columns, staging and builders know no other thing of them. An
output that needs parts of long values says so by `StagedOutput.parts_rule`: staging reads these, and hands
them over as the values. One whose values are clips of other files has `clip_bytes`, and cuts them by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, TypeGuard

from dataflow.decode.values import Draws
from sharding.spans import Bytes

ReadBytes = Callable[[int, int], Bytes]
"""Offset in a value, bytes -> so many bytes of it."""


class DecoderRule(Protocol):
    """A rule of `decode=` that has an output of its own."""

    output_by: ClassVar[str]
    """The function `(name, sources, rule) -> Output`, as "module:function"."""
    takes_lists: ClassVar[bool]
    """True if this function also takes fields of `DecodedOutput` that say how a column is one of lists."""


class CameraColumn(Protocol):
    """A column whose values lie in other files."""

    output_by: ClassVar[str]
    """The function `(name, column, rule, schema) -> Output`, as "module:function"."""
    sources: ClassVar[tuple[str, ...]]
    """The stored columns that tell where."""


def is_decoder(rule: object) -> TypeGuard[DecoderRule]:
    """Return whether an object is such a rule."""
    return isinstance(getattr(rule, "output_by", None), str)


class PartsRule(Protocol):
    """The rule by which parts of stored values are read."""

    @property
    def random(self) -> bool:
        """Return whether it needs draws."""
        ...

    def cut(self, read: ReadBytes, length: int, draws: Draws | None) -> Bytes:
        """Return what is needed of a value of so many bytes. Raises what `read` raises, and nothing else."""
        ...
