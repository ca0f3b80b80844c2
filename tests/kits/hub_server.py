"""A Hub of our own: repositories over HTTP, and a content network with signed addresses that expire.

`HubServer` answers what `huggingface_hub`, `datasets` and we ask of the Hub: `/api/datasets/NAME`, its
`/revision/REV`, `/tree/REV` and `/paths-info/REV`, and `/datasets/NAME/resolve/REV/PATH`, which gives small
files itself (those in `plain`) and redirects to the content network (another port) for all others. All
requests are counted; `fault` is asked before each answer.
"""

from __future__ import annotations

import hashlib
import hmac
import http.server
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TOKEN = "hf_" + "t" * 34
ROWS = 20
"""Of each file."""


@dataclass(frozen=True)
class Answer:
    """What a fault gives instead of the right answer."""

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    """The body ends in its middle instead, and the connection with it; the status is the right one."""
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    """One request."""

    kind: str
    """"api", "resolve" or "content"."""
    path: str
    token: str
    count: int
    """How many there were of this kind and path, this one included."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Repo:
    """A repository: commits, newest last, each with its files; a branch is the newest unless said."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with exactly these files."""
        text = json.dumps(
            [len(self.commits), sorted((p, hashlib.sha1(b).hexdigest()) for p, b in files.items())]
        )
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name], self.branches[branch] = dict(files), name
        return name

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class HubServer:
    """See the module. `url` is for HF_ENDPOINT."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards `requests` and `counts`
        self.repos: dict[str, Repo] = {}
        self.tokens = {TOKEN}
        self.key = b"of the content network"
        """What signs addresses; those that another one signed are refused."""
        self.requests: list[Request] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.fault: Callable[[Request], Answer | None] = lambda request: None
        self.plain = re.compile(r"(README\.md|\.huggingface\.yaml|.*\.(py|txt))$")
        self.signed_for_s = 3600.0
        self.latency_s = 0.0
        self.page = 1000
        self._hub = _server(_HubHandler, self)
        self.cdn = _server(_ContentHandler, self)
        self.hashes: dict[int, tuple[str, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    def of_kind(self, kind: str) -> list[Request]:
        with self.lock:
            return [one for one in self.requests if one.kind == kind]

    def forget(self) -> None:
        with self.lock:
            self.requests.clear()

    def hashes_of(self, body: bytes) -> tuple[str, str]:
        """SHA-256, and git's hash of a file."""
        known = self.hashes.get(id(body))
        if known is None:
            blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            known = self.hashes[id(body)] = hashlib.sha256(body).hexdigest(), blob
        return known

    def entry(self, path: str, body: bytes, *, sibling: bool) -> dict[str, Any]:
        sha256, blob = self.hashes_of(body)
        entry: dict[str, Any] = {"rfilename": path, "size": len(body), "blobId": blob}
        if not sibling:
            entry = {"type": "file", "path": path, "size": len(body), "oid": blob}
        if not self.plain.match(path):
            entry["lfs"] = {"size": len(body), "sha256": sha256, "pointerSize": 134}
            if not sibling:
                entry["lfs"]["oid"] = sha256
        return entry

    def address(self, repo: str, commit: str, path: str) -> str:
        expires = int(time.time() + self.signed_for_s + 0.999)
        place = f"/{repo}/{commit}/{path}"
        signed = hmac.new(self.key, f"{place}{expires}".encode(), "sha256").hexdigest()
        query = f"Expires={expires}&Signature={signed}&Key-Pair-Id=K"
        return f"http://127.0.0.1:{self.cdn.server_port}{quote(place)}?{query}"

    def note(self, kind: str, path: str, headers: Mapping[str, str]) -> Answer | None:
        with self.lock:
            self.counts[kind, path] += 1
            token = headers.get("Authorization", "").removeprefix("Bearer ")
            request = Request(kind, path, token, self.counts[kind, path], dict(headers))
            self.requests.append(request)
        if self.latency_s:
            time.sleep(self.latency_s)
        return self.fault(request)

    @contextmanager
    def serving(self) -> Iterator[HubServer]:
        threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in (self._hub, self.cdn)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for one in (self._hub, self.cdn):
                one.shutdown()
                one.server_close()
            for thread in threads:
                thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    hub: HubServer

    def handle_error(self, *_: Any) -> None:
        """Clients that were closed hang up: nothing to say."""


def _server(handler: type[_Handler], hub: HubServer) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    server.hub = hub
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Server

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, status: int, body: bytes = b"", cut: bool = False, **fields: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(usegmt=True))
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut

    def say_fault(self, fault: Answer) -> None:
        self.say(fault.status, fault.body, **dict(fault.fields))

    def say_range(self, body: bytes, cut: bool, **fields: str) -> None:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not match:
            self.say(200, body, cut, Accept_Ranges="bytes", **fields)
            return
        if match[1]:
            start, end = int(match[1]), min(int(match[2]) + 1 if match[2] else len(body), len(body))
        else:
            start, end = max(0, len(body) - int(match[2])), len(body)
        if start >= len(body):
            self.say(416, Content_Range=f"bytes */{len(body)}")
            return
        self.say(206, body[start:end], cut, Content_Range=f"bytes {start}-{end - 1}/{len(body)}", **fields)


