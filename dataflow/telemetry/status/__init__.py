"""The page of figures: what a training writes once a second, for whoever watches it from outside.

In: plain values that loaders and schedules say of themselves. Out: a file a process, and its readers.
Read `record` (what a page says) first, then `loaders` (who says it), `page` (when it is written), `reading`.
"""

OFF = "DATAFLOW_LIVE"
"""The environment variable that turns pages off: 0."""
