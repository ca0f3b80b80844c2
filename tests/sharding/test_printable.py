"""Names that data brings along are shown by a terminal and not obeyed, wherever they come out."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console

from dataflow import DataLoader, SampleError, ShardedDataset
from dataflow.tools.cli import main
from dataflow.tools.terminal.report import Sentence, Table, show
from sharding.errors import DataflowError, ShardError
from sharding.printable import printable, printable_name

NASTY = "a\x1b[31mred\x07\x9b2J\u202eb"
SHOWN = r"a\x1b[31mred\x07\x9b2J\u202eb"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe 中文 😀", "größe 中文 😀"),
        ("two\nlines\tof", "two\nlines\tof"),
        (NASTY, SHOWN),
        ("\ud800\u200b\ufeff", r"\ud800\u200b\ufeff"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_name_has_one_line() -> None:
    assert printable_name("a\nb\tc") == r"a\nb\tc"


def test_errors_of_ours_print_names_written_out_and_keep_them_as_they_are() -> None:
    error = ShardError(f"/d/{NASTY}\n.tar", f"no member {NASTY}", 5, NASTY)
    assert str(error).startswith(rf"/d/{SHOWN}\n.tar, byte 5, sample 'a\x1b")
    assert "\x1b" not in str(error)
    assert error.shard == f"/d/{NASTY}\n.tar"
    assert str(DataflowError(f"no {NASTY}")) == f"no {SHOWN}"


def test_reports_print_names_written_out_and_no_markup() -> None:
    out = io.StringIO()
    parts = [NASTY, Sentence(f"[bold]{NASTY}"), Table((f"[red]{NASTY}",), [(f"[blink]{NASTY}\n",)])]
    show(parts, Console(file=out, width=200, force_terminal=False))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        SHOWN,
        f"[bold]{SHOWN}",
        f"[red]{SHOWN}",
        rf"[blink]{SHOWN}\n",
    ]


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """Parquet and a tar, with such columns, keys, members and file names."""
    pq.write_table(pa.table({NASTY: [1, 2]}), tmp_path / f"{NASTY}.parquet")
    with tarfile.open(tmp_path / f"{NASTY}.tar", "w") as archive:
        for end, body in (("cls", b"x"), (NASTY.lower(), b"x")):
            member = tarfile.TarInfo(f"{NASTY}.{end}")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return tmp_path


@pytest.mark.parametrize("command", ["index", "inspect"])
@pytest.mark.parametrize("ending", ["parquet", "tar"])
def test_commands_print_no_control_characters(nasty: Path, command: str, ending: str) -> None:
    result = CliRunner().invoke(main, [command, str(nasty / f"{NASTY}.{ending}")])
    assert result.exit_code == 0, result.output
    assert command == "inspect" or r"\x1b[31mred" in result.output
    assert not set(result.output) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_an_error_of_a_command_prints_none(nasty: Path) -> None:
    (nasty / f"{NASTY}.parquet").write_bytes(b"no parquet")
    result = CliRunner().invoke(main, ["index", str(nasty / f"{NASTY}.parquet")])
    assert result.exit_code == 1
    assert "\x1b" not in result.output


def test_errors_of_a_loader_print_none(nasty: Path) -> None:
    with (
        pytest.raises(SampleError) as raised,
        DataLoader(ShardedDataset(str(nasty / f"{NASTY}.tar"))) as loader,
    ):
        list(loader)  # "x" is no class
    assert "\x1b" not in str(raised.value)
    assert raised.value.key == NASTY
    for options in ({"columns": ["none"]}, {"decode": {"none": None}}):
        with pytest.raises(ValueError, match="none") as refused:
            ShardedDataset(str(nasty / f"{NASTY}.parquet"), **options)  # type: ignore[arg-type]
        assert "\x1b" not in str(refused.value)
    assert "\x1b" not in repr(ShardedDataset(str(nasty / f"{NASTY}.parquet")))
