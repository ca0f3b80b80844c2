"""Datasets on a Hub of our own (tests/kits/hub_server.py): what is asked of it, and what goes wrong."""

from __future__ import annotations

import io
import json
import random
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hub_server import ROWS, TOKEN, Answer, HubServer, Repo, Request, parquet, shards

from dataflow import Cache, DataLoader, RetryPolicy, ShardChangedError, ShardedDataset, ShardReadError
from dataflow.actors.reading import only_read
from prefetch.http import hub as store_hub
from sharding.errors import DataflowError
from sharding.hub import answers, snapshot

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.timeout(60)

NAME = "hf://datasets/org/name"


def arrow(first: int) -> bytes:
    out, table = io.BytesIO(), pa.table({"n": np.arange(first, first + ROWS)})
    with pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def jsonl(first: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(first, first + ROWS))


def tar(first: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for n in range(first, first + ROWS):
            member = tarfile.TarInfo(f"{n:06d}.n")
            body = str(n).encode()
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def as_another_process() -> None:
    """Forget what this process knows of listings."""
    snapshot._known.clear()


def numbers(dataset: ShardedDataset, column: str = "n", **options: Any) -> list[int]:
    with DataLoader(dataset, batch_size=7, **options) as loader:
        return [int(n) for batch in loader for n in batch[column]]


def kinds(hub: HubServer) -> dict[str, int]:
    return {kind: len(hub.of_kind(kind)) for kind in ("api", "resolve", "content")}


# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ending"), [(parquet, "parquet"), (arrow, "arrow"), (jsonl, "jsonl"), (tar, "tar")]
)
def test_all_rows_of_a_split_are_read_once(hub: HubServer, make: Any, ending: str) -> None:
    files = {**shards(make, ending), **shards(make, ending, 1, "test")}
    hub.repos["org/name"].commit(files)
    decode = {"decode": {"n": "int"}} if ending == "tar" else {}
    dataset = ShardedDataset(NAME, split="train", **decode)
    assert sorted(numbers(dataset, shuffle=True)) == list(range(4 * ROWS))


def test_config_and_revision_choose_the_files(hub: HubServer) -> None:
    configs = b"- {config_name: a, data_files: a.parquet}\n- {config_name: b, data_files: b.parquet}\n"
    readme = b"---\nconfigs:\n" + configs + b"---\n"
    repo = hub.repos["org/name"]
    old = repo.commit({"a.parquet": parquet(0), "b.parquet": parquet(100), "README.md": readme})
    repo.commit(
        {"a.parquet": parquet(200), "b.parquet": parquet(300), "README.md": readme}, branch="refs/pr/1"
    )
    assert numbers(ShardedDataset(NAME, config="b", revision=old))[0] == 100
    assert numbers(ShardedDataset(NAME, config="b"))[0] == 100
    assert numbers(ShardedDataset(NAME, config="b", revision="refs/pr/1"))[0] == 300
    assert numbers(ShardedDataset(f"{NAME}@refs/pr/1", config="a"))[0] == 200
    with pytest.raises(ValueError, match="config must be one of a, b"):
        ShardedDataset(NAME)


def test_files_of_a_repository_can_be_spelled_out(hub: HubServer) -> None:
    assert len(ShardedDataset(f"{NAME}/data/train-0000{{1..2}}-of-00004.parquet")) == 2 * ROWS
    assert len(ShardedDataset(f"{NAME}/data/*-00000-*.parquet")) == ROWS
    assert len(ShardedDataset([f"{NAME}/data/train-00003-of-00004.parquet"])) == ROWS
    assert len(ShardedDataset(f"{NAME}/data/train-00003-of-00004.parquet")) == ROWS


def test_sets_that_are_not_whole_are_an_error(hub: HubServer) -> None:
    files = dict(list(shards(parquet, "parquet").items())[1:])
    hub.repos["org/name"].commit(files)
    with pytest.raises(ShardReadError, match=r"holds 3 shards .*train-\*-of-00004: 00000 are not there"):
        ShardedDataset(NAME, split="train")
    hub.repos["org/name"].commit(
        {**shards(parquet, "parquet"), "data/train-00000-of-00002.parquet": parquet(0)}
    )
    with pytest.raises(ShardReadError, match=r"-of-00002 beside -of-00004, of two writings"):
        ShardedDataset(NAME, split="train")


