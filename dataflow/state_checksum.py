"""The checksum of a loader's state.

A position that was changed names other samples just as well, so nothing else in a state can show that it was
damaged, cut short or merged with another one. The checksum is of the JSON text of the other fields: whatever
keeps JSON values keeps it, in files of any kind. It is no protection against somebody who means harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

_CHECKSUM = "checksum"


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A state of these fields, with their checksum."""
    return {**fields, _CHECKSUM: _checksum(fields)}


def checked_fields(state: Any) -> dict[str, Any]:
    """The fields of a state without its checksum.

    Raises:
        ValueError: this is not what `state_dict` returned.
    """
    if not isinstance(state, Mapping) or _CHECKSUM not in state:
        raise ValueError(
            "not a state of a DataLoader: it must be what state_dict() returned (a mapping with a checksum), "
            f"got {_shown(state)}; to begin anew, load no state"
        )
    fields = {name: value for name, value in state.items() if name != _CHECKSUM}
    try:
        right = _checksum(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state is damaged: {error}") from error
    if state[_CHECKSUM] != right:
        raise ValueError(
            f"the state was damaged or edited after state_dict() returned it: its checksum is {right}, and "
            f"it has {_shown(state[_CHECKSUM])}"
        )
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    # A dataset's own state may hold objects that are no JSON: of those, only where they are counts.
    text = json.dumps(
        fields, sort_keys=True, separators=(",", ":"), default=lambda thing: type(thing).__qualname__
    )
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _shown(thing: object) -> str:
    text = repr(thing)
    return text if len(text) <= 200 else f"{text[:200]}..."
