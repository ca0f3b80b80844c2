"""A Hub for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Repo, parquet, shards


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with one repository of four Parquet files, and a cache folder of its own."""
    import huggingface_hub.constants

    server = HubServer()
    server.repos["org/name"] = Repo()
    server.repos["org/name"].commit({**shards(parquet, "parquet"), "README.md": b"---\nlicense: mit\n---\n"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with server.serving():
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
