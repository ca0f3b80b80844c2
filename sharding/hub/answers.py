"""Answers of the Hub within bounds: of its own host, of a size, in a time, and of the types that its API has.

Requests are made by huggingface_hub's client, which knows proxies, `HF_HUB_OFFLINE` and what the user set up,
and which leaves the token out where it is redirected to another origin. Bodies are read in pieces, so that a
host that never stops costs no more than the limit. What is wrong with an answer is a `BrokenAnswerError` that
names the host and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from sharding.http_status import StatusError, retry_after_s
from sharding.hub.access import HubAccess, huggingface_hub
from sharding.hub.names import is_commit

CARD_BYTES = 8 << 20
"""The bytes of a README, at most: the largest ones on the Hub have 1 to 2 MB."""
_LISTING_BYTES = 64 << 20
"""The bytes of one answer that lists files, at most: 50,000 files take some 20 MB, and ten times that once
parsed."""
_COMPLETE_BELOW = 50_000
"""A longer list may be cut (`huggingface_hub.snapshot_download` has the same number)."""
_MOST_FILES = 10_000_000
"""The files of a repository, at most; the Hub advises at most 100,000."""
_LARGEST_FILE_BYTES = 1 << 50
LISTING_S = 1800.0
"""For all pages of a listing, of which the Hub gives two a second."""
_SILENCE_S = 30.0
"""The Hub takes seconds to list ten thousand files."""

Files = dict[str, tuple[int, str]]
"""By path: bytes, and what tells that the content changed."""
IsLate = Callable[[], bool]
"""True if the time for an answer is over. (`sharding` has no clock.)"""


class BrokenAnswerError(ValueError):
    """A host did not answer as the Hub does."""


class RefusedError(StatusError):
    """The Hub refused, with a code beside the status."""

    def __init__(self, status: int, text: str = "", retry_after_s: float = 0.0, code: str = "") -> None:
        super().__init__(status, text, retry_after_s)
        self.args = (status, text, retry_after_s, code)
        self.code = code
        """"RepoNotFound", "RevisionNotFound", "GatedRepo" ...; "": none."""


@dataclass(frozen=True)
class Answer:
    """An answer of the Hub, whole."""

    host: str
    body: bytes
    next_url: str
    """The address at which a list goes on, as its `Link` says; "": nowhere."""

    def json(self, kind: type) -> Any:
        """The value that its JSON says. Raises `BrokenAnswerError` where it is none of this kind."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise BrokenAnswerError(f"{self.host} answered what is no JSON: {error!s:.200}") from None
        return self.checked(value, kind, "answer")

    def checked(self, value: Any, kind: type, field: str) -> Any:
        """The value of a field. Raises `BrokenAnswerError` where it is none of this kind."""
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            names = {dict: "object", list: "list", str: "text", int: "integer"}
            raise self.broken(field, f"must be of kind {names[kind]}", value)
        return value

    def broken(self, field: str, rule: str, value: Any) -> BrokenAnswerError:
        """The error for the value of a field."""
        shown = repr(value)[:100] if isinstance(value, str | int | float | None) else type(value).__name__
        return BrokenAnswerError(f"{self.host} did not answer as the Hub does: {field} {rule}, got {shown}")


