"""The header of a `.npy` value, read without evaluating it.

numpy evaluates the header with `ast.literal_eval`, which takes the GIL for 20 us and now and then fails
where several threads do it at once (gh-106905, seen with CPython 3.11.7: "SystemError: AST constructor
recursion depth mismatch"). What `numpy.save` writes for plain arrays is one fixed line, matched here;
anything else is None, and for numpy to read.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

MAGIC = b"\x93NUMPY"
_LINE = re.compile(
    rb"\{'descr': '([^'\\]+)', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d+,(?: \d+(?:, \d+)*)?)?)\), \}\s*"
)


def plain_header(data: bytes | memoryview) -> tuple[np.dtype[Any], bool, tuple[int, ...], int] | None:
    """dtype, Fortran order, shape and first data byte, from the first bytes of a value; None if not plain."""
    head = bytes(data[:12])
    if head[:6] != MAGIC or len(head) < 12 or head[6] not in (1, 2, 3):
        return None
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    match = _LINE.fullmatch(bytes(data[start:end])) if end <= len(data) else None
    if match is None:
        return None
    descr, fortran, shape = match.groups()
    dtype = np.dtype(descr.decode())
    if dtype.hasobject:
        return None
    return dtype, fortran == b"True", tuple(int(n) for n in shape.replace(b" ", b"").split(b",") if n), end
