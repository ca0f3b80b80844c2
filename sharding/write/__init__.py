"""Writing shards: tars whose files appear whole or not at all.

In: samples as dicts. Out: tar shards of a wanted size, closed atomically, and their count.
Read `writer` first; `shard` is one tar on its way, `file` one file that appears when it is whole.
"""
