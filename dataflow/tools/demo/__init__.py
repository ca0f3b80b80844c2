"""`dataflow demo`: a small training on real data with every part in use, and a report of it.

In: nothing, or a folder. Out: what was trained, how fast, and where the time went.
Read `demo` first.
"""
