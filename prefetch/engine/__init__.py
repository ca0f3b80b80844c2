"""The engine: windows are staged and chunks built by many threads, and delivered in order.

In: an endless iterator of windows (`work`), a ledger of bytes. Out: batches in stream order.
Read `work` (what it is given) first, then `engine`; `windows` and `builds` are its two queues, `builders` who
builds, `ledger` keeps the bytes, `pool` runs the tasks.
"""
