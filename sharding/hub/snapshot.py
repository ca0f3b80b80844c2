"""All files of a dataset repository at one commit: fetched by one request, kept in the user's cache folder.

A repository of up to 50,000 files is one answer of the Hub (`/api/datasets/NAME/revision/REVISION`), which
tells sizes and hashes, too; beyond that, the Hub cuts the list, and it is asked page by page. What the
README says of configs is read from the file itself, which is not counted as an API call. What a commit holds
never changes, so a listing that was kept is true for ever. The version of a file is the SHA-256 of its bytes
where the Hub has it (LFS and Xet files), else git's hash of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from sharding.errors import ShardReadError
from sharding.hub.access import HubAccess, huggingface_hub
from sharding.hub.answers import (
    CARD_BYTES,
    BrokenAnswerError,
    IsLate,
    RefusedError,
    ask,
    ask_files,
    ask_tree,
)
from sharding.hub.card import CARD_FILES, card_configs
from sharding.hub.names import DEFAULT_REVISION, HubName, is_commit
from sharding.redaction import hide_secrets
from sharding.write.file import PRIVATE_FILE, private_folder, user_folder

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of a repository at one commit. A value."""

    endpoint: str
    repo: str
    commit: str
    files: Mapping[str, tuple[int, str]]
    """By path: bytes, and what tells that the content changed."""
    configs: list[dict[str, Any]]
    """The configs of the README, as in its YAML."""

    def to_bytes(self) -> bytes:
        """Write what `from_bytes` takes."""
        return json.dumps({"version": _VERSION, **self.__dict__}, default=str).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """The inverse of `to_bytes`. `ValueError`, `TypeError` or `KeyError` for anything else."""
        fields = json.loads(text)
        if fields.pop("version") != _VERSION:
            raise ValueError("of another release")
        fields["files"] = {
            path: (int(size), str(version)) for path, (size, version) in fields["files"].items()
        }
        return cls(**fields)

    @classmethod
    def kept(cls, endpoint: str, repo: str, commit: str) -> Self | None:
        """The one in the cache folder, or in this process; None: there is none, or it is damaged."""
        known = _known.get((endpoint, repo, commit))
        if known is None and is_commit(commit):
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                with open(_path(endpoint, repo, commit), "rb") as file:
                    known = cls.from_bytes(file.read())
                if (known.endpoint, known.repo, known.commit) != (endpoint, repo, commit):
                    return None
                _known[endpoint, repo, commit] = known
        return known  # type: ignore[return-value]

    def keep(self) -> None:
        """Put it into the cache folder and this process. A folder that cannot be written costs a request."""
        _known[self.endpoint, self.repo, self.commit] = self
        path = _path(self.endpoint, self.repo, self.commit)
        unfinished = f"{path}.{uuid.uuid4().hex}.tmp"
        with suppress(OSError):
            private_folder(os.path.dirname(path))
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE), "wb") as file:
                file.write(self.to_bytes())
            os.replace(unfinished, path)


_known: dict[tuple[str, str, str], Snapshot] = {}


def hub_folder() -> str:
    """Return the folder of listings: `$XDG_CACHE_HOME/dataflow/hub`, or below `~/.cache`."""
    return user_folder("hub")


def _path(endpoint: str, repo: str, commit: str) -> str:
    folder = hashlib.blake2b(f"{endpoint}\0{repo}".encode(), digest_size=16).hexdigest()
    return os.path.join(hub_folder(), folder, f"{commit}.json")


def fetch_snapshot(access: HubAccess, name: HubName, is_late: IsLate) -> Snapshot:
    """Ask the Hub what a repository holds at a revision.

    Args:
        access: where the Hub is, and with which token.
        name: the repository and revision.
        is_late: whether the time for the whole listing is over.

    Raises:
        ImportError: huggingface_hub is not installed.
        ShardReadError: no such repository or revision, not allowed, or the Hub answers nothing or nonsense.
    """
    with _hub_errors(name, access):
        commit, files = ask_files(access, name.repo, name.revision or DEFAULT_REVISION, is_late)
        if (local_copy := Snapshot.kept(access.endpoint, name.repo, commit)) is not None:
            return local_copy
        if files is None:
            files = ask_tree(access, name.repo, commit, is_late)
        pinned = HubName(name.repo, commit, "")
        cards = {
            path: read_file(access, pinned, path, CARD_BYTES, is_late).decode(errors="replace")
            for path in CARD_FILES
            if path in files
        }
    configs = card_configs(cards, name.url)
    return Snapshot(endpoint=access.endpoint, repo=name.repo, commit=commit, files=files, configs=configs)


def read_file(access: HubAccess, name: HubName, path: str, most_bytes: int, is_late: IsLate) -> bytes:
    """A small file, whole. Raises what `ask` raises."""
    revision = quote(name.revision or DEFAULT_REVISION, safe="")
    url = f"{access.endpoint}/datasets/{name.repo}/resolve/{revision}/{quote(path)}"
    return ask(access, url, most_bytes, is_late).body


@contextmanager
def _hub_errors(name: HubName, access: HubAccess) -> Iterator[None]:
    """Turn what huggingface_hub raises into `ShardReadError`; causes tell whether to ask again."""
    errors = huggingface_hub().errors
    login = "no token was sent: set HF_TOKEN or run 'hf auth login'"
    if "authorization" in access.headers():
        login = "the token that was sent may not read it"
    try:
        yield
    except RefusedError as refusal:
        raise ShardReadError(name.url, _words(refusal, name, access, login)) from refusal
    except BrokenAnswerError as error:
        raise ShardReadError(name.url, f"cannot be listed: {error}") from None
    except errors.OfflineModeIsEnabled as error:
        raise ShardReadError(
            name.url, f"not asked, as HF_HUB_OFFLINE is set, and no listing is kept: {error}"
        ) from None
    except (OSError, errors.HTTPError) as error:
        hide_secrets(error)
        raise ShardReadError(
            name.url, f"cannot be listed at {access.endpoint}: {type(error).__name__}: {error}"
        ) from error


def _words(refusal: RefusedError, name: HubName, access: HubAccess, login: str) -> str:
    """The Hub's refusal in words. Without a login it says 401 also of repositories that are not there."""
    if refusal.code == "GatedRepo":
        page = f"{access.endpoint}/datasets/{name.repo}"
        return f"permission denied: it is gated; ask for access at {page} ({login})"
    if refusal.code == "RevisionNotFound":
        return f"there is no revision {name.revision!r} in {name.repo}"
    if refusal.code == "RepoNotFound" or (refusal.status == 401 and "credentials" not in refusal.text):
        return f"no such dataset repository at {access.endpoint}, or it is private ({login})"
    if refusal.status in (401, 403):
        return f"permission denied ({refusal}; {login})"
    return f"cannot be listed: {refusal}"