def test_what_was_saved_to_disk_is_what_its_own_list_says(hub: HubServer) -> None:
    """Of `datasets`' `save_to_disk`: neither old shards nor files of its cache count."""
    listed = json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0"})
    names = ("data-00000-of-00001.arrow", "data-00001-of-00002.arrow", "cache-1f.arrow")
    files: dict[str, bytes] = {"dataset_dict.json": b'{"splits": ["mine", "other"]}'}
    for number, split in enumerate(("mine", "other")):
        files |= {f"{split}/{name}": arrow(100 * number + at) for at, name in enumerate(names)}
        files[f"{split}/state.json"] = listed.encode()
    hub.repos["org/saved"] = Repo()
    hub.repos["org/saved"].commit(files)
    for first, split in ((0, "mine"), (100, "other")):
        assert numbers(ShardedDataset("hf://datasets/org/saved", split=split)) == list(
            range(first, first + ROWS)
        )
    assert len(ShardedDataset("hf://datasets/org/saved/mine")) == ROWS


def test_a_folder_with_the_layout_of_the_hub_is_read_alike(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("test", 100)):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}-00000-of-00001.parquet").write_bytes(parquet(first))
    assert numbers(ShardedDataset(tmp_path, split="test"))[0] == 100
    with pytest.raises(ValueError, match="split must be one of train, test"):
        ShardedDataset(tmp_path)
    (tmp_path / "data" / "test-00000-of-00001.parquet").unlink()
    assert len(ShardedDataset(str(tmp_path))) == ROWS


def test_single_samples_are_read(hub: HubServer) -> None:
    assert ShardedDataset(NAME)[25]["n"] == 25


# ---- what is asked -----------------------------------------------------------------------------------------


@pytest.mark.reads_here
def test_a_first_opening_asks_once_for_the_listing_and_once_for_each_address(hub: HubServer) -> None:
    numbers(ShardedDataset(NAME))
    assert kinds(hub)["api"] == 1
    resolved = [one.path for one in hub.of_kind("resolve")]
    assert len(resolved) == len(set(resolved)) == 4 + 1  # the README


def test_a_later_opening_asks_one_request_and_nothing_of_its_files(hub: HubServer) -> None:
    ShardedDataset(NAME)
    hub.forget()
    as_another_process()
    ShardedDataset(NAME)
    assert kinds(hub) == {"api": 1, "resolve": 0, "content": 0}


def test_a_commit_that_was_listed_before_asks_nothing(hub: HubServer) -> None:
    commit = hub.repos["org/name"].branches["main"]
    ShardedDataset(NAME, revision=commit)
    hub.forget()
    as_another_process()
    ShardedDataset(NAME, revision=commit)
    assert kinds(hub) == {"api": 0, "resolve": 0, "content": 0}


