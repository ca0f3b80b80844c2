"""Extensions of members, and what they say of values, as webdataset reads them."""

from __future__ import annotations

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
TEXT_EXTENSIONS = ("txt", "text", "transcript")
INT_EXTENSIONS = ("cls", "cls2", "class", "count", "index", "inx", "id")
FLOAT_EXTENSIONS = ("float", "flt")
JSON_EXTENSIONS = ("json", "jsn")
PICKLED_EXTENSIONS = ("pyd", "pkl", "pickle", "pth", "pt")
"""Extensions that webdataset and torch unpickle, which runs code."""

_RULES = {
    extension: rule
    for rule, extensions in (
        ("image", IMAGE_EXTENSIONS),
        ("text", TEXT_EXTENSIONS),
        ("int", INT_EXTENSIONS),
        ("float", FLOAT_EXTENSIONS),
        ("json", JSON_EXTENSIONS),
        ("npy", ("npy",)),
        ("pickle", PICKLED_EXTENSIONS),
    )
    for extension in extensions
}


def rule_of_extension(column: str) -> str | None:
    """Return what the values of a column are by its last extension, such as "int"; None: bytes."""
    return _RULES.get(column.rpartition(".")[2].lower())
