"""Lists of byte strings, put together from the items of a whole block: for MDS, LitData and TFRecord."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sharding.blocks import Spans
from sharding.byte_lists import ByteLists, list_heads
from sharding.spans import Ints, gathered


def joined_lists(counts: Ints, items: Spans) -> ByteLists:
    """Lists of so many items each, [n], as one piece each; the items follow one another, list by list."""
    heads, head_at = list_heads(counts, items.lengths)
    bodies = gathered(items.buffer.view(np.uint8), items.starts, items.lengths)
    body_at = np.append(0, np.cumsum(items.lengths))[np.append(0, np.cumsum(counts))]
    parts = [
        pa.Array.from_buffers(pa.large_binary(), len(counts), [None, pa.py_buffer(at), pa.py_buffer(content)])
        for at, content in ((head_at, heads), (body_at, np.ascontiguousarray(bodies)))
    ]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    sizes = np.diff(head_at) + np.diff(body_at)
    content = joined.buffers()[2] if len(joined) else None
    buffer = np.zeros(0, np.uint8) if content is None else np.frombuffer(content, np.uint8)
    return ByteLists(buffer, np.cumsum(sizes) - sizes, sizes)
