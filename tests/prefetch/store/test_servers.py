"""Real stores (nginx, Ceph radosgw, Azurite): the samples are those of local files, through a restart too."""

from __future__ import annotations

import gc
import io
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameters_kit import others_in_full
from servers_kit import SERVERS, Store

from dataflow import DataLoader, ShardedDataset
from prefetch.retries import RetryPolicy
from prefetch.store.reader import StoreReader
from sharding.catalog.storage import open_url, shard_info, shard_of
from sharding.errors import ShardChangedError, ShardReadError

pytestmark = [
    pytest.mark.timeout(240),
    # adlfs and aiobotocore leave sessions to be closed by garbage collection.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_SHARDS, PER_SHARD = 3, 40
CONTENT = np.random.default_rng(0).bytes(300_000)


def tar_of(shard: int) -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(shard)
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(PER_SHARD):
            for extension, data in (("bin", rng.bytes(5000)), ("cls", b"%d" % (shard * PER_SHARD + i))):
                member = tarfile.TarInfo(f"{i:04d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    for shard in range(NUM_SHARDS):
        (folder / f"x-{shard}.tar").write_bytes(tar_of(shard))
    return folder


@pytest.fixture(scope="module", params=others_in_full(SERVERS, "nginx", "azurite"))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as store:
        for shard in range(NUM_SHARDS):
            store.put(f"x-{shard}.tar", tar_of(shard))
        store.put("plain.bin", CONTENT)
        yield store
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()


def samples(source: str, catalog: Path, options: dict[str, Any]) -> list[tuple[int, bytes]]:
    dataset = ShardedDataset(
        source, decode={"bin": None, "cls": "int"}, storage_options=options, catalog=str(catalog)
    )
    found = []
    with DataLoader(dataset, 16, shuffle=True, seed=5) as loader:
        for batch in loader:
            found += [(int(label), batch["bin"][i].numpy().tobytes()) for i, label in enumerate(batch["cls"])]
    return found


def shard_in(store: Store, name: str) -> Any:
    url = f"{store.url}/{name}"
    return shard_of(url, shard_info(url, *open_url(url, store.options)))


@pytest.mark.one_in(2)
def test_a_pattern_gives_the_same_samples_in_the_same_order_as_locally(
    store: Store, local: Path, tmp_path: Path
) -> None:
    wanted = samples(f"{local}/x-*.tar", tmp_path / "local.catalog", {})
    assert len(wanted) == NUM_SHARDS * PER_SHARD
    assert samples(f"{store.url}/{store.names}", tmp_path / "remote.catalog", store.options) == wanted


@pytest.mark.one_in(2)
def test_a_server_that_is_killed_and_comes_back_costs_no_sample(store: Store) -> None:
    shard = shard_in(store, "plain.bin")
    down = []

    def wait(seconds: float) -> bool:
        if not down:
            down.append(seconds)
            store.revive()
        return False

    reader = StoreReader(store.options, policy=RetryPolicy(base_s=0.01), wait=wait)
    out = np.zeros(len(CONTENT), np.uint8)
    reader.read_into(shard, 0, out)
    store.kill()
    out[:] = 0
    reader.read_into(shard, 0, out)
    assert out.tobytes() == CONTENT
    assert down
    assert reader.stats().retries > 0


def test_an_object_that_was_written_anew_is_noticed_by_its_etag(store: Store) -> None:
    store.put("changing.bin", CONTENT)
    shard, reader = shard_in(store, "changing.bin"), StoreReader(store.options)
    assert shard.version.startswith("etag:")
    store.put("changing.bin", CONTENT[::-1])
    with pytest.raises(ShardChangedError, match="etag"):
        reader.read_into(shard, 0, np.zeros(1000, np.uint8))


def test_wrong_credentials_are_refused_at_once_and_the_error_says_so(store: Store) -> None:
    if not store.wrong:
        pytest.skip("anybody may read from it")
    shard = shard_in(store, "plain.bin")
    with pytest.raises(ShardReadError, match=r"(?i)permission denied|authenticat|forbidden"):
        StoreReader(store.wrong).read_into(shard, 0, np.zeros(1000, np.uint8))
