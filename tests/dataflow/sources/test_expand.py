"""What a source means: braces, globs, directories, lists, chains; and the format told from endings."""

from __future__ import annotations

import glob as std_glob
import os
import shutil
import subprocess
import uuid
import zipfile
from pathlib import Path

import fsspec
import pytest
from braceexpand import braceexpand
from formats_kit import RecordFormat
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings, strategies as st

from dataflow.sources.listing.expand import expand
from sharding.errors import ShardReadError
from sharding.formats import ENTRIES, FORMATS, has_suffix, resolve_format, sibling, suffix_of
from sharding.urls import file_name, is_chain, is_local, local_path


@pytest.fixture
def folder(tmp_path):
    for name in ("b.tar", "a.tar", "c.tar.gz", ".hidden.tar", "_partial.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.tar").write_bytes(b"x")
    return tmp_path


@pytest.fixture
def memory():
    """A folder of its own in the memory store."""
    root = f"memory://{uuid.uuid4().hex}"
    fs = fsspec.filesystem("memory")
    for name in ("b.tar", "a.tar", "sub/d.tar"):
        fs.pipe_file(f"{root}/{name}", b"x")
    return root


def names(urls):
    return [file_name(url) for url in urls]


# Braces


def test_braces_keep_zero_padding_and_order():
    urls = expand("s3://b/train-{0009..0011}.tar")
    assert urls == [f"s3://b/train-00{n}.tar" for n in ("09", "10", "11")]


def test_braces_nest_and_multiply_as_in_bash():
    urls = expand("s3://b/{train,val{1..2}}-{a,b}.tar")
    stems = [f"{split}-{part}" for split in ("train", "val1", "val2") for part in "ab"]
    assert urls == [f"s3://b/{stem}.tar" for stem in stems]


def test_braces_expand_in_http_urls_with_a_query():
    assert expand("https://h/x-{0..1}.tar?sig=a*b") == [
        "https://h/x-0.tar?sig=a*b",
        "https://h/x-1.tar?sig=a*b",
    ]


def test_a_spelled_out_list_asks_no_store():
    assert len(expand("no-such-protocol://b/{0..999}.tar")) == 1000


words = st.text("ab0", min_size=1, max_size=3)
ranges = st.tuples(st.integers(8, 11), st.integers(8, 11), st.booleans()).map(
    lambda r: f"{{{r[0]:0{2 if r[2] else 1}}..{r[1]:0{2 if r[2] else 1}}}}"
)
groups = st.recursive(
    words | ranges,
    lambda inner: st.lists(inner | st.tuples(inner, inner).map("".join), min_size=2, max_size=2).map(
        lambda parts: "{" + ",".join(parts) + "}"
    ),
    max_leaves=4,
)
patterns = st.lists(groups, min_size=1, max_size=2).map(lambda parts: f"s3://b/{''.join(parts)}.tar")


@given(patterns)
def test_braces_mean_what_braceexpand_says(pattern):
    expected = list(braceexpand(pattern))
    if len(set(expected)) < len(expected):
        with pytest.raises(ValueError, match="once only"):
            expand(pattern)
    elif len(expected) > 1:
        assert expand(pattern) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=20)
@given(st.lists(patterns, min_size=5, max_size=5))
def test_braces_mean_what_bash_says(batch):
    script = "\n".join(f"printf '%s ' {pattern}; echo" for pattern in batch)
    output = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    for pattern, line in zip(batch, output.splitlines(), strict=True):
        expected = line.split()
        if len(expected) > 1 and len(set(expected)) == len(expected):
            assert expand(pattern) == expected


# Globs and directories


def test_a_glob_is_sorted_and_skips_hidden_files(folder):
    assert expand(folder / "*.tar") == [str(folder / name) for name in ("_partial.tar", "a.tar", "b.tar")]


