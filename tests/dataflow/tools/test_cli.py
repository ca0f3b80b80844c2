"""`dataflow index` and the group's help, run in this process by click's runner."""

import os
import subprocess
import sys
import tarfile
import zlib
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from programs_kit import run_command

from dataflow import DataLoader, ShardedDataset
from dataflow.tools.cli import main
from dataflow.tools.terminal.report import bytes_text
from sharding.blocks import DEFAULT_BLOCK_BYTES
from sharding.catalog.table import Catalog

pytestmark = pytest.mark.usefixtures("own_cache")


def write_tokens(folder, *sizes):
    folder.mkdir(exist_ok=True)
    for i, size in enumerate(sizes):
        np.arange(size, dtype=np.uint16).tofile(folder / f"{i}.bin")
    return folder


def write_parquet(path, *, rows, row_group_size=100):
    table = pa.table({"x": np.arange(rows, dtype=np.float32), "name": ["n"] * rows})
    pq.write_table(table, path, row_group_size=row_group_size)


def tokens(folder):
    return (folder, "--dtype", "uint16", "--length", "8")


def test_help_teaches_by_examples():
    code, text = run_command("--help")
    assert code == 0
    assert "dataflow demo" in text
    assert "from dataflow import DataLoader, ShardedDataset" in text
    code, text = run_command("index", "--help")
    assert code == 0
    assert "dataflow index 'data/*.bin' --dtype uint16 --length 2048" in text


def test_the_version_is_told():
    code = "from dataflow.tools.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert "version" in done.stdout


def test_index_tells_shards_blocks_samples_bytes_and_column_types(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows=250)
    write_parquet(tmp_path / "b.parquet", rows=50)
    size = sum(p.stat().st_size for p in tmp_path.glob("*.parquet"))
    code, text = run_command("index", tmp_path)
    assert code == 0
    assert f"shards 2, {bytes_text(size)}" in text
    assert f"blocks 4, {bytes_text(size / 4)} each on average" in text
    assert "samples 300," in text
    assert "column x: float32" in text
    assert "column name: text" in text


def test_checksums_are_of_the_stored_bytes_and_are_kept_when_indexed_again(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200), tmp_path / "t.catalog"
    given = (*tokens(folder), "--output", output)
    assert "CRC-32" not in run_command("index", *given)[1]
    assert "checksums CRC-32 of each block" in run_command("index", *given, "--checksum")[1]
    assert "up to date" in run_command("index", output)[1]
    write_tokens(tmp_path / "d", 150)
    assert "checksums CRC-32 of each block" in run_command("index", output)[1]
    catalog = Catalog.load(str(output))
    for block in map(catalog.block, range(catalog.num_blocks)):
        stored = Path(block.shard.url).read_bytes()[block.offset : block.offset + block.length]
        assert block.checksum == zlib.crc32(stored)


def test_a_column_that_some_samples_lack_is_marked(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.txt", "2.txt", "2.cls"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, BytesIO(name.encode()))
    assert "column cls: bytes, 5 long, not in every sample" in run_command("index", tmp_path / "a.tar")[1]


def test_unfinished_shards_are_indexed_if_they_are_allowed_and_told(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.txt", "2.txt"):
            tar.addfile(tarfile.TarInfo(name), BytesIO())
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1024])
    code, text = run_command("index", tmp_path / "a.tar")
    assert code == 1
    assert "a.tar, byte 1024: truncated" in text
    code, text = run_command("index", tmp_path / "a.tar", "--allow-unfinished")
    assert code == 0
    assert "unfinished 1 of 1 shards are unfinished" in text
    assert "samples 2," in text


def test_the_catalog_in_the_cache_is_the_one_that_a_dataset_finds(tmp_path):
    folder = write_tokens(tmp_path / "d", 100, 200)
    code, text = run_command("index", *tokens(folder))
    assert code == 0
    saved = text.splitlines()[-1].removeprefix("saved ")
    assert saved.startswith(str(tmp_path / "cache"))
    written = [(path, path.stat().st_ino) for path in (tmp_path / "cache").rglob("*.catalog")]
    dataset = ShardedDataset(folder, format="tokens", dtype="uint16", length=8)
    assert dataset.catalog.fingerprint() == Catalog.load(saved).fingerprint()
    # Indexed again, it would have been written again, to this place or another.
    assert [(path, path.stat().st_ino) for path in (tmp_path / "cache").rglob("*.catalog")] == written
    assert [str(path) for path, _ in written] == [saved]


