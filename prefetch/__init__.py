"""Bytes in motion under a bound: reads, memory, threads and processes; nothing here knows a sample.

In: windows of blocks to read, chunks to build. Out: what was built, in order, within a byte budget.
One of the engine's packages: its names may change in any version (docs/reference/names.md).
`errors`, `work`, `retries` and `weak_registry` serve all packages. Read `engine` first, then `memory`,
`store`, `http`, `control`, `cache`.
"""
