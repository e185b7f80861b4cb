"""Which embeddings stay in host memory, where a GPU reads the rows of tokens."""

from collections.abc import Collection
from math import prod

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.model.config.spec import ModelSpec

HOST_FROM = 500_000_000  # bytes; a row takes microseconds on the bus, whatever the size


def is_head(spec: ModelSpec, names: Collection[str]) -> bool:
    """Return whether the embedding is the head as well: no tensor of these names is the head's."""
    return spec.tied_head and not any(name.startswith(f"{spec.head.key}.") for name in names)


def host_bytes(
    spec: ModelSpec, names: Collection[str], *, wanted: str, device: torch.device
) -> int:
    """Return the bytes of an embedding that stay in host memory; 0: it is on the device.

    Args:
        spec: the model.
        names: of its tensors.
        wanted: cpu, gpu, or auto: in host memory if it is large, and not the head as well.
        device: that runs the model.

    Raises:
        ConfigError: what is wanted makes no sense.
    """
    nbytes = prod((spec.vocab_size, spec.hidden_size)) * torch.float16.itemsize
    is_shared = is_head(spec, names)
    if device.type == "cpu" and wanted == "gpu":
        raise ConfigError("`--embedding gpu`, but the model runs on a CPU; leave it out")
    if device.type != "cpu" and wanted == "cpu" and is_shared:
        raise ConfigError(
            f"`--embedding cpu`, but the embedding of `{spec.source_dir}` is its head, too, which "
            "the GPU reads for each token; leave it out"
        )
    stays = wanted == "cpu" or (wanted == "auto" and nbytes > HOST_FROM and not is_shared)
    return nbytes if stays and device.type != "cpu" else 0
