"""Megatron-Energon's descriptions of datasets: a folder `.nv-meta`, and metadatasets. Read `folder` first.

A folder comes in, and its tars with fields and samples come out; a metadataset gives several folders.
"""
