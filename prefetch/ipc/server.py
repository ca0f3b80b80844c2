"""Start the processes of this library from our fork server, and say what that imports first."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import Any

from prefetch.workers.fork_server import Modules, ServerNeeds

_OURS = {"dataflow", "prefetch", "sharding"}
_IN_SERVER = {*sys.stdlib_module_names, *_OURS, "cloudpickle", "msgspec", "numpy", "torch"}
"""Packages that every server has imported: what is sent of them needs no other server."""


def start_context(context: Any) -> Any:
    """Return how worker processes start, by the argument of the loader; None: from our fork server."""
    if context is not None or multiprocessing.parent_process() is not None:
        return context  # a child process has inherited its method, not chosen it
    method = multiprocessing.get_start_method(allow_none=True)
    # The platform's default is nobody's choice: it is fixed as soon as anything is used that comes from it,
    # the lock of a progress bar for instance.
    if method in (None, multiprocessing.get_all_start_methods()[0]):
        return None
    import torch

    return torch.multiprocessing.get_context(method)


def server_needs(
    modules: set[str], main: str, *, preload: tuple[str, ...] = ("torch", "numpy.random")
) -> ServerNeeds:
    """Return the needs of a server that knows the modules of what processes work on, and runs `main`."""
    return ServerNeeds(preload=(*preload, main), modules=_importable(modules), unforkable=_unforkable())


def _unforkable() -> str:
    """Why what torch is set to now must not stay with all workers to come; "" where it may."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.cuda.is_initialized():
        return "CUDA was in use in this process"
    stacks = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    if stacks or casts or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "the loader was made under torch.no_grad(), a default device or another mode of torch"
    return ""


def _importable(names: set[str]) -> Modules:
    """Return the modules that a fork server should import; what it has anyway is left out."""
    modules = set()
    for name in filter(None, names):  # of what `exec` has defined it is None
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if name.partition(".")[0] in _IN_SERVER or spec is None or not spec.origin:
            continue
        with contextlib.suppress(OSError):
            modules.add((name, os.stat(spec.origin).st_mtime_ns))
    return frozenset(modules)
