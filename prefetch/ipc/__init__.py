"""Exchange messages and objects between the training process and its workers.

In: a job, requests, objects that workers make. Out: the same objects, in memory that both sides map.
Read `protocol` first, with the loop that every worker runs; `pipe` is the way to processes and back,
`payload` and `batch_writer` take objects apart, processes start from the `server`, draw from `generators`.
"""
