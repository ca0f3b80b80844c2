"""Read the configs in a dataset's README, from the YAML between its first two lines of "---".

The text is whoever's made the dataset. YAML is parsed to nodes, which takes memory as the text does, and only
`configs` becomes values, if these are few: by names for values (`&a`, `*a`) 400 bytes can say 2^40 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharding.hub.access import NO_HUB

CARD_FILES = ("README.md", ".huggingface.yaml")
"""Files whose YAML tells configs; the later one wins."""
_YAML_BYTES = 4 << 20
"""The bytes of YAML, at most; it takes some 1.5 s a MB. The largest heads on the Hub have 1 MB."""
_MOST_VALUES = 1_000_000


def card_configs(cards: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    """The configs that the texts of `CARD_FILES`, by name, tell of; the last text that has some counts.

    Args:
        cards: the texts.
        where: the repository or folder, for messages.

    Raises:
        ImportError: there is YAML and no package for it; names the extra.
        ValueError: it is no YAML, or its configs are none.
    """
    heads = {path: yaml_head(text) if path == CARD_FILES[0] else text for path, text in cards.items()}
    configs: list[dict[str, Any]] = []
    for path, head in heads.items():
        if "configs" in head:
            configs = _configs(head, f"the YAML of {path} in {where}") or configs
    return configs


def yaml_head(readme: str) -> str:
    """The YAML between the first two lines of "---" of a README; "": it has none."""
    lines = readme.splitlines()
    if lines and lines[0] == "---" and "---" in lines[1:]:
        return "\n".join(lines[1 : lines[1:].index("---") + 1])
    return ""


def yaml_value(text: str, what: str, *, key: str = "", needs: str = NO_HUB) -> Any:
    """The value of a YAML text, or of one key of it; None: it has none. Tags make no objects.

    Args:
        text: the YAML.
        what: it is, for messages.
        key: of the mapping that it is, whose value is wanted alone.
        needs: message where the package for YAML is missing.

    Raises:
        ImportError: there is no package for YAML.
        ValueError: it is no YAML, or too large once names are replaced.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(needs) from error
    if len(text) > _YAML_BYTES:
        raise ValueError(f"{what} has {len(text):,} characters; at most {_YAML_BYTES:,} are read")
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, Loader=kind)
        if key:
            node = _child(node, key)
        if node is None:
            return None
        if _num_values(node, {}) > _MOST_VALUES:
            of = f" in {key!r}" if key else ""
            raise ValueError(f"{what} names more than {_MOST_VALUES:,} values{of} (by &name, *name)")
        return kind("").construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} cannot be read: {error!s:.500}") from error
    except RecursionError:
        raise ValueError(f"{what} cannot be read: it is nested too deep") from None


def _configs(head: str, what: str) -> list[dict[str, Any]]:
    value = yaml_value(head, what, key="configs")
    if value is None:
        return []
    if not isinstance(value, list) or not all(
        isinstance(config, dict) and "config_name" in config for config in value
    ):
        raise ValueError(f"configs in {what} must be a list of configs with config_name, got {value!r:.200}")
    return value


def _child(node: Any, name: str) -> Any:
    """The node of a key of a mapping, or None."""
    if node is None or node.id != "mapping":
        return None
    return next((value for key, value in reversed(node.value) if key.value == name), None)


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Count the values of a node once names are replaced; infinity for one that holds itself."""
    if node.id == "scalar":
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")
        children = [child for pair in node.value for child in (pair if node.id == "mapping" else (pair,))]
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]
