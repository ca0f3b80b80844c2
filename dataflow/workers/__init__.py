"""The drop-in loader over map-style and iterable datasets: torch's semantics, by processes or threads.

In: torch's arguments. Out: torch's batches, with a state that resumes at every batch. Read `iterator` first;
`fetching` has what it sees of the loader, `worker` what is run, `processes` and `threads` who runs it, and
`state` and `samplers` where an epoch stands.
"""