class _HubHandler(_Handler):
    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        is_api = parts[0] == "api"
        fault = hub.note("api" if is_api else "resolve", url.path, self.headers)
        if fault is not None and not fault.cut:
            self.say_fault(fault)
            return
        if is_api:
            parts = parts[1:]
        if parts[:1] != ["datasets"] or len(parts) < 3:
            self.say(404)
            return
        name, repo = "/".join(parts[1:3]), hub.repos.get("/".join(parts[1:3]))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in hub.tokens:
            self.say(401, X_Error_Message="Invalid credentials in Authorization header")
            return
        if repo is None or (repo.private and not token):
            code = "RepoNotFound"
            self.say(404 if token else 401, X_Error_Code=code, X_Error_Message="Repository not found")
            return
        rest = parts[3:]
        if is_api:
            self._api(name, repo, rest, parse_qs(url.query), sent)
        elif rest[:1] == ["resolve"]:
            if repo.gated and not token:
                self.say(
                    401, X_Error_Code="GatedRepo", X_Error_Message="Access to this dataset is restricted"
                )
                return
            self._resolve(name, repo, rest[1], "/".join(rest[2:]))
        else:
            self.say(404)

    def _json(self, value: Any, **fields: str) -> None:
        self.say(200, json.dumps(value).encode(), Content_Type="application/json", **fields)

    def _api(
        self, name: str, repo: Repo, rest: list[str], query: Mapping[str, list[str]], sent: bytes
    ) -> None:
        what, revision, *deeper = [*rest, "revision", "main"][: max(2, len(rest))]
        commit = repo.find(revision)
        if commit is None:
            self.say(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
            return
        files, hub = repo.commits[commit], self.server.hub
        if what == "revision":
            blobs = "blobs" in query
            siblings = [
                hub.entry(path, body, sibling=True) if blobs else {"rfilename": path}
                for path, body in files.items()
            ]
            self._json(
                {
                    "id": name,
                    "sha": commit,
                    "private": repo.private,
                    "gated": repo.gated,
                    "siblings": siblings,
                    "lastModified": "2026-01-01T00:00:00.000Z",
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
            )
        elif what == "tree":
            folder = "/".join(deeper)
            below = f"{folder}/" if folder else ""
            inside = {p: b for p, b in files.items() if p.startswith(below)}
            if below and not inside:
                self.say(404, X_Error_Code="EntryNotFound")
                return
            entries: dict[str, dict[str, Any]] = {}
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            for path, body in sorted(inside.items()):
                child, *more = path.removeprefix(below).split("/")
                for depth in range(len(more) if recursive else min(1, len(more))):
                    place = below + "/".join([child, *more][: depth + 1])
                    entries.setdefault(
                        place, {"type": "directory", "path": place, "size": 0, "oid": "0" * 40}
                    )
                if recursive or not more:
                    entries[path] = hub.entry(path, body, sibling=False)
            start = int(query.get("cursor", ["0"])[0])
            page = list(entries.values())[start : start + hub.page]
            more_fields = {}
            if start + hub.page < len(entries):
                base = self.path.partition("?")[0]
                again = f"{hub.url}{base}?recursive={recursive}&expand=False&cursor={start + hub.page}"
                more_fields["Link"] = f'<{again}>; rel="next"'
            self._json(page, **more_fields)
        elif what == "paths-info":
            asked = parse_qs(sent.decode()).get("paths") or json.loads(sent or b"{}").get("paths", [])
            found: list[dict[str, Any]] = []
            for path in asked:
                if path in files:
                    found.append(hub.entry(path, files[path], sibling=False))
                elif any(one.startswith(f"{path}/") for one in files):
                    found.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
            self._json(found)
        else:
            self.say(404)

    def _resolve(self, name: str, repo: Repo, revision: str, path: str) -> None:
        hub, commit = self.server.hub, repo.find(revision)
        if commit is None:
            self.say(404, X_Error_Code="RevisionNotFound")
            return
        body = repo.commits[commit].get(path)
        if body is None:
            self.say(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        sha256, blob = hub.hashes_of(body)
        if hub.plain.match(path):
            self.say_range(body, False, ETag=f'"{blob}"', X_Repo_Commit=commit)
            return
        self.say(
            302,
            b"Found. Redirecting",
            Location=hub.address(name, commit, path),
            X_Linked_Etag=f'"{sha256}"',
            X_Linked_Size=str(len(body)),
            ETag=f'"{sha256}"',
            X_Repo_Commit=commit,
        )


class _ContentHandler(_Handler):
    def answer(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        fault = hub.note("content", url.path, self.headers)
        if fault is not None and not fault.cut:
            self.say_fault(fault)
            return
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        signed = hmac.new(
            hub.key, f"{unquote(url.path)}{query.get('Expires')}".encode(), "sha256"
        ).hexdigest()
        if query.get("Signature") != signed or float(query["Expires"]) < time.time():
            self.say(403)
            return
        org, name, commit, path = unquote(url.path).strip("/").split("/", 3)
        body = hub.repos[f"{org}/{name}"].commits[commit][path]
        self.say_range(body, fault is not None, ETag='"of the content network"')


# ---- files of a repository ---------------------------------------------------------------------------------


def parquet(first: int, rows: int = ROWS) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": np.arange(first, first + rows)}), out)
    return out.getvalue()


def shards(
    make: Callable[[int], bytes], ending: str, count: int = 4, split: str = "train"
) -> dict[str, bytes]:
    return {f"data/{split}-{i:05d}-of-{count:05d}.{ending}": make(ROWS * i) for i in range(count)}
