"""Tables of text and text files that are named alone: rows and lines are samples."""

from __future__ import annotations

import csv
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dataflow import DataLoader, Manifest, ShardedDataset, convert
from sharding.errors import CorruptShardError, DataflowError, ShardReadError

TABLE = (
    'id,u,x,s,zip,day,large,none\n1,18446744073709551615,1.5,"a ""b"",\nc",007,2020-01-02,1{0},\n'
    "-2,1,2,,1,2020,1,\n"
)
ROWS = [
    {"id": 1, "u": 2**64 - 1, "x": 1.5, "s": 'a "b",\nc', "zip": "007", "day": "2020-01-02"},
    {"id": -2, "u": 1, "x": 2.0, "s": "", "zip": "1", "day": "2020"},
]
ZEROS = "0" * 30


def opened(path: Path, content: bytes | str, **options: Any) -> ShardedDataset[Any]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return ShardedDataset(path, progress=False, **options)


def rows(dataset: ShardedDataset[Any]) -> list[Any]:
    return [dataset[number] for number in range(len(dataset))]


def test_rows_of_a_table_named_alone_are_samples_whose_values_are_what_it_says(tmp_path: Path) -> None:
    more = [{"large": f"1{ZEROS}", "none": ""}, {"large": "1", "none": ""}]
    wanted = [one | two for one, two in zip(ROWS, more, strict=True)]
    dataset = opened(tmp_path / "t.csv", TABLE.replace("{0}", ZEROS))
    assert rows(dataset) == wanted
    convert(dataset, tmp_path / "out", to="parquet", progress=False)
    assert rows(ShardedDataset(tmp_path / "out", progress=False)) == wanted


@pytest.mark.parametrize(
    "cells",
    [
        ["007", "1.5"],
        ["0x00FF", "0x10"],
        [str(2**53 + 1), "1.5"],
        [f"-{2**53 + 1}", "0.5"],
        [f"+{2**53 + 1}", "1"],
    ],
)
def test_numbers_that_would_lose_something_stay_text(tmp_path: Path, cells: list[str]) -> None:
    assert [row["x"] for row in rows(opened(tmp_path / "t.csv", "\n".join(["x", *cells])))] == cells


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ";"), ("t.tsv", "\t"), ("T.CSV", ",")])
def test_the_header_shows_the_separator(name: str, separator: str, tmp_path: Path) -> None:
    table = "\ufeffa,b\r\n1,x\r\n2,y".replace(",", separator)
    assert rows(opened(tmp_path / name, table)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=5)