def test_a_glob_agrees_with_the_standard_library(folder):
    for name in (".checkpoints/a.tar", ".checkpoints/.a.tar", "sub/.tmp/d.tar"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    for pattern in (
        "*.tar",
        "?.tar",
        "[ac].tar*",
        "**/*.tar",
        "*",
        ".*/*.tar",
        ".checkpoints/*",
        "s*/**/*.tar",
    ):
        found = std_glob.glob(str(folder / pattern), recursive=True)
        assert expand(folder / pattern) == sorted(name for name in found if Path(name).is_file()), pattern


def test_a_directory_gives_its_shards_and_not_those_below(folder):
    assert names(expand(folder)) == ["a.tar", "b.tar", "c.tar.gz"]
    assert expand(f"{folder}/") == expand(folder) == expand(f"file://{folder}")


def test_a_directory_gives_only_the_wanted_endings(folder):
    (folder / "x.parquet").write_bytes(b"x")
    assert names(expand(folder, format="parquet")) == ["x.parquet"]


def test_a_directory_may_have_the_ending_of_a_shard(tmp_path):
    (tmp_path / "train.parquet").mkdir()
    (tmp_path / "train.parquet" / "part-0.parquet").write_bytes(b"x")
    assert names(expand(tmp_path / "train.parquet")) == ["part-0.parquet"]


def test_nothing_found_names_the_pattern(folder):
    with pytest.raises(ShardReadError, match=r"\*\.parquet: no file matches") as caught:
        expand(folder / "*.parquet")
    assert caught.value.shard == str(folder / "*.parquet")
    with pytest.raises(ShardReadError, match="matches 1 directories"):
        expand(folder / "su[b]")


def test_a_file_really_called_like_a_pattern_is_that_file(tmp_path):
    for name in ("x[1].tar", "x1.tar", "{a,b}.tar"):
        (tmp_path / name).write_bytes(b"x")
    assert names(expand(tmp_path / "x[1].tar")) == ["x[1].tar"]
    assert names(expand(tmp_path / "{a,b}.tar")) == ["{a,b}.tar"]


def test_local_shards_become_absolute_paths(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    expected = [str(folder / "a.tar"), str(folder / "b.tar")]
    assert expand("{a,b}.tar") == expand(["./a.tar", "~/b.tar"]) == expand("[ab].tar") == expected
    assert expand(f"file://{folder}/{{a,b}}.tar") == expected


def test_memory_globs_and_directories_keep_the_users_spelling(memory):
    assert expand(f"{memory}/*.tar") == [f"{memory}/a.tar", f"{memory}/b.tar"]
    assert expand(f"{memory}/**/*.tar") == [f"{memory}/{name}.tar" for name in ("a", "b", "sub/d")]
    assert expand(memory) == expand(f"{memory}/") == [f"{memory}/a.tar", f"{memory}/b.tar"]


class _Backwards(MemoryFileSystem):
    """A store that lists in the wrong order."""

    protocol = "backwards"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("backwards://", "memory://"))

    def glob(self, path, **kwargs):
        return dict(reversed(super().glob(path, **kwargs).items()))

    def ls(self, path, **kwargs):
        return super().ls(path, **kwargs)[::-1]


def test_what_a_store_lists_is_sorted(memory):
    fsspec.register_implementation("backwards", _Backwards, clobber=True)
    root = memory.replace("memory", "backwards")
    assert expand(f"{root}/*.tar") == expand(root) == [f"{root}/a.tar", f"{root}/b.tar"]


def test_globs_reach_into_chains(tmp_path, memory):
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("in/b.tar", b"b")
        file.writestr("in/a.tar", b"a")
    urls = expand(f"zip://in/*.tar::{archive}")
    assert urls == [f"zip://in/{name}.tar::{archive}" for name in "ab"] == expand(f"zip://in::{archive}")
    with fsspec.open(urls[0]) as file:
        assert file.read() == b"a"
    cached = expand(f"simplecache::{memory}/*.tar")
    assert cached == [f"simplecache::{memory}/a.tar", f"simplecache::{memory}/b.tar"]


# Lists


def test_a_list_keeps_its_order(folder):
    assert names(expand([folder / "b.tar", "s3://b/{1..2}.tar", str(folder / "a.tar")])) == [
        "b.tar",
        "1.tar",
        "2.tar",
        "a.tar",
    ]


@pytest.mark.parametrize("name", [b"\xff.tar", b"of-\xfe/a.tar"])
def test_a_name_that_is_no_utf8_is_named_before_anything_is_read(tmp_path, name):
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "wb").close()
    for source in (path, os.path.dirname(path), os.path.join(os.path.dirname(path), "*.tar")):
        with pytest.raises(ValueError, match=r"udcf[ef].* has a name that is not UTF-8: rename the file"):
            expand(source)


# Names and formats


