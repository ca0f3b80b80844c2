"""Chunks built by other processes: what crosses to them, who hands it out, and what such a process does.

In: chunks of the engine, with their windows staged. Out: their batches, in memory that all processes share.
Read `hand_out` and `builders` first; `shipped` is what crosses, `builder_main` what a process does with it,
`payload` how Python objects cross, `auto` and `choice` how threads become processes.
"""
