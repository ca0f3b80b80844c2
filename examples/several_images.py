"""Samples with several images each: as members of a tar, and between pieces of text in Parquet.

python examples/several_images.py
"""

import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from simplejpeg import encode_jpeg

from dataflow import DataLoader, Image, ShardedDataset, ShardWriter

jpg = encode_jpeg(np.zeros((40, 60, 3), np.uint8))
with tempfile.TemporaryDirectory() as folder:
    # A tar whose samples have 0 to 3 pages: 0003.0.jpg, 0003.1.jpg ...
    with ShardWriter(f"{folder}/pages-%02d.tar") as shards:
        for i in range(20):
            pages = {f"{page}.jpg": jpg for page in range(i % 4)}
            shards.write({"__key__": f"{i:04d}", "cls": i % 10, **pages})
    # [tar]
    drawn = {"images": Image(size=32, crop="random_resized")}
    columns = {"images": "*.jpg", "label": "cls"}
    documents = ShardedDataset(f"{folder}/pages-*.tar", columns=columns, decode=drawn)
    for batch in DataLoader(documents, batch_size=8):
        images, offsets = batch["images"]  # Ragged: all images of the batch, and where each sample's begin
        print(f"{list(images.shape)} at {offsets.tolist()}")
    # [end]

    # Text and images in turns: two lists, each with nulls where the other has a value.
    rows = [{"images": [None, jpg, None], "texts": ["A cat", None, "and no dog."]}]
    schema = pa.schema({"images": pa.list_(pa.binary()), "texts": pa.list_(pa.string())})
    pq.write_table(pa.Table.from_pylist(rows, schema), f"{folder}/turns.parquet")
    # [turns]
    turns = ShardedDataset(f"{folder}/turns.parquet", decode={"images": Image(size=32)})
    for batch in DataLoader(turns, batch_size=1):
        print(f"{list(batch['images'].values.shape)}, {batch['texts'][0]}")
    # [end]
