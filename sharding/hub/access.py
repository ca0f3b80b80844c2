"""Tell the Hub's address, and the token that it is asked with.

`huggingface_hub` (the extra "hub") brings endpoints, tokens and the client; it is imported here, when used.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

NO_HUB = "datasets in the Hugging Face Hub's layout need another package: pip install 'dataflow-loader[hub]'"


@dataclass(frozen=True)
class HubAccess:
    """The Hub's address, and the token that it is asked with."""

    endpoint: str
    token: str | bool | None = None
    """None: the user's own, looked up anew each time; False: none."""

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> Self:
        """The access of `storage_options`, else of the environment."""
        hub = huggingface_hub()
        endpoint = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or hub.constants.ENDPOINT
        return cls(str(endpoint).rstrip("/"), options.get("token"))

    @property
    def host(self) -> str:
        """The host and port, as messages name it."""
        return urlsplit(self.endpoint).netloc

    def is_hub(self, url: str) -> bool:
        """Return whether a URL is of the Hub's own origin, the only one that gets the token."""
        parts, endpoint = urlsplit(url), urlsplit(self.endpoint)
        return (parts.scheme, parts.netloc) == (endpoint.scheme, endpoint.netloc)

    def headers(self) -> dict[str, str]:
        """Return the headers that tell the Hub who asks; to be sent to the Hub only.

        Raises `ValueError` for a token that would go through a network unencrypted.
        """
        token, headers = self._known_token(), {"user-agent": "dataflow-loader"}
        if not token:
            return headers
        if not self._is_private():
            raise ValueError(
                f"a token would go to {self.endpoint} unencrypted: use an endpoint with https://, or send no "
                "token (storage_options={'token': False})"
            )
        return {**headers, "authorization": f"Bearer {token}"}

    def options(self) -> dict[str, str | bool]:
        """The `storage_options` with which another machine asks the same Hub as this process would."""
        token = self._known_token()
        return {"endpoint": self.endpoint} | ({} if token is None else {"token": token})

    def _known_token(self) -> str | bool | None:
        token = self.token
        if token is None or token is True:
            # Not by `build_hf_headers`, which asks the Hub for a list of agents once a day.
            hub = huggingface_hub()
            implicit = token or not hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN
            token = hub.get_token() if implicit else None
        return token

    def _is_private(self) -> bool:
        """Return whether nobody between can read along: encrypted, or on this machine."""
        parts = urlsplit(self.endpoint)
        if parts.scheme == "https" or parts.hostname == "localhost":
            return True
        try:
            return ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return False

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r})"


def huggingface_hub() -> Any:
    """The package. Raises `ImportError` that names the extra."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ImportError(NO_HUB) from error
    return huggingface_hub
