"""`dataflow doctor`: runs a training script and tells where its time went.

In: a command, or records that a run has saved. Out: a report as text, page or trace.
Read `command` first; `saved` reads the records, `page` draws them.
"""
