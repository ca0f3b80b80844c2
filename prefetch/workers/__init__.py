"""Worker processes and threads: started fast, fed with tasks, watched, ended with nothing left behind.

In: a function to run, messages. Out: responses, in memory that all processes share.
Read `pool` first, then `shared_arena`; `fork_server` and `forked_server` start processes, `worker_start` is
what those get, `threads` are threads. Nothing here knows what the workers do.
"""

STOP_S = 5.0
"""Time that workers have to end by themselves, together."""
REGION_BYTES = 1 << 36
"""Address space of one worker's region: 64 GiB, of which only touched pages exist."""
