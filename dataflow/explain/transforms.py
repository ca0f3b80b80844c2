"""Tell whether transforms are those that a state was taken with: by name, and a hash of their source.

A transform with a `fingerprint` has it in the fingerprint of its dataset, which decides. Of others a state
has a mark, for a warning where batches are made again: code may have changed since.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from sharding.plan.difference import TRANSFORMS, bounded, short_digest

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset
    from dataflow.explain.run import ExplainedRun
    from dataflow.mixture import Mixture

_MOST_OF_A_NAME = 24


def facts_of_transforms(dataset: ShardedDataset | Mixture) -> dict[str, str]:
    """The fact of a dataset's transforms for states, at most 60 bytes; none where fingerprints tell."""
    functions = [f for source in dataset.sources for f in (source.transform, source.batch_transform)]
    marks = dict.fromkeys(mark_of(f) for f in functions if f is not None and not _has_fingerprint(f))
    return {TRANSFORMS: str(bounded(" + ".join(marks)))} if marks else {}


def mark_of(transform: Any) -> str:
    """The name of a transform and a hash of its source, such as "tokenize 1f3a09bc".

    Without a source, as of what was typed at a prompt, it is the name. Settings of objects are no part of it.
    """
    while hasattr(transform, "func"):  # a `functools.partial`
        transform = transform.func
    code = transform if hasattr(transform, "__qualname__") else type(transform)
    name = code.__qualname__.rpartition("<locals>.")[2][:_MOST_OF_A_NAME]
    try:
        source = textwrap.dedent(inspect.getsource(code)).strip()
    except (OSError, TypeError):
        return ascii(name)[1:-1][:_MOST_OF_A_NAME]
    return f"{ascii(name)[1:-1][:_MOST_OF_A_NAME]} {short_digest(source)}"


def other_transforms(run: ExplainedRun, *, may_lack: bool = False) -> str:
    """Say how transforms here are not those of the run; "": they are, or the state does not tell.

    `may_lack`: nothing is said where there is no transform here.
    """
    there = run.transforms
    here = facts_of_transforms(run.dataset).get(TRANSFORMS, "none")
    if not there or there == here or (may_lack and here == "none"):
        return ""
    return (
        f"the state was taken with transform= {there} (name, and hash of its source), and here it is {here}: "
        "batches made again may differ from those that were trained on"
    )


def _has_fingerprint(transform: Any) -> bool:
    return bool(getattr(transform, "fingerprint", ""))
