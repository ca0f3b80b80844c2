"""Turn blocks into columns: a window's bytes are read, decoded, and kept until its batches are built.

In: a source, the blocks of a window, the samples needed. Out: `StagedWindow`: columns as arrays or spans.
Read `window` first, then `columns`; `reading` and `mapped` are its kinds, `rows` chooses among them.
"""