def ask(access: HubAccess, url: str, most_bytes: int, is_late: IsLate) -> Answer:
    """Ask for an answer of at most so many bytes.

    Raises:
        RefusedError: the Hub refused.
        BrokenAnswerError: it is larger, takes longer than it may, or goes on at another host.
        OSError: no connection; and what else huggingface_hub's client raises.
    """
    host, body = access.host, bytearray()
    session = huggingface_hub().utils.get_session()
    headers = {**access.headers(), "accept-encoding": "gzip"}  # of others a few bytes may be gigabytes
    with session.stream("GET", url, headers=headers, timeout=_SILENCE_S) as response:
        if response.status_code != 200:
            # By its header fields alone: the body may be of any size and form.
            fields = response.headers
            text = (fields.get("x-error-message") or response.reason_phrase)[:500]
            raise RefusedError(
                response.status_code, text, retry_after_s(fields), fields.get("x-error-code", "")
            )
        if (encoding := response.headers.get("content-encoding", "gzip")) not in ("gzip", "identity"):
            raise BrokenAnswerError(
                f"{host} answered in an encoding that was not asked for: {encoding!r:.40}"
            )
        for piece in response.iter_bytes():
            body += piece
            if len(body) > most_bytes:
                raise BrokenAnswerError(
                    f"{host} answered more than {most_bytes:,} bytes for {urlsplit(url).path}"
                )
            if is_late():
                raise BrokenAnswerError(f"{host} was still answering when the time for its answer was over")
        link = response.links.get("next", {}).get("url", "")
    next_url = urljoin(url, link) if link else ""
    if next_url and not access.is_hub(next_url):
        elsewhere = urlsplit(next_url).netloc
        raise BrokenAnswerError(
            f"{host} says that its list goes on at {elsewhere}, which is another host: it is not asked"
        )
    return Answer(host, bytes(body), next_url)


def ask_files(access: HubAccess, repo: str, revision: str, is_late: IsLate) -> tuple[str, Files | None]:
    """The commit of a revision and its files, or None for these where the answer may not hold them all."""
    url = f"{access.endpoint}/api/datasets/{repo}/revision/{quote(revision, safe='')}?blobs=true"
    answer = ask(access, url, _LISTING_BYTES, is_late)
    info = answer.json(dict)
    commit = answer.checked(info.get("sha"), str, "'sha'")
    if not is_commit(commit):
        raise answer.broken("'sha'", "must be a commit (40 hex digits)", commit)
    siblings = answer.checked(info.get("siblings") or [], list, "'siblings'")
    if len(siblings) >= _COMPLETE_BELOW:
        return commit, None
    entries = [answer.checked(sibling, dict, "'siblings'") for sibling in siblings]
    if any(entry.get("size") is None for entry in entries):
        return commit, None
    return commit, dict(_file(answer, entry, "rfilename") for entry in entries)


def ask_tree(access: HubAccess, repo: str, commit: str, is_late: IsLate) -> Files:
    """All files of a commit, asked page by page."""
    files: Files = {}
    seen: set[str] = set()
    """Paths of files and folders: each page brings new ones, so a list ends."""
    url = f"{access.endpoint}/api/datasets/{repo}/tree/{commit}?recursive=true"
    while url:
        answer = ask(access, url, _LISTING_BYTES, is_late)
        entries = [answer.checked(entry, dict, "a file") for entry in answer.json(list)]
        files |= dict(_file(answer, entry, "path") for entry in entries if entry.get("type") == "file")
        url, num_before = answer.next_url, len(seen)
        seen.update(answer.checked(entry.get("path"), str, "'path'") for entry in entries)
        if url and (len(seen) == num_before or len(seen) > _MOST_FILES):
            raise BrokenAnswerError(f"{answer.host} lists files without an end: {len(seen):,} until now")
    return files


def _file(answer: Answer, entry: Mapping[str, Any], path_field: str) -> tuple[str, tuple[int, str]]:
    """A file of an answer of `revision` or of `tree`, which call the same things by other names."""
    path = answer.checked(entry.get(path_field), str, f"{path_field!r}")
    if path.startswith("/") or {"", ".", ".."} & set(path.split("/")) or "\0" in path:
        raise answer.broken(f"{path_field!r}", "must be a path within the repository", path)
    size = answer.checked(entry.get("size"), int, f"'size' of {path[:100]!r}")
    if not 0 <= size <= _LARGEST_FILE_BYTES:
        raise answer.broken(f"'size' of {path[:100]!r}", "must be a number of bytes", size)
    lfs = answer.checked(entry.get("lfs") or {}, dict, f"'lfs' of {path[:100]!r}")
    version = lfs.get("sha256") or lfs.get("oid") or entry.get("blobId") or entry.get("oid") or ""
    return path, (size, answer.checked(version, str, f"hash of {path[:100]!r}"))
