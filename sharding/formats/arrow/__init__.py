"""Formats that pyarrow decodes: Arrow files and streams, Parquet, JSON Lines.

In: bytes of a shard's index or of one block. Out: blocks, schema, columns as numpy arrays and spans.
Read `columns` first (Arrow arrays as columns), then `parquet`; `messages` checks Arrow's own framing.
"""
