"""The drop-in loader over map-style and iterable datasets: torch's semantics, by processes or threads.

In: torch's arguments. Out: torch's batches, with a state that resumes at every batch. Read `iterator` first;
`settings` is what it sees of the loader, `progress` the state, `processes` and `threads` who fetches.
"""