@given(st.lists(st.tuples(TEXTS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=5))
def test_a_table_gives_back_what_was_written(values: list[tuple[str, int]]) -> None:
    table = io.StringIO()
    csv.writer(table, quoting=csv.QUOTE_ALL).writerows(
        [("text", "n"), *(("x" + text, n) for text, n in values)]
    )
    with tempfile.TemporaryDirectory() as folder:
        found = rows(opened(Path(folder) / "t.csv", table.getvalue(), catalog=Path(folder) / "t.catalog"))
    assert [(row["text"], row["n"]) for row in found] == [("x" + text, n) for text, n in values]


def test_a_table_that_names_a_file_beside_it_stays_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    (tmp_path / "sub").mkdir()
    for table in ("file,n\na.bin,1\n", "n,file\n1,sub/b.bin\n", 'n,file\n1,"./a.bin"\n'):
        with pytest.raises(ValueError, match="has no column 'file_name' of file names"):
            opened(tmp_path / "t.csv", table)
    with pytest.raises(ShardReadError, match=r"row 1 names 'c\.bin'"):
        opened(tmp_path / "t.csv", "file_name,n\nc.bin,1\n")
    assert opened(tmp_path / "t.csv", "file_name,n\na.bin,1\n")[0]["n"] == 1
    (tmp_path / "t.txt").write_text("lines")
    manifest = Manifest("t.csv", file="file_name")
    assert len(ShardedDataset(tmp_path, manifest=manifest, progress=False)) == 1


@pytest.mark.parametrize(
    ("content", "end", "text"),
    [
        ("\ufeffone\r\n\n zwei ä \nlast", "t.txt", ["one", "", " zwei ä ", "last"]),
        ("a\n\n", "T.TXT", ["a", ""]),
        ("\n", "t.txt", [""]),
        ("a\rb\u2028c\n", "t.txt", ["a\rb\u2028c"]),
    ],
)
def test_lines_of_text_are_samples_also_empty_ones(
    content: str, end: str, text: list[str], tmp_path: Path
) -> None:
    for block_bytes in (1, 1 << 20):
        assert [row["text"] for row in rows(opened(tmp_path / end, content, block_bytes=block_bytes))] == text


@pytest.mark.parametrize("name", ["t.csv", "t.txt"])
def test_shuffled_rows_and_lines_are_all_there_and_a_state_goes_on(name: str, tmp_path: Path) -> None:
    lines = [f"x{number}" for number in range(500)]
    dataset = opened(tmp_path / name, "\n".join(["text"][: name == "t.csv"] + lines), block_bytes=300)

    def loader() -> DataLoader[Any]:
        return DataLoader(dataset, 7, shuffle=True)

    with loader() as whole:
        batches = [batch["text"] for batch in whole]
    texts = [text for batch in batches for text in batch]
    assert sorted(texts) == sorted(lines) != texts
    with loader() as first:
        steps = iter(first)
        for _ in range(9):
            next(steps)
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert [batch["text"] for batch in second] == batches[9:]


BROKEN: dict[str, tuple[bytes, str]] = {
    "latin.csv": (b"a,b\n1,\xff\n", "byte 6: this is no UTF-8 text .*save it as UTF-8"),
    "latin.txt": (b"a\nb\n\xff\n", "byte 4: this is no UTF-8 text .*save it as UTF-8"),
    "nul.csv": (b"a,b\n1,\0\n", "byte 6: a NUL byte"),
    "nul.txt": (b"a\n\0", "byte 2: a NUL byte"),
    "quote.csv": (b'a,b\n1,"' + b"2,\n" * 100_000, "has a quote .* that nothing closes"),
    "ragged.csv": (b"a,b\n1,2\n3\n", "is no table: .*Expected 2 columns, got 1"),
    "two.csv": (b"a,a\n1,2\n", "has two columns 'a'"),
    "large.csv": (b"a;b\n" + b"1;2\n" * (17 << 20), r'more than 64 MiB: .*delimiter=";".* > lines\.jsonl'),
    "long.txt": (b"x" * (17 << 20), r"longer than 16777216 bytes; .*TextFormat\(max_line_bytes="),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_text_or_table_is_an_error_that_says_where(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    start = time.process_time()
    with pytest.raises(CorruptShardError, match=f"(?s){reason}"):
        opened(tmp_path / name, content)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", ["t.csv", "t.txt"])
def test_a_file_without_samples_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataflowError, match="empty"):
        opened(tmp_path / name, "")


def test_a_table_whose_header_changed_behind_its_catalog_is_an_error(tmp_path: Path) -> None:
    path, times = tmp_path / "a.csv", 10**18
    path.write_text("n,x\n1,2\n")
    os.utime(path, ns=(times, times))
    dataset = ShardedDataset(path, columns=["x"])
    path.write_text("n,y\n1,2\n")
    os.utime(path, ns=(times, times))
    with pytest.raises(CorruptShardError, match=r"no table: .*Column 'x' in include_columns does not exist"):
        rows(dataset)


def test_a_line_that_grew_over_the_end_of_its_block_is_an_error(tmp_path: Path) -> None:
    path, times = tmp_path / "a.txt", 10**18
    path.write_text("ab\ncd\n")
    os.utime(path, ns=(times, times))
    dataset = ShardedDataset(path, block_bytes=3)
    path.write_text("abxcd\n")
    os.utime(path, ns=(times, times))
    with pytest.raises(CorruptShardError, match="the last line goes on behind it"):
        rows(dataset)
