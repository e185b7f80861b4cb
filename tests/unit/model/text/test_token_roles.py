"""What texts begin with: the ids that transformers puts before them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tokenizer
from transformers import AutoTokenizer

from exl2flow.model import Tokenizer

TEXT = "One morning"
BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}
EOS = {"SpecialToken": {"id": "</s>", "type_id": 0}}
BODY = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    tokens = {
        name: {"id": name, "ids": [index], "tokens": [name]}
        for index, name in enumerate(("<s>", "</s>"))
    }
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": tokens,
    }


POST_PROCESSORS = {
    "none (Qwen2.5)": (None, []),
    "bytes only": (BYTES, []),
    "bos": (template(BOS, BODY), [0]),
    "bos in a sequence (Llama 3)": (
        {"type": "Sequence", "processors": [BYTES, template(BOS, BODY)]},
        [0],
    ),
    "two tokens (GLM-4)": (template(EOS, BOS, BODY), [1, 0]),
    "body only": (template(BODY), []),
}


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_texts_begin_as_in_transformers(
    kind: str, add_bos_token: bool | None, tmp_path: Path
) -> None:
    post_processor, opening = POST_PROCESSORS[kind]
    content = json.loads(tiny_tokenizer()) | {"post_processor": post_processor}
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if add_bos_token is not None:
        settings["add_bos_token"] = add_bos_token
    for name, values in (
        ("tokenizer.json", content),
        ("tokenizer_config.json", settings),
        ("config.json", {"bos_token_id": 0, "eos_token_id": 1, "model_type": "llama"}),
    ):
        (tmp_path / name).write_text(json.dumps(values))

    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode(TEXT, add_bos=True)

    assert tokenizer.bos_token_id == 0
    assert ids == opening + tokenizer.encode(TEXT)
    assert ids == AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids
