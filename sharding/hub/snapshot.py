"""All files of a dataset repository at one commit: fetched by one request, kept in the user's cache folder.

A repository of up to 50,000 files is one answer of the Hub (`/api/datasets/NAME/revision/REVISION`), which
tells sizes and hashes, too; beyond that, the Hub cuts the list, and it is asked page by page. What the
README says of configs is read from the file itself, which is not counted as an API call. What a commit holds
never changes, so a listing that was kept is true for ever. The version of a file is the SHA-256 of its bytes
where the Hub has it (LFS and Xet files), else git's hash of it.

`huggingface_hub` (the extra "hub") brings endpoints, tokens and requests; it is imported here, when used.
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
from sharding.http_status import StatusError, retry_after_s
from sharding.hub.layout import CARD_FILES, configs_of, yaml_head
from sharding.hub.names import DEFAULT_REVISION, HubName
from sharding.redaction import hide_secrets
from sharding.write.file import PRIVATE_FILE, private_folder, user_folder

_VERSION = 1
_MOST_FILES = 50_000
"""A longer list may be cut (`huggingface_hub.snapshot_download` has the same number)."""
_SILENCE_S = 30.0
"""The Hub takes seconds to list ten thousand files."""
_NO_HUB = "datasets in the Hugging Face Hub's layout need another package: pip install 'dataflow-loader[hub]'"


@dataclass(frozen=True)
class HubAccess:
    """Where the Hub is, and with which token it is asked."""

    endpoint: str
    token: str | bool | None = None
    """None: the user's own, looked up anew each time; False: none."""

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> Self:
        """From `storage_options`, else from the environment."""
        hub = _huggingface_hub()
        endpoint = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or hub.constants.ENDPOINT
        return cls(str(endpoint).rstrip("/"), options.get("token"))

    def headers(self) -> dict[str, str]:
        """What a request to the Hub says of who asks; to be sent to the Hub only."""
        token, headers = self._known_token(), {"user-agent": "dataflow-loader"}
        return {**headers, "authorization": f"Bearer {token}"} if token else headers

    def options(self) -> dict[str, str | bool]:
        """The `storage_options` with which another machine asks the same Hub as this process would."""
        token = self._known_token()
        return {"endpoint": self.endpoint} | ({} if token is None else {"token": token})

    def _known_token(self) -> str | bool | None:
        token = self.token
        if token is None or token is True:
            # Not by `build_hf_headers`, which asks the Hub for a list of agents once a day.
            hub = _huggingface_hub()
            implicit = token or not hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN
            token = hub.get_token() if implicit else None
        return token

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r})"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a repository holds at one commit. A value."""

    endpoint: str
    repo: str
    commit: str
    files: Mapping[str, tuple[int, str]]
    """By path: bytes, and what tells that the content changed."""
    configs: list[dict[str, Any]]
    """Of the README, as in its YAML."""

    def to_bytes(self) -> bytes:
        """What `from_bytes` takes."""
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
        if known is None:
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
    """Where listings are kept: `$XDG_CACHE_HOME/dataflow/hub`, or below `~/.cache`."""
    return user_folder("hub")


def _path(endpoint: str, repo: str, commit: str) -> str:
    place = hashlib.blake2b(f"{endpoint}\0{repo}".encode(), digest_size=16).hexdigest()
    return os.path.join(hub_folder(), place, f"{commit}.json")


def fetch_snapshot(access: HubAccess, name: HubName) -> Snapshot:
    """Ask the Hub what a repository holds at a revision.

    Raises:
        ImportError: huggingface_hub is not installed.
        ShardReadError: no such repository or revision, not allowed, or the Hub does not answer.
    """
    revision = quote(name.revision or DEFAULT_REVISION, safe="")
    with _hub_errors(name, access):
        info = _get(
            access, f"{access.endpoint}/api/datasets/{name.repo}/revision/{revision}?blobs=true"
        ).json()
        commit, siblings = str(info["sha"]), info.get("siblings") or []
        if (kept := Snapshot.kept(access.endpoint, name.repo, commit)) is not None:
            return kept
        if len(siblings) >= _MOST_FILES or any(one.get("size") is None for one in siblings):
            siblings = list(_tree(access, name.repo, commit))
        files = {one.get("rfilename") or one["path"]: (int(one["size"]), _version(one)) for one in siblings}
        pinned = HubName(name.repo, commit, "")
        cards = {path: read_file(access, pinned, path).decode() for path in CARD_FILES if path in files}
    return Snapshot(
        endpoint=access.endpoint, repo=name.repo, commit=commit, files=files, configs=card_configs(cards)
    )


def _tree(access: HubAccess, repo: str, commit: str) -> Iterator[dict[str, Any]]:
    """All files, page by page."""
    url = f"{access.endpoint}/api/datasets/{repo}/tree/{commit}?recursive=true"
    while url:
        answer = _get(access, url)
        yield from (one for one in answer.json() if one["type"] == "file")
        url = answer.links.get("next", {}).get("url", "")


def read_file(access: HubAccess, name: HubName, path: str) -> bytes:
    """A small file, whole; raises what huggingface_hub raises."""
    revision = quote(name.revision or DEFAULT_REVISION, safe="")
    return bytes(
        _get(access, f"{access.endpoint}/datasets/{name.repo}/resolve/{revision}/{quote(path)}").content
    )


def _get(access: HubAccess, url: str) -> Any:
    """The answer, by huggingface_hub's client, which leaves the token out where it is sent to other hosts."""
    hub = _huggingface_hub()
    answer = hub.utils.get_session().get(url, headers=access.headers(), timeout=_SILENCE_S)
    hub.utils.hf_raise_for_status(answer)
    return answer


def card_configs(cards: Mapping[str, str]) -> list[dict[str, Any]]:
    """The configs that the texts of `CARD_FILES`, by name, tell of.

    Raises:
        ImportError: there is YAML and no package for it; names the extra.
        ValueError: it is no YAML, or its configs are none.
    """
    heads = [yaml_head(text) if path == CARD_FILES[0] else text for path, text in cards.items()]
    if not any("configs" in head for head in heads):
        return []
    try:
        import yaml
    except ImportError as error:
        raise ImportError(_NO_HUB) from error
    try:
        return configs_of(map(yaml.safe_load, heads))
    except yaml.YAMLError as error:
        raise ValueError(f"the README's YAML cannot be read: {error}") from error


def _version(file: Mapping[str, Any]) -> str:
    """Of an answer of `revision` or of `tree`, which call the same things by other names."""
    lfs = file.get("lfs") or {}
    return str(lfs.get("sha256") or lfs.get("oid") or file.get("blobId") or file.get("oid") or "")


@contextmanager
def _hub_errors(name: HubName, access: HubAccess) -> Iterator[None]:
    """Turn what huggingface_hub raises into `ShardReadError`; causes tell whether to ask again."""
    errors = _huggingface_hub().errors
    page = f"{access.endpoint}/datasets/{name.repo}"
    has_token = "authorization" in access.headers()
    login = (
        "the token that was sent may not read it"
        if has_token
        else "no token was sent: set HF_TOKEN or run 'hf auth login'"
    )
    try:
        yield
    except errors.GatedRepoError as error:
        raise ShardReadError(
            name.url, f"permission denied: it is gated; ask for access at {page} ({login})"
        ) from _answer(error)
    except errors.RevisionNotFoundError as error:
        raise ShardReadError(name.url, f"there is no revision {name.revision!r} in {name.repo}") from _answer(
            error
        )
    except errors.RepositoryNotFoundError as error:
        reason = f"no such dataset repository at {access.endpoint}, or it is private ({login})"
        raise ShardReadError(name.url, reason) from _answer(error)
    except errors.OfflineModeIsEnabled as error:
        raise ShardReadError(
            name.url, f"not asked, as HF_HUB_OFFLINE is set, and no listing is kept: {error}"
        ) from None
    except errors.HfHubHTTPError as error:
        answer = _answer(error)
        reason = (
            f"permission denied ({answer}; {login})"
            if answer.status in (401, 403)
            else f"cannot be listed: {answer}"
        )
        raise ShardReadError(name.url, reason) from answer
    except (OSError, errors.HTTPError) as error:
        hide_secrets(error)
        raise ShardReadError(
            name.url, f"cannot be listed at {access.endpoint}: {type(error).__name__}: {error}"
        ) from error


def _answer(error: Any) -> StatusError:
    """What the Hub said, without the request, which has the token."""
    response = error.response
    # Before huggingface_hub 1.0, answers are those of requests, not of httpx.
    reason = getattr(response, "reason_phrase", None) or getattr(response, "reason", "")
    text = response.headers.get("x-error-message") or reason
    return StatusError(response.status_code, str(text), retry_after_s(response.headers))


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ImportError(_NO_HUB) from error
    return huggingface_hub
