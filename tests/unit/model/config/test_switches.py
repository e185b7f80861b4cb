"""Every key of transformers' config classes is read, or is known to change nothing.

A switch that no code reads would be accepted, and the model would compute something else.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ALL, row_of
from published import PUBLISHED
from published import row_of as published_row
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exl2flow.core.errors import Exl2FlowError, UnsupportedArchitecture
from exl2flow.model import resolve
from exl2flow.model.config import resolution
from exl2flow.model.config.families import FAMILIES

# why a key changes nothing → keys
NEUTRAL = {
    "of training: values that are dropped": """
        attention_dropout attn_pdrop embd_pdrop emb_pdrop resid_pdrop embedding_dropout
        residual_dropout
    """,
    "of training: first values, losses, noise": """
        initializer_range output_router_logits router_aux_loss_coef router_jitter_noise
    """,
    "how it is computed, not what": """
        use_cache pretraining_tp attention_softmax_in_fp32 scale_attention_softmax_in_fp32
        reorder_and_upcast_attn
    """,
    "tokens that no layer knows": "pad_token_id eod_token_id sep_token_id",
    "of heads that classify": """
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj
    """,
    "sections, whose keys are read": "attn_config ffn_config",
    "in files under another name, which is read": "num_mtp_layers",
}
CHANGES_NOTHING = {key for keys in NEUTRAL.values() for key in keys.split()}
REFUSED = {  # of layers that a row refuses
    "GraniteMoeHybridForCausalLM": """
        num_experts_per_tok mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state
        mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit
    """
}
# without these, others decide; with them, layers are of another kind
ABSENT = ("layer_types", "no_rope_layers", "mlp_layer_types", "rope_parameters", "rope_scaling")
PRESENT: tuple[dict[str, object], ...] = (
    {},
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    {"mlp_only_layers": [0]},
    {"num_local_experts": 2},
    {"interleave_moe_layer_step": 2},
    {"tie_word_embeddings": False},
)


class Recorded(dict[str, Any]):
    """Notes which keys are asked for."""

    def __init__(self, values: dict[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


def class_of(row: tuple[str, str | None]) -> Any:
    """Return the config class of a row's text model; None: transformers has none."""
    architecture, text_type = row
    kind = text_type or TYPES.get(architecture)
    return None if kind is None else CONFIG_MAPPING[kind]


def configs_of(row: tuple[str, str | None]) -> Iterator[dict[str, Any]]:
    """Yield configs of a row: published and tiny ones and its class's, and with other keys."""
    architecture, text_type = row
    wholes = [model.config for name, model in PUBLISHED.items() if published_row(name) == row]
    tiny = [values for name, (_, _, values) in ALL.items() if row_of(name) == row]
    if (kind := class_of(row)) is not None:
        own = json.loads(kind().to_json_string(use_diff=False))
        tiny.append(own if text_type is None else {"text_config": own | {"model_type": text_type}})
    wholes += [{**values, "architectures": [architecture]} for values in tiny]
    for whole in wholes:
        inner = whole.get("text_config", whole)
        less = [{k: v for k, v in inner.items() if k != key} for key in ABSENT]
        for values in (*less, *(inner | more for more in PRESENT)):
            yield {**whole, "text_config": values} if inner is not whole else values


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: "-".join(filter(None, row)))
def test_every_key_is_read_or_changes_nothing(
    row: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, merged = set[str](), resolution._values
    monkeypatch.setattr(resolution, "_values", lambda *given: Recorded(merged(*given), asked))
    unread = {*getattr(class_of(row), "__dataclass_fields__", ())}
    unread -= {*PreTrainedConfig.__dataclass_fields__} | CHANGES_NOTHING
    unread -= {*REFUSED.get(row[0], "").split()} | {str(key) for _, key in FAMILIES[row].keys}

    for config in configs_of(row):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with suppress(Exl2FlowError):  # some of these cannot be
            resolve(tmp_path)
        if not unread - asked:
            break

    assert unread - asked == set()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Qwen3.8-27B", "attn_output_gate", False),
        ("Qwen3.8-27B", "output_gate_type", "sigmoid"),
        ("Qwen3.8-27B", "mtp_use_dedicated_embeddings", True),
        ("Qwen3.6-35B-A3B", "output_gate_type", "sigmoid"),
        ("gpt-oss-20b", "swiglu_limit", 8.0),
    ],
)
def test_values_that_no_row_computes_are_refused(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    whole = json.loads(json.dumps(PUBLISHED[name].config))
    whole.get("text_config", whole)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(whole))

    with pytest.raises(UnsupportedArchitecture, match=f"{key}.* would compute something else"):
        resolve(tmp_path)
