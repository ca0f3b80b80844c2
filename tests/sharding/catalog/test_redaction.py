"""Passwords and signatures of URLs are in no error, warning, catalog, state, figure or page."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import yarl
from click.testing import CliRunner
from http_kit import RangeServer, serving
from parameters_kit import others_in_full

from dataflow import Cache, DataLoader, ShardedDataset, ShardWriter
from dataflow.sources.listing.expand import expand
from dataflow.telemetry.timing import VARIABLE
from dataflow.tools.cli import main
from prefetch.cache.entry import tag_of
from prefetch.store.retrier import Retrier, notice_of
from sharding.blocks import Shard
from sharding.catalog.build import default_catalog_path
from sharding.catalog.storage import failure_text, open_url
from sharding.catalog.table import Catalog
from sharding.errors import DataflowError, ShardError, ShardReadError
from sharding.formats import resolve_format
from sharding.http_status import StatusError
from sharding.redaction import has_unquoted_password, hide_secrets, identity_of, without_secrets

SIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AK%2F20261001%2Fus%2Fs3%2Faws4_request"
    "&X-Amz-Date=20261001T000000Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature=0123cafe"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h/x.tar", "http://h/x.tar"),
        ("http://user:pa55@h:8/x.tar", "http://h:8/x.tar"),
        ("http://me@corp.com:pa55@h/x.tar", "http://h/x.tar"),
        ("https://ghp_t0ken@h/x.tar", "https://h/x.tar"),
        ("ftp://user:pa55@h/x.tar", "ftp://user@h/x.tar"),
        ("sftp://user@h/x.tar", "sftp://user@h/x.tar"),
        ("http://user:pa/55@h/x.tar", "http://h/x.tar"),
        ("http://h:80/a@2.tar", "http://h:80/a@2.tar"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/n/k@x.tar", "s3://arn:aws:s3:us-west-2:1:accesspoint/n/k@x.tar"),
        ("s3://b/x.tar?versionId=abc", "s3://b/x.tar?versionId=abc"),
        (f"https://b.s3.amazonaws.com/x.tar?{SIGNED}", "https://b.s3.amazonaws.com/x.tar"),
        (f"https://h/x.tar?{SIGNED}&partNumber=2", "https://h/x.tar?partNumber=2"),
        ("https://h/x.tar?AWSAccessKeyId=AK&Signature=s%3D&Expires=17", "https://h/x.tar"),
        ("https://h/x.tar?Expires=17&Signature=s~&Key-Pair-Id=K&Policy=e", "https://h/x.tar"),
        ("https://h/x.tar?GoogleAccessId=a@b.iam&Expires=17&Signature=s", "https://h/x.tar"),
        ("https://h/x.tar?X-Goog-Signature=s&X-Goog-Date=1", "https://h/x.tar"),
        ("https://a.blob.core.windows.net/c/x.tar?sv=1&st=2&se=3&sr=b&sp=r&sig=a%2Fb%3D", "https://a.blob.core.windows.net/c/x.tar"),
        ("https://h/get?file=x.tar&accessToken=t", "https://h/get?file=x.tar"),
        ("https://h/get?st=3&sp=x.tar&key=data/x.tar", "https://h/get?st=3&sp=x.tar&key=data/x.tar"),
        ("https://h/get?file=x.tar&key=AIzaSyD1234567890", "https://h/get?file=x.tar"),
        ("https://h/x.tar?md5=abc&expires=17", "https://h/x.tar"),
        ("https://h/x.tar?tokens=512&tokenizer=g", "https://h/x.tar?tokens=512&tokenizer=g"),
        ("simplecache::https://u:p@h/x.tar?token=t", "simplecache::https://h/x.tar"),
        ("url='http://h/x?sig=a' (http://u:p@h/y?token=b). Why?", "url='http://h/x' (http://h/y). Why?"),
    ],
)  # fmt: skip
def test_a_text_has_its_urls_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


def test_a_local_file_may_be_called_anything() -> None:
    assert identity_of("/data/x.tar?token=1") == "/data/x.tar?token=1"


@pytest.mark.parametrize("url", ["http://user:pa/55@h/x.tar", "http://user:p?a@h/x.tar"])
def test_a_password_that_a_client_would_take_for_a_port_is_refused(url: str) -> None:
    assert has_unquoted_password(url)
    with pytest.raises(ValueError, match="has '/', '\\?' and '#' as %2F") as caught:
        expand(url)
    assert "p?a" not in str(caught.value)
    assert "55" not in str(caught.value)


# ---- errors ------------------------------------------------------------------------------------------------

SECRET = "cafe55"
URL = f"http://user:{SECRET}@127.0.0.1:9/x.tar?X-Amz-Signature={SECRET}"


def printed(error: BaseException) -> str:
    """All that Python prints of it, causes and notes included; and what another process gets."""
    return (
        "".join(traceback.format_exception(error))
        + repr(error)
        + repr(pickle.loads(pickle.dumps(error)).args)
    )


def response_error() -> Exception:
    """As aiohttp raises it: the URL is no argument of it."""
    request = aiohttp.RequestInfo(yarl.URL(URL), "GET", None, yarl.URL(URL))  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(request, (), status=403, message="Forbidden")


@pytest.mark.parametrize(
    "make",
    [
        lambda: FileNotFoundError(URL),
        lambda: FileNotFoundError(2, "No such file", URL),
        lambda: ValueError("refused", URL),
        response_error,
    ],
)
def test_a_cause_keeps_its_type_and_loses_its_secrets(make: Callable[[], Exception]) -> None:
    error, kind, status = make(), type(make()), getattr(make(), "status", None)
    error.__context__ = ConnectionError(f"while asking {URL}")
    reason = failure_text(error)
    ours = ShardReadError(URL, reason)
    ours.__cause__ = error
    assert SECRET not in printed(ours)
    assert "http://127.0.0.1:9/x.tar" in printed(ours)
    assert isinstance(error, kind)
    assert getattr(error, "status", None) == status


def test_of_a_very_long_text_the_beginning_is_kept() -> None:
    error = ValueError("no head: " + "x" * 1_000_000)
    error.__context__ = aiohttp.http_exceptions.BadStatusLine("x" * 1_000_000)
    assert failure_text(error).startswith("cannot be read: ValueError: no head: xxx")
    assert len(printed(error)) < 20_000


def test_hiding_ends_though_causes_go_round() -> None:
    error = ValueError(URL)
    error.__cause__ = KeyError()
    error.__cause__.__cause__ = error
    hide_secrets(error)
    assert SECRET not in str(error)


@pytest.mark.parametrize(
    "make", [lambda: DataflowError(f"no samples in {URL}"), lambda: ShardError(URL, URL)]
)
def test_errors_of_ours_are_made_without_secrets(make: Callable[[], DataflowError]) -> None:
    assert SECRET not in printed(make())


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ([URL, URL], ValueError),
        ([URL, URL.replace("Signature", "Credential")], ValueError),
        (URL.replace("x.tar", "*.tar"), ValueError),
        (URL.replace("x.tar", "{0..3"), ValueError),
        (URL.replace("127.0.0.1", "[::1]"), ValueError),
        (URL.replace("http", "nosuch"), ValueError),
        (f"filecache::{URL}", ValueError),
        (URL.replace("x.tar", "x.odd"), ValueError),
        ([URL, URL.replace("x.tar", "x.jsonl")], ValueError),
        ({URL}, ValueError),
        (URL.replace(":9/", ":99999/"), ShardReadError),
    ],
)
def test_no_refused_source_is_shown_with_its_secrets(source: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        ShardedDataset(source)
    assert SECRET not in printed(caught.value)


def test_what_opens_no_url_says_so_without_secrets() -> None:
    with pytest.raises(ValueError, match="nosuch") as caught:
        open_url(URL.replace("http", "nosuch"))
    assert SECRET not in printed(caught.value)


def test_what_is_waited_for_is_told_without_secrets() -> None:
    assert SECRET not in notice_of(URL, "no answer yet", 3.0, 2)
    waited = threading.Event()

    def wait(_: float) -> bool:
        waited.set()
        return True

    with Retrier(wait=wait) as retrier, pytest.raises(StatusError):
        retrier(call_that_fails, URL)
    assert waited.is_set()


def call_that_fails() -> None:
    raise StatusError(503, URL)


# ---- a store that asks for them ----------------------------------------------------------------------------

NUM_SAMPLES = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed")
    noise = np.random.default_rng(1)
    with ShardWriter(str(folder / "x-{:02d}.tar"), max_count=30) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:06d}", "bin": noise.bytes(2000), "cls": i})
    return folder


class SigningServer(RangeServer):
    """Serves those whose signature is valid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_read = lambda query, authorization: f"X-Amz-Signature={self.valid}" in query
        self.valid = f"{SECRET}1"

    def urls(self) -> list[str]:
        return [f"{self.url}/x-{i:02d}.tar?X-Amz-Date=1&X-Amz-Signature={self.valid}" for i in range(3)]


