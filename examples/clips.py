"""Take clips of video and sound out of a tar.

python examples/clips.py
"""

import tempfile

import torch
from torchcodec.encoders import AudioEncoder, VideoEncoder

from dataflow import Audio, DataLoader, ShardedDataset, ShardWriter, Video


def write_data(folder: str) -> str:
    """Eight videos of two seconds with their sound; yours are there already."""
    frames = torch.randint(0, 256, (60, 3, 64, 64), dtype=torch.uint8)
    video = VideoEncoder(frames, frame_rate=30).to_tensor("mp4", codec="mpeg4").numpy().tobytes()
    sound = AudioEncoder(torch.rand(1, 32_000) - 0.5, sample_rate=16_000).to_tensor("flac").numpy().tobytes()
    with ShardWriter(f"{folder}/clips-%02d.tar") as shards:
        for i in range(8):
            shards.write({"__key__": f"{i:02d}", "mp4": video, "flac": sound, "cls": i})
    return f"{folder}/clips-*.tar"


def main() -> None:
    """Print what the batches hold."""
    with tempfile.TemporaryDirectory() as folder:
        rules = {
            # 24 frames at 8 a second are 3 s: the last frame of these videos is repeated, and a mask says so.
            "mp4": Video(frames=24, fps=8, size=56, pad="last", mask=True),
            "flac": Audio(rate=8_000, seconds=1),
        }
        dataset = ShardedDataset(write_data(folder), decode=rules)
        with DataLoader(dataset, batch_size=4, shuffle=True, seed=1) as loader:
            for batch in loader:
                print({name: (list(value.shape), str(value.dtype)) for name, value in batch.items()})
            print(f"{int(batch['mp4_is_pad'].sum())} frames of the last batch repeat the last one")


if __name__ == "__main__":
    main()
