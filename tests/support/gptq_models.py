"""Checkpoints in GPTQ form, packed by loops over single codes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from exl2flow.model import resolve


def packed_rows(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes (k, n) eight to a word along k, the lowest first."""
    words = torch.zeros(len(codes) // 8, codes.shape[1], dtype=torch.int64)
    for row, values in enumerate(codes.long()):
        words[row // 8] |= values << (4 * (row % 8))
    return words.to(torch.int32)


def packed_columns(codes: torch.Tensor) -> torch.Tensor:
    return packed_rows(codes.T).T.contiguous()


def packed(
    codes: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    g_idx: torch.Tensor | None = None,
    key: str,
) -> dict[str, torch.Tensor]:
    found = {
        f"{key}.qweight": packed_rows(codes),
        f"{key}.qzeros": packed_columns(zeros),
        f"{key}.scales": scales,
    }
    return found if g_idx is None else found | {f"{key}.g_idx": g_idx.to(torch.int32)}


def as_gptq(source: Path, *, version: str | None = None, bias: float | None = None) -> Path:
    """Store the decoder's matrices of a model in GPTQ form, act-ordered, in the same folder.

    Returns:
        A folder with the plain model that they decode to.
    """
    plain = source.with_name("plain")
    plain.mkdir()
    weights = load_file(source / "model.safetensors")
    gptq, decoded = dict(weights), dict(weights)
    for projection in (p for s in resolve(source).sublayers for p in s.projections):
        weight = gptq.pop(f"{projection.key}.weight").T.float()  # (k, n)
        k, n = weight.shape
        g_idx = (torch.arange(k) // 32)[torch.randperm(k)]
        zeros = torch.randint(5, 9, (k // 32, n))
        scales = torch.stack([weight[g_idx == g].abs().amax(0) / 7 for g in range(k // 32)]).half()
        codes = (weight / scales[g_idx].float()).round() + zeros[g_idx] + 1
        codes = codes.clamp(0, 15)
        lacks = 1 if version is None else 0
        gptq |= packed(codes, zeros + 1 - lacks, scales, g_idx=g_idx, key=projection.key)
        steps = (codes - zeros[g_idx] - 1).half()
        decoded[f"{projection.key}.weight"] = (steps * scales[g_idx]).float().T.contiguous()
        if bias is not None:
            gptq[f"{projection.key}.bias"] = torch.full((n,), bias)
    save_file(gptq, source / "model.safetensors")
    save_file(decoded, plain / "model.safetensors")
    config = json.loads((source / "config.json").read_bytes())
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config["quantization_config"] |= {"checkpoint_format": version} if version else {}
    (source / "config.json").write_text(json.dumps(config))
    return plain