def test_the_ranks_of_a_machine_ask_one_request_and_agree_on_the_commit(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")
    first = ShardedDataset(NAME)
    hub.repos["org/name"].commit(shards(parquet, "parquet", 2))  # the branch moves between two ranks
    for _ in range(8):
        as_another_process()
        assert ShardedDataset(NAME).commit == first.commit
    assert kinds(hub)["api"] == 1
    monkeypatch.setenv("MASTER_PORT", "2")
    assert len(ShardedDataset(NAME)) == 2 * ROWS


def test_ranks_of_several_machines_share_the_listing_by_the_store(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for machine in range(4):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{machine}"))
            as_another_process()
            assert len(ShardedDataset(NAME)) == 4 * ROWS
    finally:
        dist.destroy_process_group()
    assert kinds(hub)["api"] == 1


@pytest.mark.reads_here
def test_the_first_batch_comes_two_round_trips_after_the_listing(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ShardedDataset(NAME)
    monkeypatch.setattr(store_hub, "_of_loops", WeakKeyDictionary())  # no addresses are known
    hub.forget()
    trips = {"resolve": threading.Barrier(4), "content": threading.Barrier(4)}

    def hold(request: Request) -> Answer | None:
        """Answer when all of the same round trip have come."""
        if request.kind in trips:
            try:
                trips[request.kind].wait(20)
            except threading.BrokenBarrierError:
                return Answer(500)
        return None

    hub.fault = hold
    with DataLoader(ShardedDataset(NAME), batch_size=7, shuffle=True, timeout=15) as loader:
        assert len(next(iter(loader))["n"]) == 7
    assert kinds(hub) == {"api": 1, "resolve": 4, "content": 4}


def test_a_long_list_is_asked_page_by_page(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_COMPLETE_BELOW", 3)
    hub.page = 3
    assert sorted(numbers(ShardedDataset(NAME))) == list(range(4 * ROWS))
    assert kinds(hub)["api"] == 3  # the list, and two pages of files and folders


@pytest.mark.reads_here
def test_addresses_that_are_refused_in_mid_epoch_are_asked_anew_once(hub: HubServer) -> None:
    dataset = ShardedDataset(NAME)
    numbers(dataset)
    hub.forget()
    hub.key = b"another"
    assert sorted(numbers(dataset)) == list(range(4 * ROWS))
    resolved = [one.path for one in hub.of_kind("resolve")]
    assert len(resolved) == len(set(resolved)) == 4


def test_an_address_that_is_refused_when_new_is_an_error(hub: HubServer) -> None:
    dataset = ShardedDataset(NAME)
    hub.fault = lambda request: Answer(403) if request.kind == "content" else None
    with pytest.raises(ShardReadError, match="the address that the Hub gave refuses, twice: HTTP 403"):
        numbers(dataset)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "the Hub says HTTP 401 .*; the token is missing, has expired or may not read this"),
        (404, "the Hub says HTTP 404 .*: repository or commit are gone, or private"),
    ],
)
def test_a_hub_that_gives_no_address_is_an_error_with_its_cure(
    hub: HubServer, status: int, words: str
) -> None:
    hub.fault = lambda one: Answer(status) if one.kind == "resolve" and "parquet" in one.path else None
    with pytest.raises(ShardReadError, match=words):
        ShardedDataset(NAME)


@pytest.mark.reads_here
def test_the_cache_keeps_blocks_over_commits_that_leave_their_files(hub: HubServer, tmp_path: Path) -> None:
    big = {f"data/train-{i:05d}-of-00002.parquet": parquet(10_000 * i, 10_000) for i in range(2)}
    hub.repos["org/name"].commit(big)
    cache = Cache(str(tmp_path / "blocks"), limit="100 MB")
    first = numbers(ShardedDataset(NAME, cache=cache), shuffle=True)
    hub.repos["org/name"].commit({**big, "README.md": b"better words"})
    dataset = ShardedDataset(NAME, cache=cache)
    hub.forget()
    assert sorted(numbers(dataset, shuffle=True)) == sorted(first)
    assert kinds(hub)["content"] == 0


# ---- tokens ------------------------------------------------------------------------------------------------


def test_the_token_goes_to_the_hub_only_and_shows_nowhere(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repos["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    dataset = ShardedDataset(NAME, catalog=str(tmp_path / "saved.catalog"))
    with DataLoader(dataset, batch_size=7) as loader:
        state = [loader.state_dict() for _ in loader]
        stats = repr(loader.stats())
    assert {one.token for one in hub.of_kind("content")} == {""}
    assert {one.token for kind in ("api", "resolve") for one in hub.of_kind(kind)} == {TOKEN}
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert TOKEN.encode() not in kept
    assert b"Signature" not in kept
    assert TOKEN not in f"{dataset!r}{dataset.catalog!r}{state}{stats}"


def test_a_token_may_be_given(hub: HubServer) -> None:
    hub.repos["org/name"].private = True
    assert len(ShardedDataset(NAME, storage_options={"token": TOKEN})) == 4 * ROWS


def test_actors_ask_the_hub_that_the_training_process_asks_with_its_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    dataset = ShardedDataset(NAME, storage_options={"token": None})
    assert only_read(dataset).storage_options == {"endpoint": hub.url, "token": TOKEN}
    assert dataset.storage_options == {"token": None}
    monkeypatch.delenv("HF_TOKEN")
    assert only_read(dataset).storage_options == {"endpoint": hub.url, "token": None}


def test_a_repository_that_is_not_there_is_named(hub: HubServer) -> None:
    with pytest.raises(ShardReadError, match=r"org/nothing: no such dataset repository at .*HF_TOKEN"):
        ShardedDataset("hf://datasets/org/nothing")


def test_a_revision_that_is_not_there_is_named(hub: HubServer) -> None:
    with pytest.raises(ShardReadError, match="there is no revision 'v2' in org/name"):
        ShardedDataset(NAME, revision="v2")


def test_a_gated_repository_without_a_token_says_where_to_ask(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/name"].gated = True
    with pytest.raises(ShardReadError, match=r"gated; ask for access at .*/datasets/org/name \(no token"):
        ShardedDataset(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(ShardedDataset(NAME)) == 4 * ROWS


def test_a_token_that_expires_is_an_error_and_training_goes_on_with_a_new_one(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    dataset = ShardedDataset(NAME)
    with DataLoader(dataset, batch_size=ROWS) as loader:
        state = loader.state_dict()
    hub.tokens, hub.key = {"hf_new"}, b"another"  # addresses, too, have ended
    with (
        DataLoader(dataset, batch_size=ROWS) as loader,
        pytest.raises(ShardReadError, match=r"permission denied .*expired .*HF_TOKEN") as caught,
    ):
        list(loader)
    assert TOKEN not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_new")
    with DataLoader(dataset, batch_size=ROWS) as loader:
        loader.load_state_dict(state)
        assert sum(len(batch["n"]) for batch in loader) == 4 * ROWS


# ---- revisions that move, content that changes -------------------------------------------------------------


def test_a_branch_that_moves_during_the_run_changes_nothing(hub: HubServer) -> None:
    dataset = ShardedDataset(NAME)
    hub.repos["org/name"].commit(shards(lambda first: parquet(first + 1000), "parquet"))
    assert sorted(numbers(dataset)) == list(range(4 * ROWS))


def test_a_state_of_another_commit_is_refused_by_name(hub: HubServer) -> None:
    repo = hub.repos["org/name"]
    old = repo.commit(shards(lambda first: jsonl(first + 1000), "jsonl"))
    with DataLoader(ShardedDataset(NAME), batch_size=7) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    new = repo.commit(shards(lambda first: jsonl(first + 2000), "jsonl"))  # same names, sizes and blocks
    with (
        DataLoader(ShardedDataset(NAME), batch_size=7) as loader,
        pytest.raises(ValueError, match=f"commit {old}, .* commit {new}: .*revision='{old}'"),
    ):
        loader.load_state_dict(state)
    with DataLoader(ShardedDataset(NAME, revision=old), batch_size=7) as loader:
        loader.load_state_dict(state)


def test_a_state_resumes_at_a_commit_with_the_same_files(hub: HubServer) -> None:
    repo = hub.repos["org/name"]
    with DataLoader(ShardedDataset(NAME), batch_size=7) as loader:
        state = loader.state_dict()
    files = repo.commits[repo.branches["main"]]
    repo.commit({**files, "README.md": b"better words"})
    with DataLoader(ShardedDataset(NAME), batch_size=7) as loader:
        loader.load_state_dict(state)


def test_a_file_with_other_content_than_listed_is_named(hub: HubServer) -> None:
    repo = hub.repos["org/name"]
    dataset = ShardedDataset(NAME, revision=repo.branches["main"])
    files = repo.commits[repo.branches["main"]]
    files["data/train-00002-of-00004.parquet"] = parquet(7)  # as large as before
    hub.key = b"another"
    with pytest.raises(ShardChangedError, match=r"train-00002-of-00004.parquet: its etag is"):
        numbers(dataset)


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "configs", "options", "error", "message"),
    [
        ({"a.csv": b"x"}, "", {}, DataflowError, r"org/name: CSV files .*datasets\.load_dataset"),
        ({"readme.txt2": b"x"}, "", {}, DataflowError, "has no data files"),
        ({}, "", {}, DataflowError, "holds no data files"),
        (
            {"a.parquet": b"x"},
            "- {config_name: c, data_files: z*}",
            {},
            DataflowError,
            "no data files among its 0",
        ),
        ({"a.parquet": b"x"}, "- {config_name: c, data_files: z}", {}, DataflowError, "no file 'z', which"),
        ({"a.parquet": b"x"}, "- {data_files: z}", {}, ValueError, "config_name"),
        ({"a.parquet": b"x"}, "", {"split": "test"}, ValueError, "split must be one of train"),
        ({"a.parquet": b"x"}, "", {"split": "train[:10%]"}, ValueError, r"use .subset, .take or .split"),
        ({"a.parquet": b"x"}, "", {"config": "c"}, ValueError, "config must be one of default"),
    ],
)
def test_what_a_repository_does_not_have_is_said(
    hub: HubServer, files: Mapping[str, bytes], configs: str, options: Any, error: Any, message: str
) -> None:
    readme = f"---\nconfigs:\n{configs}\n---\n" if configs else ""
    hub.repos["org/name"].commit({**files, "README.md": readme.encode()})
    with pytest.raises(error, match=message):
        ShardedDataset(NAME, **options)


@pytest.mark.parametrize("options", [{"split": "train"}, {"config": "x"}, {"revision": "main"}])
def test_options_of_the_hub_are_refused_elsewhere(options: Any, made: Any) -> None:
    with pytest.raises(ValueError, match=r"revision= is for|config= and split= are for"):
        ShardedDataset(["a.parquet", "b.parquet"], **options)


# ---- faults ------------------------------------------------------------------------------------------------


def test_every_row_comes_once_though_one_request_in_twenty_fails(hub: HubServer) -> None:
    hub.repos["org/name"].commit(shards(parquet, "parquet", 60))
    drawn = random.Random(5)

    def fault(request: Request) -> Answer | None:
        if drawn.random() >= 0.05:
            return None
        kind = drawn.choice(["status", "cut"])
        return Answer(0, cut=True) if kind == "cut" else Answer(drawn.choice([429, 500, 503]))

    hub.fault = fault
    assert sorted(numbers(ShardedDataset(NAME), shuffle=True)) == list(range(60 * ROWS))


def test_who_is_told_to_come_later_asks_nothing_before(hub: HubServer) -> None:
    dataset = ShardedDataset(NAME)
    hub.key = b"another"  # all addresses are asked anew
    hub.forget()
    refused: list[Request] = []

    def fault(request: Request) -> Answer | None:
        if request.kind == "resolve" and not refused:
            refused.append(request)
            return Answer(429, {"Retry-After": "0.2"})
        return None

    hub.fault = fault
    with DataLoader(dataset, batch_size=7) as loader:
        assert sum(len(batch["n"]) for batch in loader) == 4 * ROWS
        assert loader.stats().faults.throttled >= 1


def test_the_hub_that_is_down_while_opening_is_asked_again(hub: HubServer) -> None:
    hub.fault = lambda request: Answer(503) if request.kind == "api" and request.count <= 2 else None
    assert len(ShardedDataset(NAME)) == 4 * ROWS
    assert kinds(hub)["api"] == 3


def test_a_hub_that_does_not_answer_is_an_error_soon(hub: HubServer) -> None:
    with pytest.raises(ShardReadError, match=r"127\.0\.0\.1"):
        ShardedDataset(
            NAME, storage_options={"endpoint": "http://127.0.0.1:9"}, retry=RetryPolicy(connect_s=0.1)
        )
