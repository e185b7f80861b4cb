"""Checkpoints of families without a class store weights as those families do."""

from pathlib import Path

import torch
from checkpoints import make_checkpoint, random_model
from safetensors.torch import load_file


def test_queries_of_internlm2_stand_before_their_key_and_value(tmp_path: Path) -> None:
    model = random_model("internlm2-biases")
    make_checkpoint("internlm2-biases", tmp_path)

    stored = load_file(tmp_path / "model.safetensors")

    attention = model.model.layers[1].self_attn
    for kind in ("weight", "bias"):
        q, k, v = (
            getattr(part, kind) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        expected = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
        assert torch.equal(stored[f"model.layers.1.attention.wqkv.{kind}"], expected)


def test_rows_of_the_stored_head_of_index_are_not_normalized(tmp_path: Path) -> None:
    make_checkpoint("index", tmp_path)

    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]

    lengths = torch.tensor([1.0, 2.0, 3.0, 1.0])
    torch.testing.assert_close(head[:4].norm(dim=1), lengths)
    used = random_model("index").lm_head.weight
    torch.testing.assert_close(used, torch.nn.functional.normalize(head))
