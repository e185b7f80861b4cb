"""Rows of families that no one published: one for each way in which a block may differ."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.model.config.families import FAMILIES, GRANITE, LLAMA
from exl2flow.model.config.family import HeadNorms

AFTER = ("post_attention_norm", "post_mlp_norm")
ROWS = {
    "parallel": replace(GRANITE, is_parallel=True, score_scale_key=None),
    "plain": replace(LLAMA, is_gated=False, linears=(("up", "mlp.c_fc"), ("down", "mlp.c_proj"))),
    "after": replace(
        LLAMA,
        norms=None,
        post_norms=AFTER,
        head_norms=HeadNorms.WHOLE,
        norm_offset=1.0,
        is_centered=True,
        norm_bias=True,
    ),
    "capped": replace(
        GRANITE,
        post_norms=AFTER,
        residual_scale=2.0**-6,
        score_scale_key=None,
        logit_softcap_key="final_logit_softcapping",
        known=(*GRANITE.known, "final_logit_softcapping"),
    ),
}
VALUES: dict[str, dict[str, object]] = {
    "parallel": {"residual_multiplier": 0.5},
    "plain": {"hidden_act": "gelu"},
    "after": {},
    "capped": {"final_logit_softcapping": 3.0, "logits_scaling": 0.5},
}


def add_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of these rows be resolved."""
    for name, row in ROWS.items():
        monkeypatch.setitem(FAMILIES, (name, None), replace(row, architecture=name))


def block_config(name: str) -> dict[str, object]:
    """Return the config keys of a row's model, beside those of a tiny Llama."""
    return {"architectures": [name], **VALUES[name]}


def make_block(name: str, folder: Path) -> Path:
    """Write a random checkpoint of a row; see `make_tiny`."""
    return make_tiny("llama", folder, **block_config(name))
