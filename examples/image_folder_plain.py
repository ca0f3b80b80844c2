"""Read a folder of class folders with torchvision; image_folder.py does so with this loader.

python examples/image_folder_plain.py
"""

import tempfile
from pathlib import Path

from image_folder import write


def main() -> None:
    """Read an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))  # yours is there already
        # [loader]
        from torch.utils.data import DataLoader
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        dataset = ImageFolder(folder, transform=v2.Compose([v2.Resize((32, 32)), v2.PILToTensor()]))
        names = dataset.classes
        loader = DataLoader(dataset, batch_size=40, shuffle=True, num_workers=2)
        # [end]
        print(f"{len(dataset)} images of the classes {', '.join(names)}")
        print(f"{len(list(loader))} batches")


if __name__ == "__main__":
    main()
