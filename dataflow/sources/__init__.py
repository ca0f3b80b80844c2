"""Find the shards and samples that a user names: catalogs, the Hub, LeRobot folders, views, joins.

In: a source, and how it is to be opened. Out: its catalog, a selection of samples, their matches in another
dataset. Read `listing.claims` first, then `opening`; `hub`, `lerobot` and `loose` find files of special
layouts, `views` and `missing` look at samples, `joins` matches keys.
"""
