"""Chunks built by other processes: what is sent to them, who hands it out, and what such a process does.

In: chunks of the engine, with their windows staged. Out: their batches, in memory that all processes share.
Read `dispatch` and `builders` first; `serialized` is what is sent, `builder_main` what a process does with
it, `parts` how several make one batch, `threads_first` how threads give way to processes.
"""
