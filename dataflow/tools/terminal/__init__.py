"""The parts that commands share: options, the writer of reports, indexing.

In: text that a user typed; results. Out: settings, errors in a sentence; terminal text, JSON, pages.
Read `options` first, then `report`.
"""
