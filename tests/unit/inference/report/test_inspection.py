import json
from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from zeros import zeros

from exl2flow.core.errors import MissingTensor, SourceModelError
from exl2flow.core.store.files import write_tensors
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.model import QuantParams, resolve
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.model.memory import host_embedding

PARAMS = QuantParams(bit_widths=(5, 4), proportions=(0.25, 0.75), group_sizes=(32, 64))
K, N = 128, 64
KEYS = (
    "lm_head",
    "model.layers.10.mlp.experts.0.w1",
    "model.layers.2.mlp.experts.1.w1",
    "model.layers.2.mlp.experts.0.w1",
    "model.layers.2.self_attn.q_proj",
)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of an unknown architecture without any of our files."""
    tensors = {"model.norm.weight": torch.ones(8, dtype=torch.float16)}
    for key in KEYS:
        tensors |= zeros(PARAMS, K, N).to_tensors(key)
    write_tensors(tmp_path / "output.safetensors", tensors)
    return tmp_path


def test_a_foreign_model_is_listed_in_walk_order_with_exact_bits(foreign: Path) -> None:
    contents = inspect_model(foreign)

    assert [part.name for part in contents.parts] == [
        "model.layers.2.self_attn",
        "model.layers.2.mlp.experts",
        "model.layers.10.mlp.experts",
        "lm_head",
    ]
    bits = PARAMS.total_bits(K, N)
    assert [part.bits for part in contents.parts] == [bits, 2 * bits, bits, bits]
    assert contents.bpw == bits / (K * N)
    assert (contents.plain_bytes, contents.host_bytes) == (16, 0)
    assert contents.record is None


def test_a_matrix_has_its_groups_and_widths(foreign: Path) -> None:
    part = inspect_model(foreign).layers[0]

    (found,) = part.matrices
    assert found.shape == (K, N)
    assert found.rows == {5: 32, 4: 96}
    assert (found.groups, found.group_sizes) == (3, (32, 64))
    assert (part.bit_widths, part.group_sizes, part.groups) == ((5, 4), (32, 64), 3)
    assert (part.rel_err, found.rel_err) == (None, None)


def test_errors_come_from_our_record(foreign: Path) -> None:
    layer = {
        "name": "model.layers.2.self_attn",
        "rel_err": 0.25,
        "projections": {"q_proj": {"rel_err": 0.5, "nats": 0.125, "params": "1:4b_32g s4"}},
    }
    (foreign / "exl2flow.json").write_text(json.dumps({"layers": [layer]}))

    contents = inspect_model(foreign)

    part = contents.layers[0]
    (matrix,) = part.matrices
    assert contents.record is not None
    assert (part.rel_err, part.nats) == (0.25, 0.125)
    assert (matrix.rel_err, matrix.nats, matrix.params) == (0.5, 0.125, "1:4b_32g s4")
    assert [matrix.nats for matrix in contents.matrices] == [0.125, None, None, None, None]


def test_divergences_come_from_our_record_and_score(foreign: Path) -> None:
    record = {"fingerprint": "f", "predicted_kl": 0.5, "options": {"quality": "best", "bpw": 3}}
    (foreign / RECORD_FILE).write_text(json.dumps(record))
    scores = {"fingerprint": "f", "score": {"kl_divergence": 0.25}}
    (foreign / SCORE_FILE).write_text(json.dumps(scores))

    value = json.loads(json.dumps(inspect_model(foreign).to_json()))

    assert (value["series"], value["predicted_kl"], value["allocated_kl"]) == ("best", 0.5, None)
    assert value["score"] == {"kl_divergence": 0.25}


def test_the_json_form_is_json(foreign: Path) -> None:
    value = json.loads(json.dumps(inspect_model(foreign).to_json()))

    assert len(value["layers"]) == 3
    assert value["others"][0]["matrices"][0]["rows"] == {"5": 32, "4": 96}
    assert (value["written_by_exl2flow"], value["predicted_kl"], value["score"]) == (
        False,
        None,
        None,
    )


def test_a_missing_folder_and_an_unquantized_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="is not a folder"):
        inspect_model(tmp_path / "nowhere")
    write_tensors(tmp_path / "model.safetensors", {"lm_head.weight": torch.ones(2, 2)})
    with pytest.raises(SourceModelError, match="holds no EXL2 matrices"):
        inspect_model(tmp_path)


def test_a_matrix_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors = zeros(PARAMS, K, N).to_tensors("lm_head")
    del tensors[tensor_names("lm_head")[1]]
    write_tensors(tmp_path / "model.safetensors", tensors)

    with pytest.raises(MissingTensor, match="lm_head"):
        inspect_model(tmp_path)


def test_an_embedding_beside_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_embedding, "HOST_FROM", 1)
    source = make_tiny("llama", tmp_path, tie_word_embeddings=False)
    write_tensors(source / "more.safetensors", zeros(PARAMS, K, N).to_tensors("model.more"))

    contents = inspect_model(source)

    spec = resolve(source)
    assert contents.host_bytes == 2 * spec.vocab_size * spec.hidden_size
    assert contents.to_json()["host_bytes"] == contents.host_bytes
