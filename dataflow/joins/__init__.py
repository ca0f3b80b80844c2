"""Another dataset's columns beside a dataset's own: samples are matched by key, and read together.

In: two datasets. Out: a table of matches, and windows in which the columns of both lie side by side.
Read `join` first; `windows` opens what a window needs of the other, `reads` counts what that costs a session.
"""
