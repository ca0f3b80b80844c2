"""`dataflow explain`: which samples were in a step of a training, as a table or a page.

In: shards or a function that makes the loader, and a checkpoint. Out: rows of samples, a page.
Read `command` first; `saved` finds the loader's state in a checkpoint.
"""
