"""Bytes in motion under a bound: reads, memory, threads and processes; nothing here knows a sample.

In: windows of blocks to read, chunks to build. Out: what was built, in order, within a byte budget.
`errors`, `work` and `weak_registry` serve all rooms. Read `engine` first, then `memory`, `store`,
`control`, `cache`.
"""
