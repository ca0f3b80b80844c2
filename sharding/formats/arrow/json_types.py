"""Record what the lines of a file hold at each key, and choose the Arrow type of each column from it.

Each key has a `SchemaInferrer`: the kinds of values that lines hold there, each with the first line that
holds one. A type follows from the kinds alone. A key whose values have no common type is an error only for
who asks for it: its type is `UNREADABLE`, and its field's metadata says why.

Integers are int64, or uint64 where one needs it and none is negative; beside a fraction they are float64 if
each lies within 2^53. An object is a struct, a list of numbers a list, all else that is nested `JSON_TEXT`.
What is null on all lines, and lists that are empty or hold nulls only, have the type of nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

MAX_LEVELS = 32
"""Objects that lie deeper are text: Arrow writes no schema of more than 64 levels."""
PROBLEM = b"dataflow.problem"
"""Metadata of a field: why it cannot be read."""

VALUE, LIST, NESTED, OBJECT = "value", "list", "nested", "object"
_SHAPES = (VALUE, LIST, NESTED, OBJECT)
BOOL, INTEGER, FRACTION, TEXT, SURROGATE = "bool", "integer", "fraction", "text", "surrogate"
_NEGATIVE, _INEXACT, _UNSIGNED, _BEYOND = "negative", "inexact", "unsigned", "beyond"
_WORDS = {
    LIST: "a list",
    NESTED: "a list",
    OBJECT: "an object",
    BOOL: "true or false",
    INTEGER: "a number",
    FRACTION: "a number",
    TEXT: "text",
    SURROGATE: "text with half of a surrogate pair, which UTF-8 cannot hold",
}
_CURE = "write one type, or leave the column out of columns="
_AS_TEXT = "write such integers as strings, or leave the column out of columns="


JSON_TEXT = pa.opaque(pa.large_string(), "JSON text", "dataflow")
"""Nested values, each as its JSON text."""
UNREADABLE = pa.opaque(pa.null(), "unreadable", "dataflow")
"""Values that have no common type."""


@dataclass
class SchemaInferrer:
    """The kinds of values that lines hold at one key."""

    first: dict[str, int] = field(default_factory=dict)
    """By kind, where the first line begins that holds such a value."""
    present: int = 0
    """Lines that hold a value that is not null."""
    children: dict[str, SchemaInferrer] = field(default_factory=dict)
    """The keys of objects."""

    @property
    def shapes(self) -> set[str]:
        """Return which of value, list, nested list and object there are."""
        return {shape for shape in _SHAPES if shape in self.first}

    @property
    def is_object(self) -> bool:
        """Return whether every value is an object."""
        return self.shapes == {OBJECT}

    def field(self, name: str, path: str) -> pa.Field:
        """The Arrow field of these values; `path` is the column's name, with those of objects around it."""
        if self.is_object:
            kind = pa.struct([child.field(key, f"{path}.{key}") for key, child in self.children.items()])
            return pa.field(name, kind)
        try:
            return pa.field(name, _type_of(self.first, path))
        except ValueError as error:
            return pa.field(name, UNREADABLE, metadata={PROBLEM: str(error).encode()})


def problem_of(field: pa.Field) -> str:
    """Return why a field of type `UNREADABLE` cannot be read."""
    return str((field.metadata or {}).get(PROBLEM, b""), "utf-8")


def integer_kinds(low: int, high: int) -> set[str]:
    """The kinds of integers of which these are the least and the greatest."""
    kinds = {INTEGER}
    if low < 0:
        kinds.add(_NEGATIVE)
    if max(-low, high) > 1 << 53:
        kinds.add(_INEXACT)
    if high >= 1 << 63:
        kinds.add(_UNSIGNED)
    if high >= 1 << 64 or low < -(1 << 63):
        kinds.add(_BEYOND)
    return kinds


def _type_of(first: Mapping[str, int], path: str) -> pa.DataType:
    """The type of values of these kinds; `ValueError`, in words for the user, where they have none."""
    shapes = {shape for shape in _SHAPES if shape in first}
    if not shapes:
        return pa.null()
    if shapes <= {LIST, NESTED}:
        mixed = BOOL in first and (INTEGER in first or FRACTION in first)
        return JSON_TEXT if NESTED in shapes or mixed else pa.list_(_number_type(first, path))
    if SURROGATE in first:
        raise ValueError(f"column {path!r} holds {_WORDS[SURROGATE]}, {_on(first[SURROGATE])}; {_CURE}")
    kinds = [kind for kind in (BOOL, INTEGER, FRACTION, TEXT) if kind in first]
    kinds = kinds if VALUE in shapes else []  # else they are those of lists
    words: dict[str, int] = {}
    for kind in [*kinds, *(shape for shape in (LIST, NESTED, OBJECT) if shape in shapes)]:
        words.setdefault(_WORDS[kind], first[kind])
    if len(words) > 1:
        (word, here), (other, there), *_ = sorted(words.items(), key=lambda pair: pair[1])
        text = f"column {path!r} holds {word} {_on(here)}, but {other} {_on(there)}"
        raise ValueError(f"{text}; {_CURE}")
    return pa.string() if TEXT in first else _number_type(first, path)


def _number_type(first: Mapping[str, int], path: str) -> pa.DataType:
    """The type of numbers or bools, or of nulls."""
    if INTEGER not in first:
        return pa.bool_() if BOOL in first else pa.float64() if FRACTION in first else pa.null()
    what = f"column {path!r} holds"
    if FRACTION in first and _INEXACT in first:
        text = f"an integer beyond 2^53 {_on(first[_INEXACT])}, and a fraction {_on(first[FRACTION])}"
        raise ValueError(f"{what} {text}: no type holds both exactly; {_AS_TEXT}")
    if FRACTION in first:
        return pa.float64()
    if _BEYOND in first:
        raise ValueError(f"{what} an integer {_on(first[_BEYOND])} that takes more than 64 bits; {_AS_TEXT}")
    if _UNSIGNED in first and _NEGATIVE in first:
        text = f"an integer beyond 2^63 - 1 {_on(first[_UNSIGNED])}, and one below 0 {_on(first[_NEGATIVE])}"
        raise ValueError(f"{what} {text}: no type of 64 bits holds both; {_AS_TEXT}")
    return pa.uint64() if _UNSIGNED in first else pa.int64()


def _on(offset: int) -> str:
    return f"on the line at byte {offset}"