def test_an_output_catalog_is_a_source_for_training(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200), tmp_path / "t.catalog"
    assert run_command("index", *tokens(folder), "--output", output)[0] == 0
    with DataLoader(ShardedDataset(output), batch_size=4) as loader:
        assert sum(len(batch["tokens"]) for batch in loader) == 99 // 8 + 199 // 8


def test_several_sources_are_one_dataset_in_their_order(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200), tmp_path / "t.catalog"
    sources = (folder / "1.bin", folder / "0.bin")
    assert run_command("index", *sources, "--dtype", "uint16", "--length", "8", "--output", output)[0] == 0
    assert [os.path.basename(url) for url in Catalog.load(str(output)).urls] == ["1.bin", "0.bin"]


def test_a_second_run_says_that_nothing_changed_and_writes_nothing(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200), tmp_path / "t.catalog"
    run_command("index", *tokens(folder), "--output", output)
    before = output.stat()
    code, text = run_command("index", *tokens(folder), "--output", output)
    assert code == 0
    assert text.startswith("up to date")
    assert "samples 36," in text
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_changed_new_and_removed_shards_are_named_and_indexed_again(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200, 300), tmp_path / "t.catalog"
    run_command("index", *tokens(folder), "--output", output)
    np.arange(250, dtype=np.uint16).tofile(folder / "1.bin")
    (folder / "2.bin").rename(folder / "3.bin")
    code, text = run_command("index", *tokens(folder), "--output", output)
    assert code == 0
    assert "1.bin: its size is 500 bytes; it was 400 when it was indexed" in text
    assert "2.bin: no longer among the shards" in text
    assert "3.bin: new" in text
    assert "0.bin" not in text
    assert Catalog.load(str(output)).num_samples == 99 // 8 + 249 // 8 + 299 // 8
    assert run_command("index", *tokens(folder), "--output", output)[1].startswith("up to date")


def test_only_the_first_stale_shards_are_named(tmp_path):
    folder, output = write_tokens(tmp_path / "d", *[100] * 15), tmp_path / "t.catalog"
    run_command("index", *tokens(folder), "--output", output)
    write_tokens(folder, *[200] * 15)
    text = run_command("index", *tokens(folder), "--output", output)[1]
    assert text.count("when it was indexed") == 10
    assert "and 5 more" in text


def test_other_options_make_a_catalog_stale(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100), tmp_path / "t.catalog"
    run_command("index", *tokens(folder), "--output", output)
    text = run_command("index", folder, "--dtype", "uint16", "--length", "9", "--output", output)[1]
    assert "options: was {'dtype': 'uint16', 'length': 8}, now {'dtype': 'uint16', 'length': 9}" in text
    text = run_command(
        "index", folder, "--dtype", "uint16", "--length", "9", "--output", output, "--block-bytes", "1kB"
    )[1]
    assert f"block bytes: was {DEFAULT_BLOCK_BYTES}, now 1000" in text


def test_a_catalog_is_brought_up_to_date_in_its_place(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100, 200), tmp_path / "t.catalog"
    run_command("index", *tokens(folder), "--output", output, "--block-bytes", "1kB")
    assert run_command("index", output)[1].startswith("up to date")
    write_tokens(folder, 300)
    code, text = run_command("index", output)
    assert code == 0
    assert text.startswith("0.bin: its size is 600 bytes")
    assert Catalog.load(str(output)).num_samples == 299 // 8 + 199 // 8
    assert Catalog.load(str(output)).block_bytes == 1000


def test_a_damaged_catalog_is_replaced(tmp_path):
    folder, output = write_tokens(tmp_path / "d", 100), tmp_path / "t.catalog"
    output.write_bytes(b"no catalog")
    code, text = run_command("index", *tokens(folder), "--output", output)
    assert code == 0
    assert "index" in text.splitlines()[0]
    assert Catalog.load(str(output)).num_samples == 99 // 8


class NotedFileSystem(MemoryFileSystem):
    """Notes what it is opened with."""

    protocol = "noted"
    cachable = False
    opened = []  # noqa: RUF012

    def __init__(self, **options):
        self.opened.append(options)
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("noted://", "memory://"))


