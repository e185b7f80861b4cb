"""A LoRA adapter as PEFT saves it: y = x Wᵀ + scaling · (x Aᵀ) Bᵀ for linears of decoder layers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from exl2flow.core import words
from exl2flow.core.errors import NO_JSON, ConfigError
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.model import ModelSpec, fused_rows

FILES = ("adapter_model.safetensors", "adapter_model.bin")
LAYERS = re.compile(r"(?:^|\.)(?:language_)?model\.layers\.")  # before it: who saved the adapter
HALVES = (".lora_A.weight", ".lora_B.weight")
SKIPPED = (".original_module.weight", ".modules_to_save.weight")
MOST = 1 << 20  # ranks that can be
NO_BIAS = 1e-6  # the greatest magnitude in a bias that counts as zero
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHANGED = ("pissa", "olora", "corda", "loftq")  # values of `init_lora_weights` that change W
UNUSABLE = (*NO_JSON, OverflowError, KeyError, TypeError, AttributeError)  # by a damaged file
REFUSED = (  # options that change the arithmetic
    "fan_in_fan_out",
    "use_dora",
    "use_qalora",
    "layer_replication",
    "alora_invocation_tokens",
    "rank_pattern",
    "alpha_pattern",
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank matrices in main memory; adapters of equal `digest` are equal.

    digest: of the matrices, which include the scaling; model: the folder of the model.
    matrices: by key of a projection, A (rank, k) and scaling · Bᵀ (rank, n).
    """

    digest: bytes = field(repr=False)
    folder: Path = field(compare=False)
    model: Path = field(compare=False)
    rank: int = field(compare=False)
    matrices: Mapping[str, tuple[Tensor, Tensor]] = field(compare=False, repr=False)

    @classmethod
    def load(cls, folder: Path | str, model: LoadedModel, *, scaling: float = 1.0) -> Self:
        """Load an adapter for a model; `scaling` multiplies its own, alpha / r or alpha / √r.

        Raises:
            ConfigError: a file is missing or damaged, or the adapter is of a kind that is not
                supported, or for another model; the message names file and tensor.
        """
        if model.ranks is not None:
            raise ConfigError(f"`{folder}` needs a whole model, not one that ranks share")
        folder, spec, dtype = Path(folder), model.spec, model.decoder.embedding.weight.dtype
        config, matrices = _config(folder), dict[str, tuple[Tensor, Tensor]]()
        rank: int = config["r"]
        scale = scaling * config["lora_alpha"] / rank ** (0.5 if config.get("use_rslora") else 1)
        for key, (a, b) in _halves(folder, spec, rank).items():
            matrices[key] = a.to(dtype).contiguous(), (scale * b.float()).T.to(dtype).contiguous()
        digest = _digest(matrices, rank, folder, "fetch it again")
        return cls(digest, folder, spec.source_dir, rank, matrices)

    def scaled(self, scale: float) -> Self:
        """Return the adapter with its effect multiplied, whatever its files hold by now.

        Raises:
            ConfigError: a value overflows.
        """
        matrices = {k: (a, (scale * b.float()).to(b.dtype)) for k, (a, b) in self.matrices.items()}
        digest = _digest(matrices, self.rank, self.folder, f"the scale {scale:g} is too large")
        return replace(self, digest=digest, matrices=matrices)


def _digest(
    matrices: Mapping[str, tuple[Tensor, Tensor]], rank: int, folder: Path, advice: str
) -> bytes:
    """Return the digest of finite matrices; raises `ConfigError` if some are not."""
    digest = blake2b(digest_size=16)
    for key, halves in matrices.items():
        digest.update(f"{key} {rank} {halves[0].dtype}".encode())
        for half in halves:
            digest.update(half.numpy().data)
            if not half.isfinite().all():
                why = f"is not finite in {half.dtype} after scaling; {advice}"
                raise ConfigError(f"`{key}` in the adapter `{folder}` {why}")
    return digest.digest()


def adapters_of(adapters: Sequence[object], model: LoadedModel) -> tuple[Adapter, ...]:
    """Return the adapters of a request; raise `ConfigError` if the model cannot use one of them."""
    source = model.spec.source_dir
    for adapter in adapters:
        if not isinstance(adapter, Adapter) or adapter.model != source:
            how = "load it with `Adapter.load(folder, model)`"
            raise ConfigError(f"{adapter!r} was not loaded for `{source}`; {how}")
    if adapters and not isinstance(model.decoder.sublayers, list):
        how = "load the model without `streamed`"
        raise ConfigError(f"`{source}` is read from disk in each pass, without adapters; {how}")
    return cast(tuple[Adapter, ...], tuple(adapters))


