"""JSON Lines mean what `json.loads` says of each line, whatever other lines and blocks hold."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from formats_kit import decoded_blocks, scan_of
from hypothesis import example, given, strategies as st

from sharding.blocks import Masked, Spans
from sharding.formats.arrow.jsonl import JsonlFormat

FORMAT = JsonlFormat()
MARK = b"\xef\xbb\xbf"


# ---- what is expected -----------------------------------------------------------------------------------


def leaves_of(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Columns of a line: a leaf each, missing values left out."""
    for key, one in value.items():
        if isinstance(one, dict):
            yield from leaves_of(one, f"{prefix}{key}.")
        elif one is not None:
            yield prefix + key, one


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_fit(values: list[Any]) -> bool:
    integers = [value for value in values if isinstance(value, int)]
    if len(integers) < len(values):
        return all(abs(one) <= 2**53 for one in integers)
    low, high = min(integers, default=0), max(integers, default=0)
    return low >= -(2**63) and high < (2**63 if low < 0 else 2**64)


def is_utf8(text: str) -> bool:
    return not any(0xD800 <= ord(one) < 0xE000 for one in text)


def has_type(values: list[Any]) -> bool:
    """Whether a column's values, which are no objects, have a common type."""
    if all(isinstance(value, list) for value in values):
        elements = [one for value in values for one in value if one is not None]
        return not all(map(is_number, elements)) or numbers_fit(elements)
    if all(map(is_number, values)):
        return numbers_fit(values)
    if all(isinstance(value, str) for value in values):
        return all(map(is_utf8, values))
    return all(isinstance(value, bool) for value in values)


def equal(got: Any, want: Any) -> bool:
    """Equal as JSON, NaN as itself, and integers never as floats."""
    return repr(got) == repr(want)


# ---- lines ----------------------------------------------------------------------------------------------

INTEGERS = st.sampled_from([0, 1, -1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)])
FLOATS = st.sampled_from([0.5, -1e300, 1e-7, math.nan, math.inf, -math.inf, 3.0])
TEXTS = st.sampled_from(["", "a", "日本", '\\"\n\t', "\x7f\u2028", "🙂", "2024-01-01", "null", "é\udc00"])
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS
KEYS = st.sampled_from(["a", "b", "ab", "a.b", "c d", "é", "", "n\nl", 'q"', "\\"])
LISTS = (
    st.lists(st.none() | INTEGERS, max_size=3) | st.lists(FLOATS, max_size=3) | st.lists(SCALARS, max_size=2)
)
ANY = st.recursive(
    SCALARS | LISTS,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(KEYS, one, max_size=3),
    max_leaves=5,
)
PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "i": INTEGERS | st.none(),
        "f": FLOATS,
        "t": TEXTS,
        "l": LISTS,
        "m": st.lists(st.dictionaries(KEYS, ANY, max_size=2), max_size=2),
        "o": st.none() | st.dictionaries(KEYS, ANY, max_size=2),
    },
)
WRITTEN = st.sampled_from(
    [
        lambda value: json.dumps(value),
        lambda value: json.dumps(value, separators=(" ,\t", " : ")) + " \r",
        lambda value: json.dumps(value, separators=(",", ":")).replace("\\u00e9", "é"),
        lambda value: "{" + '"z":[9],' + json.dumps({"z": 1, **value})[1:],  # a key twice: the last counts
    ]
)
LINES = st.lists(st.tuples(st.dictionaries(KEYS, ANY, max_size=4) | PLAIN, WRITTEN), min_size=1, max_size=8)


def gz(content: bytes) -> bytes:
    return gzip.compress(content, 1)