@pytest.mark.parametrize(
    ("url", "suffix"),
    [
        ("a.tar", ".tar"),
        ("s3://b/a.TAR.GZ", ".tar"),
        ("a.tgz", ".tar"),
        ("a.tar.zst", ".tar"),
        ("https://h/a.parquet?sig=x/y.tar", ".parquet"),
        ("s3://b/a.parquet?versionId=12.tar", ".parquet"),
        ("zip://a.tar::s3://b/x.zip", ".tar"),
        ("simplecache::https://h/a.jsonl.gz?x=1", ".jsonl"),
        ("filecache::/data/x.bin", ".bin"),
        ("simplecache://::s3://b/x.parquet", ".parquet"),
        ("/data.tar/x", ""),
        (".tar", ""),
        ("https://h/download", ""),
    ],
)
def test_the_ending_is_that_of_the_naming_part(url, suffix):
    assert suffix_of(url) == suffix


@pytest.mark.parametrize(
    ("url", "chained"),
    [
        ("simplecache::s3://b/x.tar", True),
        ("zip://a.tar::/data/x.zip", True),
        ("zip://a.tar::s3://b/x.zip", True),
        ("/data/a::b/x.tar", False),
        ("s3://b/a::b.tar", False),
        ("https://h/a::b/x.tar", False),
        ("memory://a::b", False),
        ("x.tar", False),
    ],
)
def test_two_colons_are_a_chain_behind_what_wraps_others_alone(url, chained):
    assert is_chain(url) == chained
    assert chained or file_name(url) == url.rpartition("/")[2]


def test_only_plain_files_are_local():
    assert is_local("a/b.tar")
    assert local_path("file:///a/../b.tar") == "/b.tar"
    assert not any(map(is_local, ("s3://b/x", "simplecache::/data/x.tar", "zip://a.tar::x.zip")))
    with pytest.raises(ValueError, match="not a local path"):
        local_path("s3://b/x")


def test_the_sibling_differs_in_the_last_ending():
    assert sibling("/d/x.y.bin", ".idx") == "/d/x.y.idx"
    assert sibling("s3://x.bin/x.bin", ".idx") == "s3://x.bin/x.idx"
    assert sibling("https://h/x.bin?s=1", ".idx") == "https://h/x.idx?s=1"
    assert sibling("simplecache::s3://b/x.bin", ".idx") == "simplecache::s3://b/x.idx"


@pytest.mark.parametrize(
    ("urls", "name"),
    [
        (["a.tar", "b.tar.gz", "c.tgz"], "tar"),
        (["a.parquet", "b.pq"], "parquet"),
        (["a.arrow"], "arrow"),
        (["a.arrows"], "arrow-stream"),
        (["a.jsonl.zst", "a.ndjson"], "jsonl"),
    ],
)
def test_auto_goes_by_the_endings(urls, name):
    assert resolve_format("auto", urls).name == name


def test_bin_is_megatron_where_the_index_exists():
    asked = []

    def exists(url):
        asked.append(url)
        return True

    assert resolve_format("auto", ["/d/x.bin"], exists=exists).name == "megatron"
    assert asked == ["/d/x.idx"]
    for how in (None, lambda url: False):
        assert resolve_format("auto", ["/d/x.bin"], exists=how, dtype="uint16", length=4).name == "tokens"


def test_an_instance_is_taken_as_it_is():
    codec = RecordFormat()
    assert resolve_format(codec, ["a.xyz"]) is codec


@pytest.mark.parametrize("name", FORMATS)
def test_every_formats_own_suffixes_lead_to_it(name):
    length = 4 if name == "tokens" else None
    assert resolve_format(name, [], length=length).name == name
    beside = {"megatron": "a.idx", "litdata": "index.json"}.get(name)
    for suffix in ENTRIES[name].suffixes:
        url = f"{ENTRIES[name].listed_name}a{suffix}"
        assert has_suffix(url)
        exists = beside.__eq__ if beside else None
        assert resolve_format("auto", [url], length=length, exists=exists).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_known_of_a_format_before_it_is_imported_is_true(name):
    given = {"dtype": "uint16", "length": 4, "header": 4, "allow_unfinished": True, "version": "3"}
    given |= {"classes": "x", "of": "tokens"}
    entry = ENTRIES[name]
    options = {option: given[option] for option in entry.options}
    if name == "hive":  # files of another format, whose options those of others are not
        options = {option: given[option] for option in ("version", "of", *ENTRIES["tokens"].options)}
    codec = resolve_format(name, [], **options)
    assert codec.options() == options
    assert codec.sibling_suffix == entry.sibling_suffix
