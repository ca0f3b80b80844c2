"""Errors as values: what they are instances of, and that they survive a pickle."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path

import pytest

import dataflow
from dataflow import CorruptShardError, DataflowError, SampleError, ShardChangedError, ShardReadError

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"
_KINDS = [ShardReadError, ShardChangedError, CorruptShardError, SampleError]


@pytest.mark.parametrize("kind", _KINDS)
def test_an_error_of_a_shard_keeps_its_fields_through_a_pickle(kind: type[dataflow.ShardError]) -> None:
    error = kind("s3://b/x.tar", "it is cut", 512, "k7", "read")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    for one in (error, copy):
        assert (one.shard, one.reason, one.offset, one.key, one.stage) == one.args
        assert one.args == ("s3://b/x.tar", "it is cut", 512, "k7", "read")
        assert str(one) == "s3://b/x.tar, byte 512, sample 'k7': it is cut (stage: read)"


def test_a_shard_that_cannot_be_read_is_an_oserror_of_that_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such file") as caught:
        dataflow.ShardedDataset(tmp_path / "none.tar")
    error = caught.value
    assert isinstance(error, ShardReadError)
    assert (error.errno, error.filename, error.strerror) == (None, error.shard, error.reason)


def test_errors_on_their_page_can_be_imported_from_dataflow() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \| (.*) \|$", _PAGE.read_text(), re.MULTILINE)
    names = [name for name, when in rows if not when.startswith(("internal", "`dataflow.testing"))]
    assert len(names) > 10
    for name in names:
        assert issubclass(getattr(dataflow, name), DataflowError)


@pytest.mark.parametrize("given", [False, True])
def test_a_catalog_that_cannot_be_kept_is_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """The shards are indexed, and that is all that training needs."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with dataflow.ShardWriter(f"{tmp_path}/%d.tar", max_count=1) as writer:
        for number in range(2):
            writer.write({"__key__": str(number), "x.cls": number})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("0.tar", "1.tar", "0.tar"):
            catalog = tmp_path / "file" / f"{name}.catalog" if given else None
            assert len(dataflow.ShardedDataset(tmp_path / name, catalog=catalog)) == 1
    (warning,) = caught
    text = str(warning.message)
    assert re.match(rf"catalogs cannot be kept in {tmp_path}/file.* \(.+\): shards are indexed again", text)
