"""Worker processes and threads: started fast, fed with tasks, watched, ended with nothing left behind.

In: a function to run, messages. Out: responses, in memory that all processes share.
Read `pool` first, then `shared_arena`; `fork_server` and `forked_server` start processes, `worker_start` is
what those get, `threads` are threads. Nothing here knows what the workers do.
"""
