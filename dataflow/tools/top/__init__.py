"""`dataflow top`: follow trainings that run, on a terminal or as a page, without their knowing.

In: pages of figures, files of this machine or an endpoint's JSON. Out: tables, redrawn once a second.
Read `view` (what two readings say) first, then `steps`, `sources`, `screen` and `web`.
"""
