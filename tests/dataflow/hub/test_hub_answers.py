"""A Hub, or a dataset on it, that is broken or means harm: an error soon, and no token goes elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fsspec.utils import glob_translate
from hub_server import ROWS, TOKEN, Answer, HubServer, Request, parquet, shards
from hypothesis import given, strategies as st
from test_hub import NAME, numbers

from dataflow import DataflowError, ShardedDataset, ShardReadError
from sharding.hub import answers, card, layout, snapshot
from sharding.hub.access import HubAccess
from sharding.hub.layout import matcher

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.timeout(60)
SHA = "0" * 40


def answering(hub: HubServer, body: object, kind: str = "api", **fields: str) -> None:
    """All requests of a kind get this instead."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    hub.fault = lambda request: Answer(200, fields, body=text) if request.kind == kind else None


def listed(**file: Any) -> dict[str, Any]:
    """A listing of one file, with these fields of it."""
    return {"sha": SHA, "siblings": [{"rfilename": "a.parquet", "size": 1, "blobId": SHA} | file]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>a proxy's page", "answered what is no JSON"),
        (b"[" * 100_000, "answered what is no JSON"),
        ([], "answer must be of kind object, got list"),
        ({}, "did not answer as the Hub does: 'sha' must be of kind text, got None"),
        ({"sha": "main"}, "'sha' must be a commit"),
        ({"sha": SHA, "siblings": "x"}, "'siblings' must be of kind list, got 'x'"),
        ({"sha": SHA, "siblings": [1]}, "'siblings' must be of kind object, got 1"),
        (listed(rfilename=5), "'rfilename' must be of kind text, got 5"),
        (listed(rfilename="../a.parquet"), "'rfilename' must be a path within the repository"),
        (listed(size="1"), "'size' of 'a.parquet' must be of kind integer, got '1'"),
        (listed(size=-1), "'size' of 'a.parquet' must be a number of bytes, got -1"),
        (listed(lfs=[1]), "'lfs' of 'a.parquet' must be of kind object, got list"),
        (listed(blobId={}, lfs={"sha256": 7}), "hash of 'a.parquet' must be of kind text, got 7"),
    ],
)
def test_a_listing_that_is_none_is_an_error_with_host_and_field(hub: HubServer, body: Any, said: str) -> None:
    answering(hub, body)
    with pytest.raises(ShardReadError) as raised:
        ShardedDataset(NAME)
    assert said in str(raised.value)
    assert hub.url.removeprefix("http://") in str(raised.value)


