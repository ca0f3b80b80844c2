"""From blocks to columns: a window's bytes are read, decoded, and kept until its batches are built.

In: a source, the blocks of a window, the samples wanted. Out: `StagedWindow`: columns as arrays or spans.
Read `window` first, then `columns`; `source` reads, `mapped` leaves bytes in the file, `stager` puts it
together.
"""
