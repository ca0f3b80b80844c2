"""Formats of MosaicML Streaming (MDS) and of LitData: shards that an `index.json` lists.

Both begin with a table of offsets (`offset_table`), and share how some values are stored (`stored_values`).
Read `mds` first.
"""
