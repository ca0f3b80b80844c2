"""Memory: slots that come back when their last view dies, mapped files, copies, guards against truncation.

In: sizes, files. Out: numpy views of memory that may be pinned, shared or mapped.
Read `arena` first, then `mapping` and `guards`.
"""