def zst(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


STORED = {"a.jsonl": bytes, "a.jsonl.gz": gz, "a.jsonl.zst": zst}


def column_of(content: bytes, url: str, name: str, block_bytes: int) -> list[Any]:
    """A column as Python values; text that is nested parsed."""
    values = []
    is_json = scan_of(FORMAT, content, url, block_bytes).schema[name].kind in ("json", "null_list")
    for block in decoded_blocks(FORMAT, content, url, [name], block_bytes):
        column = block[name]
        if isinstance(column, Spans):
            for i in range(len(column)):
                value = column.value(i) if column.lengths[i] >= 0 else None
                if is_json and value is not None:
                    assert value.tobytes() != b"null"
                    value = json.loads(value.tobytes())
                elif value is not None:
                    value = value.tobytes().decode() if value.dtype == "uint8" else value.tolist()
                values.append(value)
        elif isinstance(column, Masked):
            pairs = zip(column.values.tolist(), column.lacks.tolist(), strict=True)
            values += [None if lacks else value for value, lacks in pairs]
        else:
            values += column.tolist()
    return values


@pytest.mark.filterwarnings("ignore:.*the last counts")
@given(
    LINES,
    st.integers(1, 200),
    st.sampled_from(sorted(STORED)),
    st.sampled_from([b"\n", b"\n \t\n", b"\n" + MARK]),
)
@example([({"a": 2**64 - 1}, json.dumps), ({"a": -1}, json.dumps)], 1, "a.jsonl", b"\n")
@example([({"a": [1]}, json.dumps), ({"a": [[1]]}, json.dumps), ({"a": []}, json.dumps)], 1, "a.jsonl", b"\n")
@example(
    [({"a": {"b": 1}}, json.dumps), ({"a": {}}, json.dumps), ({"a": None}, json.dumps)], 99, "a.jsonl", b"\n"
)
@example(
    [({"a": [True]}, json.dumps), ({"a": [1]}, json.dumps), ({"a": [True, 1]}, json.dumps)],
    1,
    "a.jsonl",
    b"\n",
)
@example(
    [({"a": [1]}, json.dumps), ({"a": [2**64 - 1]}, json.dumps), ({"a": [2**63]}, json.dumps)],
    1,
    "a.jsonl",
    b"\n",
)
@example(
    [({"a": [1]}, json.dumps), ({"a": [-1]}, json.dumps), ({"a": [2**63]}, json.dumps)], 1, "a.jsonl", b"\n"
)
@example(
    [({"a": [1]}, json.dumps), ({"a": [2**53 + 1]}, json.dumps), ({"a": [0.5]}, json.dumps)],
    1,
    "a.jsonl",
    b"\n",
)
@example([({"a": [0]}, json.dumps), ({"a": [2**63]}, json.dumps)], 99, "a.jsonl", b"\n")
@example([({"a": [2**53 + 1]}, json.dumps), ({"a": [2**63]}, json.dumps)], 1, "a.jsonl", b"\n")
@example([({"a": [{}]}, json.dumps), ({"a": None}, json.dumps), ({}, json.dumps)], 1, "a.jsonl", b"\n")
@example([({"a": math.nan}, json.dumps), ({"b": [{"c": math.inf}]}, json.dumps)], 99, "a.jsonl", b"\n")
def test_every_column_is_what_json_loads_says_line_by_line(lines, block_bytes, url, end):
    text = end.join(write(value).encode() for value, write in lines)
    content = STORED[url](text)
    rows = [json.loads(line.decode("utf-8-sig")) for line in text.split(b"\n") if line.strip()]
    columns: dict[str, list[Any]] = {}
    clashes = set()
    for number, row in enumerate(rows):
        for name, value in leaves_of(row):
            values = columns.setdefault(name, [None] * len(rows))
            if values[number] is not None:
                clashes.add(name)  # "a.b" and {"a": {"b": ...}}
            values[number] = value
    objects = {name for row in rows for name in object_paths(row)}
    if any(repeated_routes(rows)):
        return
    schema = scan_of(FORMAT, content, url, block_bytes).schema
    for name, values in columns.items():
        have = [value for value in values if value is not None]
        below_a_value = any(name.startswith(f"{other}.") and other in objects for other in columns)
        if below_a_value or name in objects or not has_type(have):
            assert name not in schema or schema[name].kind == "unreadable"
        elif name not in clashes:
            got = column_of(content, url, name, block_bytes)
            floats = schema[name].dtype == "float64"
            want = [settled(value, schema[name].kind, floats) for value in values]
            got = [settled(value, schema[name].kind, floats) for value in got]
            assert equal(got, want), name


def object_paths(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, one in value.items():
        if isinstance(one, dict):
            yield prefix + key
            yield from object_paths(one, f"{prefix}{key}.")


def repeated_routes(rows: list[dict[str, Any]]) -> list[str]:
    """Names with a dot of their own: another test's subject."""
    names = json.dumps(rows)
    return [names] if '"a.b"' in names else []


def settled(value: Any, kind: str, floats: bool) -> Any:
    """What stands for a value: NaN for a float that is missing, nothing for a list with a null inside."""
    if kind == "fixed" and floats:
        return math.nan if value is None else float(value)
    if kind == "list" and value is not None:
        if floats:
            return [math.nan if one is None else float(one) for one in value]
        return None if None in value else value
    return value
