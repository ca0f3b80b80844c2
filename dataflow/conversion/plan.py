"""The plan of a conversion: which samples are which shard's, of what and how; and whether two are the same.

It lies as JSON in the destination. Whoever starts the same conversion again goes on with it; another one is
refused, in words that name what differs.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.conversion.folder import ConversionError
from dataflow.conversion.target import Target
from sharding.spans import Ints

VERSION = 2
_KEPT = ("source", "functions", "unknown", "identity", "options", "bounds", "run")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion: of what, how, and into which shards."""

    source: str
    """The identity of the source: a catalog's fingerprint, or a type and a length; and a hash."""
    functions: Mapping[str, str]
    """"map", "filter", and what the dataset has: name and hash."""
    unknown: Mapping[str, str]
    """The ones that cannot be told from others, and why."""
    identity: str | None = None
    """The user's word for source and functions; None: these are compared."""
    options: Mapping[str, Any]
    bounds: Sequence[int] | None
    """Shard k has the positions `bounds[k]` up to `bounds[k + 1]`; None: of an iterable, as many each."""
    target: Target
    run: int = 0
    """Number of the conversion into its folder."""

    def digest(self) -> str:
        """Return a hash of it, which receipts of its shards bear. What vouches for it does not count."""
        return hashlib.blake2b(replace(self, identity=None).to_json(), digest_size=8).hexdigest()

    def to_json(self) -> bytes:
        """Return the file of it."""
        target = vars(self.target) | {"columns": dict(self.target.columns)}
        target["schema"] = base64.b64encode(self.target.schema).decode()
        plan = {name: getattr(self, name) for name in _KEPT} | {"version": VERSION, "target": target}
        return json.dumps(plan, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, url: str) -> Plan:
        """Read what `to_json` wrote. `ConversionError` where it is none."""
        try:
            plan = json.loads(data)
            if plan["version"] != VERSION:
                raise ValueError(f"it is of version {plan['version']}, this release writes {VERSION}")
            target = dict(plan["target"])
            target["schema"] = base64.b64decode(target["schema"])
            return cls(target=Target(**target), **{name: plan[name] for name in _KEPT})
        except (LookupError, TypeError, ValueError) as error:
            raise ConversionError(
                f"{url} is no plan to go on with ({error}): give an empty folder, or overwrite=True"
            ) from error

    def differences(self, other: Plan) -> list[str]:
        """Return what differs from a plan that was found, in words. What samples show is not compared."""
        differences: list[str] = []
        is_vouched = self.identity is not None and other.identity in (None, self.identity)
        if self.identity is not None and not is_vouched:
            differences.append(f"identity= was {other.identity!r}, and is {self.identity!r}")
        for what, was, now in (
            ("source", {"source": other.source}, {"source": self.source}),
            ("function", other.functions, self.functions),
            ("option", other.options, self.options),
        ):
            for name in sorted({*was, *now} if what == "option" or not is_vouched else ()):
                shown = name if what != "function" else f"{name}="
                if was.get(name) != now.get(name):
                    differences.append(f"{shown} was {was.get(name)!r}, and is {now.get(name)!r}")
                elif what != "option" and (reason := self.unknown.get(name) or other.unknown.get(name)):
                    differences.append(f"{shown} may be another, as nobody can tell of {reason}")
        if not differences and other.bounds != self.bounds:
            differences.append("the shards have other samples")
        return differences


def bounds_by_bytes(num_samples: Ints, nbytes: Ints, shard_bytes: int) -> list[int]:
    """Cut samples into shards of about so many bytes, at the ends of blocks where they are small enough.

    Args:
        num_samples: [blocks] samples that are converted of each block.
        nbytes: [blocks] bytes of these.
        shard_bytes: bytes of a shard.

    Returns:
        Where shards begin and the last ends, counting samples.
    """
    bounds, held, position = [0], 0, 0
    for samples, size in zip(num_samples.tolist(), nbytes.tolist(), strict=True):
        if not samples:
            continue
        if held and held + size > shard_bytes:
            bounds.append(position)
            held = 0
        parts = min(samples, -(-size // shard_bytes)) if size > shard_bytes else 1
        bounds.extend(position + samples * part // parts for part in range(1, parts))
        position += samples
        held = size // parts + (held if parts == 1 else 0)
    if position > bounds[-1]:
        bounds.append(position)
    return bounds
