"""The fsspec filesystem of a URL, in whose name any sign may stand.

fsspec takes every `::` for a chain; `sharding.urls.is_chain` knows better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharding.urls import is_chain, protocol_of


def url_to_fs(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem of a URL, made with these keyword arguments, and the path in it; fsspec's errors."""
    import fsspec.core  # only here: shards of this machine that are spelled out need none of it

    if "::" not in url or is_chain(url):
        fs, path = fsspec.core.url_to_fs(url, **options)
        return fs, str(path)
    protocol = protocol_of(url)
    said = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url)
    fs = fsspec.filesystem(protocol, **{**said, **options})
    return fs, str(fs._strip_protocol(url))