@pytest.fixture
def server(folder: Path) -> Iterator[SigningServer]:
    with serving(SigningServer(folder)) as server:
        assert isinstance(server, SigningServer)
        yield server


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user"


def labels(dataset: ShardedDataset, **options: Any) -> list[int]:
    with DataLoader(dataset, 10, shuffle=True, seed=3, **options) as loader:
        return [label for batch in loader for label in batch["cls"].tolist()]


def assert_holds_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert SECRET not in path.name
        assert path.is_dir() or not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_kept_catalog_serves_renewed_signatures(
    server: SigningServer, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dataflow")
    first = ShardedDataset(server.urls(), cache=Cache(kept / "blocks"))
    order = labels(first)
    assert sorted(order) == list(range(NUM_SAMPLES))
    state = DataLoader(first, 10, shuffle=True).state_dict()
    server.valid = f"{SECRET}2"
    server.asked.clear()
    renewed = ShardedDataset(server.urls(), cache=Cache(kept / "blocks"))
    assert {one.method for one in server.asked} == {"HEAD"}, "indexed again"
    server.asked.clear()
    assert labels(renewed) == order
    assert [one for one in server.asked if one.nbytes >= 32 << 10] == [], "the cache was not used"
    loader = DataLoader(renewed, 10, shuffle=True)
    loader.load_state_dict(state)
    assert SECRET not in json.dumps(state) + caplog.text
    assert SECRET not in repr(renewed.catalog.shard(0)) + repr(renewed.catalog) + repr(loader.stats())
    assert_holds_no_secret(kept)


def test_what_clients_log_of_the_urls_that_they_ask_has_no_signatures(
    server: SigningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("fsspec.http").filters.clear()
    fs, path = open_url(server.urls()[0])
    assert fs.info(path)["size"] > 0
    assert "x-00.tar" in caplog.text
    assert SECRET not in caplog.text


def test_a_catalog_of_other_signatures_has_the_same_place() -> None:
    codec = resolve_format("tar", ())
    paths = {default_catalog_path([f"http://h/x.tar?sig={i}&file=1"], codec) for i in range(3)}
    assert len(paths) == 1
    assert paths != {default_catalog_path(["http://h/x.tar?file=2"], codec)}


def test_a_cached_block_is_named_without_the_signature() -> None:
    assert (
        len({tag_of(Shard("http://h/x.tar", 5, "etag:1", f"http://h/x.tar?sig={i}")) for i in range(3)}) == 1
    )


def test_the_list_of_skipped_samples_has_no_signatures(server: SigningServer, kept: Path) -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] % 2:
            raise ValueError(f"cannot be meant: {server.urls()[0]}")
        return sample

    dataset = ShardedDataset(server.urls(), transform=refuse, on_error="skip")
    with DataLoader(dataset, 10) as loader:
        list(loader)
        assert server.url in loader.stats().skipped[0]
        assert SECRET not in repr(loader.stats())


def test_an_expired_signature_is_refused_without_being_shown(server: SigningServer, kept: Path) -> None:
    dataset = ShardedDataset(server.urls())
    server.valid = f"{SECRET}2"
    with (
        DataLoader(dataset, 10) as loader,
        pytest.raises(ShardReadError, match="permission denied") as caught,
    ):
        list(loader)
    assert SECRET not in printed(caught.value)
    assert caught.value.shard.startswith(server.url)
    old, server.valid = server.urls(), f"{SECRET}3"
    with pytest.raises(ShardReadError, match="permission denied") as caught:
        ShardedDataset(old)
    assert SECRET not in printed(caught.value)


def test_a_catalog_alone_says_that_it_has_no_signatures(server: SigningServer, tmp_path: Path) -> None:
    path = str(tmp_path / "x.catalog")
    made = ShardedDataset(server.urls(), catalog=path)
    with pytest.raises(ShardReadError, match="permission denied") as caught:
        ShardedDataset(path)
    assert "if its URLs were signed, give them again, and catalog=" in caught.value.__notes__[0]
    assert sorted(labels(ShardedDataset(server.urls(), catalog=path))) == list(range(NUM_SAMPLES))
    assert sorted(labels(ShardedDataset(server.urls(), catalog=Catalog.load(path)))) == list(
        range(NUM_SAMPLES)
    )
    assert sorted(labels(pickle.loads(pickle.dumps(made)))) == list(range(NUM_SAMPLES))
    assert made[5]["cls"] == 5


def test_shards_beside_a_catalog_are_opened_with_its_password(folder: Path, tmp_path: Path) -> None:
    with serving(RangeServer(folder)) as server:
        server.may_read = lambda query, authorization: authorization.startswith("Basic ")
        host = f"http://user:{SECRET}@127.0.0.1:{server.server_port}"
        made = ShardedDataset(f"{host}/x-{{00..02}}.tar", catalog=str(tmp_path / "y.catalog"))
        beside = Catalog.load(str(tmp_path / "y.catalog"))
        made.catalog.save(str(folder / "local.catalog"))
        ShardedDataset(str(folder), catalog=str(folder / "z.catalog"))
        dataset = ShardedDataset(f"{host}/z.catalog")
        assert sorted(labels(dataset)) == list(range(NUM_SAMPLES))
        assert SECRET not in "".join(dataset.catalog.urls + beside.urls)


@pytest.mark.parametrize(
    "command",
    others_in_full(
        (
            "index",
            "inspect --json found.json",
            "bench storage --json found.json --seconds 0.05 --in-flight 1",
            'bench loader --json found.json --seconds 0.05 --compute-ms 1 --storage-option headers={"X":"cafe55"}',  # noqa: E501
            "bench compare --json found.json --seconds 0.05 --workers 0",
        ),
        "index",
        "inspect --json found.json",
    ),
)
def test_commands_neither_print_nor_write_secrets(
    server: SigningServer, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(main, [*command.split(), *server.urls()])
    assert run.exit_code == 0, run.output
    assert SECRET not in run.output
    assert_holds_no_secret(tmp_path)


def test_a_page_of_the_doctor_has_no_secrets(
    server: SigningServer, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records"))
    (tmp_path / "records").mkdir()
    labels(ShardedDataset(server.urls()))
    files = ["--html", "page.html", "--json", "page.json", "--trace", "trace.json"]
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(main, ["doctor", "--folder", str(tmp_path / "records"), *files])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "page.html").exists()
    assert SECRET not in run.output
    assert_holds_no_secret(tmp_path)


# ---- what is this user's -----------------------------------------------------------------------------------


def test_files_of_a_cache_are_its_users(
    server: SigningServer, kept: Path, tmp_path: Path, open_umask: None
) -> None:
    (tmp_path / "disk").mkdir()
    labels(ShardedDataset(server.urls(), cache=Cache(tmp_path / "disk" / "blocks")))
    made = [path for path in [kept, *kept.rglob("*"), *(tmp_path / "disk").rglob("*")] if path.exists()]
    assert {path.suffix for path in made} >= {".catalog"}
    assert any("-cache-1/blocks/" in str(path) and path.is_file() for path in made)
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {path: mode for path, mode in modes.items() if mode & 0o077} == {}
    assert all(mode == (0o700 if Path(path).is_dir() else 0o600) for path, mode in modes.items())
    assert stat.S_IMODE((tmp_path / "disk").stat().st_mode) == 0o777, "it was there"


def test_a_catalog_whose_place_is_named_is_as_readable_as_other_files(
    server: SigningServer, tmp_path: Path, open_umask: None
) -> None:
    path = tmp_path / "shared" / "x.catalog"
    ShardedDataset(server.urls(), catalog=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)