def salt_of(adapters: Sequence[Adapter]) -> bytes:
    """Return the salt for the page hashes of a text with these adapters, in any order."""
    return b"".join(sorted(adapter.digest for adapter in adapters))


def _config(folder: Path) -> dict[str, Any]:
    """Return PEFT's options, if they mean plain LoRA."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        wrong = [] if config["peft_type"] == "LORA" else ["peft_type"]
        wrong += [] if type(config["r"]) is int and 0 < config["r"] <= MOST else ["r"]
        wrong += [] if config["lora_alpha"] + 0.0 > 0 else ["lora_alpha"]
        wrong += [name for name in REFUSED if config.get(name)]
    except (FileNotFoundError, NotADirectoryError) as error:
        advice = "give the folder of a LoRA that PEFT saved"
        raise ConfigError(f"`{path}` does not exist; {advice}") from error
    except UNUSABLE as error:
        why = words.cause(error)
        raise ConfigError(f"`{path}` describes no LoRA: {why}; use what PEFT saved") from error
    if str(config.get("init_lora_weights")).startswith(CHANGED):
        wrong.append("init_lora_weights")
    for name in wrong:
        value = f"`{name}`: {config[name]!r}"
        raise ConfigError(f"{value} in `{path}` is not supported; merge it into the model")
    return cast(dict[str, Any], config)


def _halves(folder: Path, spec: ModelSpec, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each projection that an adapter changes, in the order of the model."""
    (path, tensors), weights = _tensors(folder), dict[str, Tensor]()
    linears = [p for s in spec.sublayers if s.group is None for p in s.projections]
    of_experts = tuple(f"{p.key}." for s in spec.sublayers if s.group for p in s.projections)
    shapes = {p.key + HALVES[0]: (rank, p.in_features) for p in linears}
    shapes |= {p.key + HALVES[1]: (p.out_features, rank) for p in linears}
    for name, x in _apart(spec, tensors):
        layers, why = LAYERS.search(name), ""
        key = spec.layers_key + name[layers.end() :] if layers else name
        if name.endswith(SKIPPED):
            continue
        if x.dtype not in DTYPES:
            why = f"has dtype {x.dtype}; save it as fp16, bf16 or fp32"
        elif name.endswith(".bias") and (x.abs() <= NO_BIAS).all():
            continue
        elif not layers or not key.endswith(HALVES):
            why = "is not a `lora_A` or `lora_B` weight of a decoder layer; merge it into the model"
        elif key.startswith(of_experts):
            why = "changes an expert, which no adapter can do yet; merge it into the model"
        elif key not in shapes:
            why = f"changes what `{spec.source_dir}` does not have; it is for another model"
        elif x.shape != shapes[key]:
            why = f"has shape {tuple(x.shape)}, `r` and the model imply {shapes[key]}; it is for "
            why += "another model"
        if why:
            raise ConfigError(f"`{name}` in `{path}` {why}")
        weights[key] = x
    a, b = ({p.key: weights[p.key + h] for p in linears if p.key + h in weights} for h in HALVES)
    if not a or a.keys() != b.keys():
        what = min(a.keys() ^ b.keys(), default="any linear")
        raise ConfigError(f"`{path}` lacks `lora_A` or `lora_B` of `{what}`; save it again")
    return {key: (a[key], b[key]) for key in a}


def _apart(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor; split those of a stored linear with several projections."""
    fused = {} if spec.family.packed_heads else dict(p for h in HALVES for p in fused_rows(spec, h))
    for name, x in tensors.items():
        start, end = LAYERS.search(name), name.endswith(HALVES[1])
        rows = fused.get(spec.layers_key + name[start.end() :]) if start else None
        if start is None or rows is None or (end and len(x) != sum(rows.values())):
            yield name, x
            continue
        pieces = torch.split(x, [*rows.values()]) if end else [x] * len(rows)
        for key, piece in zip(rows, pieces, strict=True):
            yield name[: start.end()] + key.removeprefix(spec.layers_key), piece


def _tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file that holds the weights, and its tensors; unpickling runs no code."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"`{folder}` has neither `{FILES[0]}` nor `{FILES[1]}`; fetch one")
    try:
        is_safe = path.suffix == ".safetensors"
        tensors = load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True)
        return path, {str(name): torch.as_tensor(x).detach() for name, x in tensors.items()}
    except Exception as error:  # unpickling raises nearly anything
        raise ConfigError(
            f"cannot read `{path}` as tensors: {words.cause(error)}; fetch it again"
        ) from error
