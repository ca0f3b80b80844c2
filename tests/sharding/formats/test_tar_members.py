"""Members as people's tars have them: not neighbours, hidden, linked; CPython's tar reader is the oracle."""

from __future__ import annotations

import io
import json
import posixpath
import tarfile

import pytest
from formats_kit import blocks_of, scan_of, shard_of
from hypothesis import assume, example, given, strategies as st
from test_tar import COMPRESS, FORMATS, TAR, by_us, error_of, tar_of

from sharding.errors import CorruptShardError
from sharding.formats.tar import format as tar_format, samples as tar_samples
from sharding.formats.tar.format import TarFormat

LONG = "k" * 120
SIDECAR = b"\x00\x05\x16\x07\x00\x02\x00\x00" + bytes(150)

# Members that are not neighbours


@pytest.mark.parametrize("url", COMPRESS)
def test_members_of_a_sample_that_are_not_neighbours_are_an_error_at_the_one_that_comes_back(
    url: str,
) -> None:
    content = tar_of([("0.a", b"1"), ("1.a", b"2"), ("0.b", b"3"), ("1.b", b"4")])
    error = error_of(COMPRESS[url](content), url)
    assert (error.key, error.offset) == ("0", 2048)
    assert "'0.b'" in error.reason
    assert "not neighbours" in error.reason
    assert "byte 0" in error.reason
    assert "tar --sort=name" in error.reason


def test_a_key_that_comes_again_with_the_same_members_is_an_error() -> None:
    error = error_of(tar_of([("0.a", b"1"), ("1.a", b"2"), ("0.a", b"3")]))
    assert (error.key, error.offset, "the key comes again" in error.reason) == ("0", 2048, True)


members_of_samples = st.lists(
    st.tuples(st.sampled_from(["0", "1", "10", "d/0", "é/0", LONG, f"{LONG}0", "_"]), st.sampled_from("abB")),
    max_size=9,
    unique_by=lambda member: (member[0], member[1].lower()),
)


@given(members_of_samples, st.sampled_from(list(FORMATS.values())))
@example([(LONG, "a"), ("0", "a"), (LONG, "b")], tarfile.PAX_FORMAT)
def test_the_first_member_that_comes_back_is_named_whatever_the_order(
    members: list[tuple[str, str]], fmt: int
) -> None:
    try:
        content = tar_of([(f"{key}.{end}", b"v") for key, end in members], fmt=fmt)
    except ValueError:
        assume(False)  # ustar cannot hold the name
    keys = [key for key, _ in members]
    back = [i for i in range(1, len(keys)) if keys[i] != keys[i - 1] and keys[i] in keys[:i]]
    if not back:
        assert [sample["__key__"] for sample in by_us(content)] == list(dict.fromkeys(keys))
        return
    error = error_of(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        offset = tar.getmembers()[back[0]].offset_data - 512
    assert (error.key, error.offset) == (keys[back[0]], offset)


# Hidden files


@pytest.mark.parametrize("top", ["", "./", "a/b/"])
def test_what_a_mac_puts_beside_files_and_other_hidden_files_are_passed_over_and_counted(top: str) -> None:
    files = [(f"{top}d/000{i}.{end}", b"%d" % i) for i in range(3) for end in ("cls", "txt")]
    hidden = [f"{top}d/.DS_Store", f"{top}._d", f"{top}__MACOSX/d/0000.txt", f"{top}__MACOSX/._d"]
    hidden += [f"{posixpath.dirname(name)}/._{posixpath.basename(name)}" for name, _ in files]
    between = [(name, payload) for file in files for name, payload in ((hidden.pop(), SIDECAR), file)]
    content = tar_of([*((name, SIDECAR) for name in hidden), *between])
    assert by_us(content) == by_us(tar_of(files))
    scan = scan_of(TAR, content, "a.tar")
    assert json.loads(scan.footer)["passed_over"] == 10


def test_hidden_files_do_not_count_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_samples, "_MAX_COLUMNS", 1)
    members = [(f"d/{mark}{i:05d}.txt", b"") for i in range(70) for mark in ("._", "")]
    scan = scan_of(TAR, tar_of(members), "a.tar")
    assert (int(scan.num_samples.sum()), list(scan.schema)) == (70, ["txt"])


# Links


def linked(files: list[tuple[str, str | bytes, bytes]], fmt: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of names with payloads, or with targets and the type of the link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt) as tar:
        for name, what, kind in files:
            member = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
            else:
                member.type, member.linkname = kind, what
                tar.addfile(member)
    return out.getvalue()


