"""Files of records, which are often `tf.train.Example`: TFRecord and ArrayRecord.

In: the bytes of a shard or block. Out: blocks of whole records, and their features as columns.
Read `tfrecord.py` first; `examples.py` makes columns of records. Walks from byte to byte are compiled
(`sharding/core/wire.c`).
"""
