"""Models for a Hub whose names, sizes and configs are real, and whose weights are not."""

import json

from hub_server import Hub, Tree

EXL2 = {"quant_method": "exl2"}


def offered(hub: Hub, quantization: object = None, *, weights: int = 1000, mark: str = "0") -> Tree:
    """Return the files of a model, whose two shards together have `weights` bytes of a mark."""
    config = {} if quantization is None else {"quantization_config": quantization}
    first = weights * 2 // 5
    return {
        "config.json": hub.entry(json.dumps(config).encode(), is_lfs=False),
        "tokenizer.json": hub.entry(b"{}", is_lfs=False),
        "output-00001-of-00002.safetensors": hub.entry(mark.encode() * first, is_lfs=True),
        "output-00002-of-00002.safetensors": hub.entry(
            mark.encode() * (weights - first), is_lfs=True
        ),
        "training.log": hub.entry(b"of no use", is_lfs=False),
    }


def inside(folder: str, tree: Tree) -> Tree:
    """Return the same files in a folder of the repository."""
    return {f"{folder}/{name}": entry for name, entry in tree.items()}