def as_extracted(content: bytes) -> dict[str, bytes] | None:
    """What the files of an archive hold, by tarfile; None where a link leads nowhere."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        try:
            return {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
        except (KeyError, RecursionError):
            return None


HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE
places = ["a", "b", "d/a", f"d/{LONG}", "e/f/a"]
entries = st.lists(
    st.tuples(
        st.sampled_from(["a", "../a", "./b", "d/a", f"d/{LONG}.x", "../d/a", "f/../a", "e/f/a", "no"]),
        st.sampled_from([HARD, SYMBOLIC, b"", b""]),
        st.integers(0, 3000),
    ),
    max_size=5,
)


@given(
    entries,
    st.sampled_from([1, 4000, 1 << 20]),
    st.sampled_from(["a.tar", "a.tar.gz"]),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
@example([("", b"", 900), ("a.x", HARD, 0)], 1, "a.tar", tarfile.GNU_FORMAT)
def test_a_link_is_the_bytes_of_the_file_that_it_points_to(
    entries: list[tuple[str, bytes, int]], block_bytes: int, url: str, fmt: int
) -> None:
    files = [
        (f"{place}.x", f"{target.removesuffix('.x')}.x" if kind else place[:1].encode() * size, kind)
        for place, (target, kind, size) in zip(places, entries, strict=False)
    ]
    content = linked(files, fmt)
    expected, stored = as_extracted(content), COMPRESS[url](content)
    if expected is None:
        assert "link to" in error_of(stored, url).reason
        return
    assert {f"{one['__key__']}.x": one["x"] for one in by_us(stored, url, block_bytes)} == expected


def test_a_link_to_a_member_of_another_block_is_kept_with_the_index_once_a_block() -> None:
    names = [f"{i:03d}.x" for i in range(100)]
    content = linked([(names[0], b"v" * 1000, b""), *((name, names[0], HARD) for name in names[1:])])
    scan = scan_of(TAR, content, "a.tar", 20 * 512)
    assert (scan.nbytes - scan.length).tolist() == [0, *[1000] * (len(scan.nbytes) - 1)]
    blocks = blocks_of(scan, shard_of(content, "a.tar"))
    assert len(blocks) > 3
    for block in blocks:
        TAR.check(block)
        assert TAR.locate(block, ["x"]) is None
        assert (TAR.value_bytes(block, "x") == 1000).all()


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_sample_begins_at_the_header_of_its_first_file_or_of_its_first_link(fmt: int) -> None:
    long = f"d/{LONG}.x"
    content = linked([(long, b"v", b""), ("b.x", long, HARD), ("b.y", b"z", b""), ("c.x", "b.y", HARD)], fmt)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        headers = {one.name: one.offset_data - 512 for one in tar}
    (block,) = blocks_of(scan_of(TAR, content, "a.tar"), shard_of(content, "a.tar"))
    assert TAR.sample_offsets(block, None).tolist() == [headers[long], headers["b.y"], headers["c.x"]]


def test_links_from_block_to_block_to_more_than_a_catalog_should_hold_name_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tar_format, "_MOST_COPIED_BYTES", 1 << 20)
    big = [(f"{i}.x", bytes(400_000), b"") for i in range(3)]
    content = linked([*big, *((f"l{i}.x", f"{i}.x", HARD) for i in range(3))])
    with pytest.raises(CorruptShardError, match="--hard-dereference") as caught:
        scan_of(TAR, content, "a.tar", 1)
    assert caught.value.key == "l2"
    assert scan_of(TAR, content, "a.tar", 1 << 30).num_samples.sum() == 6  # all in one block


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("elsewhere.x", HARD, "a hard link to 'elsewhere.x'.*before it.*`tar --hard-dereference`"),
        ("z.x", HARD, "a hard link to 'z.x'.*before it"),
        ("../e.x", SYMBOLIC, "a symbolic link to '../e.x'.*no file of this archive.*`tar --dereference`"),
        ("b.x", SYMBOLIC, "a symbolic link to 'b.x', which leads back to it"),
    ],
)
def test_a_link_that_leads_nowhere_is_named_with_the_option_of_tar_that_avoids_it(
    target: str, kind: bytes, words: str
) -> None:
    content = linked([("a.x", b"1", b""), ("b.x", target, kind), ("z.x", b"2", b"")])
    with pytest.raises(CorruptShardError, match=words) as caught:
        scan_of(TAR, content, "a.tar")
    assert (caught.value.key, caught.value.offset) == ("b", 1024)


def test_links_without_a_key_need_no_target() -> None:
    content = linked([("latest", "nowhere", SYMBOLIC), (".x.y", "nowhere", HARD), ("a.x", b"1", b"")])
    assert by_us(content) == [{"__key__": "a", "x": b"1"}]


@pytest.mark.parametrize("kind", [HARD, SYMBOLIC])
def test_a_link_with_a_size_has_no_payload(kind: bytes) -> None:
    content = bytearray(linked([("a.x", b"12345", b""), ("b.x", "a.x", kind), ("b.y", b"6", b"")]))
    content[1024 + 124 : 1024 + 136] = b"00000011610\0"
    content[1024 + 148 : 1024 + 156] = b" " * 8
    content[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(content[1024:1536])
    assert by_us(bytes(content))[1] == {"__key__": "b", "x": b"12345", "y": b"6"}


def test_an_unfinished_archive_may_have_links() -> None:
    content = linked([("a.x", b"1", b""), ("b.x", "a.x", HARD), ("c.x", b"3" * 900, b"")])
    samples = by_us(content[: 1024 + 512 + 600], allow_unfinished=True)
    assert [sample["x"] for sample in samples] == [b"1", b"1"]
    assert scan_of(TarFormat(allow_unfinished=True), content[:1400], "a.tar").num_samples.sum() == 1
