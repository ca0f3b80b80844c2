"""Names on the Hub: `hf://datasets/org/name@revision/path`, splits, and what asks it, outside the core."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any
from urllib.parse import quote, unquote

from msgspec import Struct

_DATASET = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+(?:/[^/@]+)?)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"
FILESYSTEM = "sharding.hub.filesystem:hub_filesystem"
ACCESS = "sharding.hub.access:HubAccess.given"
"""Functions of `storage_options`: its filesystem, None where fsspec's serves; its address and token."""
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of folders and files by split, as `datasets` knows them."""


class HubName(Struct, frozen=True):
    """A dataset repository, or a file or folder in it."""

    repo: str
    """"org/name"; old ones have no organisation."""
    revision: str | None
    """Branch, tag or commit; None: not said."""
    path: str
    """Within the repository; "": the repository itself. May be a pattern."""

    @property
    def is_pinned(self) -> bool:
        """Return whether it names a commit, which never changes."""
        return self.revision is not None and is_commit(self.revision)

    @property
    def url(self) -> str:
        """Return its URL, for fsspec."""
        suffix = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://datasets/{self.repo}{suffix}" + (f"/{self.path}" if self.path else "")


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit: 40 hex digits."""
    return _COMMIT.fullmatch(revision) is not None


def is_hub(url: str) -> bool:
    """Return whether a URL is of a dataset repository on the Hub."""
    return url.startswith("hf://datasets/")


def parse_name(url: str) -> HubName:
    """The parts of a URL. `ValueError` if it names no repository."""
    match = _DATASET.fullmatch(url)
    if match is None:
        raise ValueError(f"a dataset on the Hub is 'hf://datasets/org/name', got {url!r}")
    revision = match["revision"]
    return HubName(match["repo"], unquote(revision) if revision else None, (match["path"] or "").strip("/"))


def is_pinned(url: str) -> bool:
    """Return whether a URL names a file at a commit: what is there never changes."""
    return is_hub(url) and parse_name(url).is_pinned


def options_elsewhere(urls: Sequence[str], storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The storage options of shards for another machine: it asks the same Hub, with the same token."""
    if not any(map(is_hub, urls[:1])):
        return dict(storage_options)
    return {**storage_options, **resolve_name(ACCESS)(storage_options).options()}