def test_storage_options_are_json_or_text(tmp_path):
    fsspec.register_implementation("noted", NotedFileSystem, clobber=True)
    folder = write_tokens(tmp_path, 100)
    fsspec.filesystem("memory").pipe_file("/bucket/x.bin", (folder / "0.bin").read_bytes())
    given = ["--storage-option", "anon=true", "--storage-option", "key=a=b", "--storage-option", 'c={"u": 1}']
    try:
        assert run_command("index", *tokens("noted://bucket/x.bin"), *given)[0] == 0
    finally:
        fsspec.filesystem("memory").rm_file("/bucket/x.bin")
    assert NotedFileSystem.opened
    assert all(options == {"anon": True, "key": "a=b", "c": {"u": 1}} for options in NotedFileSystem.opened)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing.tar"], "Error: missing.tar: no such file (stage: index)"),
        (["x.bin"], "format 'tokens' needs --length (tokens a sample, >= 1): nothing beside it tells"),
        (["x.bin", "--length", "8"], "--dtype uint16"),
        (["x.bin", "--length", "8", "--dtype", "uint16", "--output", "x.bin"], "must end in .catalog"),
        (["x.bin", "--format", "nonsense"], "nonsense"),
        (
            ["x.bin", "--length", "8", "--dtype", "uint16", "--output", "x.bin/c.catalog"],
            "cannot be written: ",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_1(tmp_path, monkeypatch, arguments, line):
    write_tokens(tmp_path, 100)
    (tmp_path / "0.bin").rename(tmp_path / "x.bin")
    monkeypatch.chdir(tmp_path)
    code, text = run_command("index", *arguments)
    assert code == 1
    assert line in text
    assert len(text.splitlines()) == 1
    assert (tmp_path / "x.bin").stat().st_size == 200


def test_an_error_counts_the_other_failing_shards(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.parquet").write_bytes(b"nonsense" * 10)
    code, text = run_command("index", tmp_path)
    assert code == 1
    assert text.splitlines()[0].startswith(f"Error: {tmp_path}/a.parquet")
    assert "2 of the other 2 shards cannot be indexed either" in text


def test_traceback_shows_where_an_error_came_from(tmp_path):
    result = CliRunner().invoke(main, ["index", str(tmp_path / "none.tar"), "--traceback"])
    assert isinstance(result.exception, Exception)
    assert "no such file" in str(result.exception)


@pytest.mark.parametrize(
    "wrong", [["--block-bytes", "x"], ["--block-bytes", "0"], ["--storage-option", "x"], []]
)
def test_wrong_usage_exits_with_2(wrong):
    source = ["x.tar"] if wrong else []
    assert run_command("index", *source, *wrong)[0] == 2


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "storage", "x.tar", "--json"],
        ["bench", "storage", "x.tar", "--plot"],
        ["bench", "loader", "x.tar", "--compute-ms", "1", "--json"],
        ["bench", "compare", "x.tar", "--csv"],
        ["inspect", "x.tar", "--json"],
        ["inspect", "x.tar", "--plot"],
        ["demo", "--json"],
        ["doctor", "--json"],
        ["doctor", "--html"],
        ["doctor", "--trace"],
        ["plan", "--nodes", "1", "--parameters", "1M", "--microbatch-ms", "1", "--plot"],
    ],
)
def test_where_figures_are_to_go_is_looked_at_before_they_are_measured(command, tmp_path):
    away = CliRunner().invoke(main, [*command, str(tmp_path / "none" / "x.html")])
    assert away.exit_code == 2
    assert "does not exist; make it first" in away.output
    assert CliRunner().invoke(main, [*command, str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (123_456, "123 kB"),
        (4.2e6, "4.2 MB"),
        (5e15, "5,000 TB"),
    ],
)
def test_bytes_are_told_in_decimal_units(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize("command", [["index"], ["inspect"], ["bench", "storage", "--seconds", "0.01"]])
def test_every_command_takes_a_split_and_says_so(command, tmp_path):
    for name in ("train", "test"):
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{name}.parquet")
    code, text = run_command(*command, tmp_path)
    assert code == 1
    assert "several splits (train, test): name one, as in --split train" in text
    assert run_command(*command, tmp_path, "--split", "train")[0] == 0
