"""Dataset repositories as an fsspec filesystem that answers from one listing.

Sizes and versions cost no request each. The bytes of ranges are read past it, by `prefetch.http.hub`; what
it reads itself are small whole files (a saved catalog). Beside the event loop, threads make its requests.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from fsspec.asyn import AsyncFileSystem

from sharding.hub.access import HubAccess
from sharding.hub.answers import LISTING_S, IsLate
from sharding.hub.names import DEFAULT_REVISION, HubName, parse_name
from sharding.hub.snapshot import Snapshot, fetch_snapshot, read_file


def hub_filesystem(options: Mapping[str, Any]) -> HubFileSystem | None:
    """The filesystem with these `storage_options`.

    None: there are others than `token` and `endpoint`, or a proxy in between. huggingface_hub's own
    filesystem knows both, and reads the same URLs.
    """
    if set(options) - {"token", "endpoint"}:
        return None
    access = HubAccess.given(options)
    endpoint = urlsplit(access.endpoint)
    if {endpoint.scheme, "all"} & getproxies().keys() and not proxy_bypass(endpoint.hostname or ""):
        return None
    return HubFileSystem(token=access.token, endpoint=access.endpoint)


class HubFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Files of `hf://datasets/...`.

    Args:
        token: a token of the Hub; None: the user's own; False: none.
        endpoint: where the Hub is; None: `HF_ENDPOINT`, or the public one.
    """

    protocol = "hf"
    fill = "prefetch.http.hub:hub_body"

    def __init__(self, token: str | bool | None = None, endpoint: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.access = HubAccess.given({"token": token, "endpoint": endpoint})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return str(path).removeprefix("hf://").rstrip("/")

    def file_address(self, path: str) -> str:
        """The address at which the Hub says where the bytes of a file are."""
        name = parse_name(f"hf://{path}")
        revision = quote(name.revision or DEFAULT_REVISION, safe="")
        return f"{self.access.endpoint}/datasets/{name.repo}/resolve/{revision}/{quote(name.path)}"

    async def _snapshot(self, name: HubName) -> Snapshot:
        def look() -> Snapshot:
            if name.is_pinned and (
                local_copy := Snapshot.kept(self.access.endpoint, name.repo, str(name.revision))
            ):
                return local_copy
            snapshot = fetch_snapshot(self.access, name, self._is_late())
            snapshot.keep()
            return snapshot

        snapshot: Snapshot = await self.loop.run_in_executor(None, look)
        return snapshot

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        name = parse_name(f"hf://{path}")
        files = (await self._snapshot(name)).files
        if name.path in files:
            size, version = files[name.path]
            return {"name": path, "size": size, "type": "file", "ETag": version}
        if not name.path or any(file.startswith(f"{name.path}/") for file in files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        name = parse_name(f"hf://{path}")
        files = (await self._snapshot(name)).files
        if name.path in files:
            entries = {path: await self._info(path)}
        else:
            entries, root = {}, HubName(name.repo, name.revision, "").url.removeprefix("hf://")
            below = f"{name.path}/" if name.path else ""
            for file, (size, version) in files.items():
                if file.startswith(below):
                    child, *deeper = file.removeprefix(below).split("/")
                    full = posixpath.join(root, below + child)
                    if deeper:
                        entries[full] = {"name": full, "size": 0, "type": "directory"}
                    else:
                        entries[full] = {"name": full, "size": size, "type": "file", "ETag": version}
            if not entries:
                raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        name, size = parse_name(f"hf://{path}"), (await self._info(path))["size"]
        whole: bytes = await self.loop.run_in_executor(
            None, read_file, self.access, name, name.path, size, self._is_late()
        )
        return whole[start:end]

    def _is_late(self) -> IsLate:
        """Says when the time for an answer that is asked for now is over."""
        ends_s = self.loop.time() + LISTING_S
        return lambda: bool(self.loop.time() > ends_s)
