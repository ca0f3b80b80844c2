"""Imported by a fork server before anything else, so that it finds what the process it belongs to finds.

The standard library's fork server ignores `sys.path` of that process (before Python 3.12); a dataset's module
would be imported by every worker anew, with all that it imports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_VARIABLE: Final = "DATAFLOW_FORK_SERVER_PATH"


@contextmanager
def path_told() -> Iterator[None]:
    """Processes that are started meanwhile, and import this module, take over `sys.path`."""
    os.environ[_VARIABLE] = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


_told = os.environ.pop(_VARIABLE, None)
if _told is not None:
    sys.path[:] = json.loads(_told)
