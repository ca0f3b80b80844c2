"""Turn columns into batches: the columns of a chunk are built, split, transformed and put together.

In: staged windows, the rows of some batches. Out: batches in slots of the arena. Read `chunk` first, then
`builder`; `dataflow.outputs` has what becomes of a column; `packed` lays pieces into rows, `samples` takes
batches apart for functions of the user's, `transforms` says what those may be.
"""