def test_a_commit_that_is_a_path_writes_nothing(hub: HubServer, tmp_path: Path) -> None:
    answering(hub, {"sha": f"../../../../{tmp_path}/evil", "siblings": []})
    with pytest.raises(ShardReadError, match="must be a commit"):
        ShardedDataset(NAME)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_list_that_goes_on_at_another_host_is_an_error_and_gets_no_token(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(answers, "_COMPLETE_BELOW", 1)
    elsewhere = f"http://127.0.0.1:{hub.cdn.server_port}/next"

    def fault(request: Request) -> Answer | None:
        return (
            Answer(200, {"Link": f'<{elsewhere}>; rel="next"'}, body=b"[]")
            if "/tree/" in request.path
            else None
        )

    hub.fault = fault
    with pytest.raises(ShardReadError, match=r"goes on at .*another host"):
        ShardedDataset(NAME)
    assert not hub.of_kind("content")


def test_a_list_whose_pages_bring_nothing_new_ends(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_COMPLETE_BELOW", 1)
    page = json.dumps([{"type": "file", "path": "a.parquet", "size": 1, "oid": SHA}]).encode()

    def fault(request: Request) -> Answer | None:
        link = {"Link": f'<{hub.url}{request.path}?cursor={request.count}>; rel="next"'}
        return Answer(200, link, body=page) if "/tree/" in request.path else None

    hub.fault = fault
    with pytest.raises(ShardReadError, match="lists files without an end: 1 until now"):
        ShardedDataset(NAME)


def test_an_answer_that_is_too_large_or_too_late_is_an_error(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "_LISTING_BYTES", 100)
    with pytest.raises(ShardReadError, match=r"answered more than 100 bytes for /api/datasets/org/name"):
        ShardedDataset(NAME)
    with pytest.raises(answers.BrokenAnswerError, match="when the time for its answer was over"):
        answers.ask(
            HubAccess(hub.url), f"{hub.url}/api/datasets/org/name/revision/main", 1 << 20, lambda: True
        )


def test_a_readme_that_is_too_large_is_an_error(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CARD_BYTES", 100)
    hub.repos["org/name"].commit({**shards(parquet, "parquet"), "README.md": b"x" * 101})
    with pytest.raises(ShardReadError, match=r"more than 100 bytes for .*README\.md"):
        ShardedDataset(NAME)


def test_an_encoding_that_was_not_asked_for_is_not_decoded(hub: HubServer) -> None:
    answering(hub, b"x", Content_Encoding="br")
    with pytest.raises(ShardReadError, match="an encoding that was not asked for: 'br'"):
        ShardedDataset(NAME)


def test_a_refusal_of_any_form_is_an_error(hub: HubServer) -> None:
    hub.fault = lambda request: Answer(403, {}, body=b'["no object"]') if request.kind == "api" else None
    with pytest.raises(ShardReadError, match="permission denied"):
        ShardedDataset(NAME)


def test_a_token_goes_through_no_network_unencrypted() -> None:
    with pytest.raises(ValueError, match=r"a token would go to http://hub\.example unencrypted"):
        HubAccess("http://hub.example", TOKEN).headers()
    assert "authorization" not in HubAccess("http://hub.example", False).headers()
    for endpoint in ("https://hub.example", "http://127.0.0.1:8000", "http://localhost:8000"):
        assert HubAccess(endpoint, TOKEN).headers()["authorization"] == f"Bearer {TOKEN}"


# ---- READMEs -----------------------------------------------------------------------------------------------


def bomb(depth: int) -> str:
    """YAML of 12 bytes a level that stands for 2^depth values."""
    levels = "".join(f"- &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, depth))
    return f"configs:\n- &x0 [{{config_name: a}}]\n{levels}"


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        (bomb(40), r"names more than 1,000,000 values in 'configs'"),
        ("configs: &a [*a]\n", "names more than"),
        (f"configs: {'[' * 900}{']' * 900}\n", "must be a list of configs|nested too deep"),
        (f"configs: {'[' * 100_000}\n", "cannot be read"),
        ("configs: [{data_files: x}]\n", "must be a list of configs with config_name"),
        ("configs: {a: b}\n", "must be a list of configs with config_name"),
    ],
)
def test_yaml_that_means_harm_is_an_error_on_the_hub_and_in_a_folder(
    hub: HubServer,
    tmp_path: Path,
    yaml: str,
    said: str,
) -> None:
    readme = f"---\n{yaml}---\n"
    hub.repos["org/name"].commit({**shards(parquet, "parquet"), "README.md": readme.encode()})
    with pytest.raises(ValueError, match=said):
        ShardedDataset(NAME)
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.parquet").write_bytes(parquet(0))
    with pytest.raises(ValueError, match=said):
        ShardedDataset(str(tmp_path), split="train")


def test_a_head_of_any_size_is_not_parsed() -> None:
    readme = f"---\nconfigs: [1, 2]\n#{' ' * (4 << 20)}\n---\n"
    said = r"the YAML of README\.md in here has 4,194,321 characters; at most 4,194,304 are read"
    with pytest.raises(ValueError, match=said):
        card.card_configs({"README.md": readme}, "here")


def test_names_for_values_are_read_where_they_are_few(hub: HubServer) -> None:
    yaml = "other: &files data/train-*\nconfigs: [{config_name: a, data_files: *files}]"
    hub.repos["org/name"].commit({**shards(parquet, "parquet"), "README.md": f"---\n{yaml}\n---\n".encode()})
    assert sorted(numbers(ShardedDataset(NAME))) == list(range(4 * ROWS))


def test_a_glob_of_many_stars_ends(hub: HubServer) -> None:
    stars = f"configs: [{{config_name: a, data_files: '{'a*' * 40}b'}}]"
    hub.repos["org/name"].commit(
        {"a" * 60 + ".parquet": parquet(0), "README.md": f"---\n{stars}\n---\n".encode()}
    )
    with pytest.raises(DataflowError, match="no data files among its 0"):
        ShardedDataset(NAME)


def test_patterns_too_many_to_look_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_MOST_MATCHES", 5)
    configs = [{"config_name": "a", "data_files": ["a*", "b*"]}]
    with pytest.raises(ValueError, match="2 patterns for 3 files are too many"):
        layout.split_files(["a.tar", "b.tar", "c.tar"], configs, where="here")


NAMES = st.text("ab.", min_size=1, max_size=4)
PARTS = st.one_of(st.just("**"), st.just("*"), st.text("ab.*?[]!", min_size=1, max_size=6))


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(NAMES, min_size=1, max_size=4))
def test_a_glob_matches_as_that_of_fsspec(parts: list[str], names: list[str]) -> None:
    pattern, path = "/".join(parts), "/".join(names)
    try:
        expected = re.match(glob_translate(pattern), path) is not None
    except ValueError:
        with pytest.raises(ValueError, match="must be a whole part"):
            matcher(pattern)
        return
    assert matcher(pattern)(path) == expected
