"""A short sample of a model, whole in memory or streamed from disk."""

import math
from pathlib import Path

import torch

from exl2flow.core.runtime.memory import available_memory, free_memory
from exl2flow.engine.generate.generator import Generator
from exl2flow.engine.loading.layer_split import Split, SplitOptions
from exl2flow.engine.loading.load import load_model
from exl2flow.kernels import resolve_device
from exl2flow.model import CanonicalTensors, expected_tensors, resolve
from exl2flow.model.memory.footprint import Footprint, exact_format

PROMPT_TOKENS = 512  # of the prompt at most, to estimate memory


def sample_text(
    model_dir: Path,
    prompt: str,
    *,
    tokens: int,
    seed: int,
    device: str,
    split: SplitOptions | None = None,
) -> str:
    """Return a seeded continuation of a prompt; each token rereads a model that does not fit.

    A model that is split among GPUs, as the options say, has to fit.

    Raises:
        SourceModelError, BackendUnavailable, ConfigError, OutOfDeviceMemory: see `load_model`.
    """
    room = PROMPT_TOKENS + tokens
    placement = None if split is None else Split.of(split, tokens=room, slots=1)
    fits = placement or _fits_in_memory(model_dir, resolve_device(device), tokens=room)
    model = load_model(model_dir, device=device, placement=placement, streamed=not fits)
    room = min(model.max_tokens, room)
    generator = Generator(model, tokens=room, slots=1)
    return generator.generate(prompt, max_new_tokens=tokens, seed=seed)


def _fits_in_memory(model_dir: Path, device: torch.device, *, tokens: int) -> bool:
    """Return whether a device has room for a whole model and a sequence of `tokens` tokens.

    A GPU holds packed matrices as its kernels read them, a CPU decodes all matrices to fp32.
    """
    spec = resolve(model_dir)
    needs = Footprint.of(spec, context=tokens, cache_format=exact_format(device))
    if device.type == "cuda":
        tensors = CanonicalTensors(spec)
        stored = sum(tensors.nbytes(name) for name in tensors.names)
        return stored + needs.total - needs.device <= free_memory(device)
    room = available_memory()
    numel = sum(math.prod(shape) for shape in expected_tensors(spec).values())
    return room is None or (numel * torch.float32.itemsize + needs.cache) <= room
