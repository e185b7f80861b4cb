"""Models in the shape of published ones (`shapes.toml`), whose weights are random.

`NAME-as-llama` is a Llama with the matrices of NAME.
"""

import json
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from exl2flow.core.store.files import write_tensors
from exl2flow.model import ModelSpec, ProjectionSpec, expected_tensors, resolve
from exl2flow.model.config.mtp import MtpSpec

TOKENIZER = Path(__file__).parent.parent / "demo" / "model"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LLAMAS: dict[str, list[int]] = _TABLES["llamas"]
OTHERS: dict[str, list[int]] = _TABLES["others"]
CONFIGS: dict[str, dict[str, object]] = _TABLES["configs"]
SHAPES = [*LLAMAS, *(name + end for name in OTHERS for end in ("", "-as-llama"))]
SHARD_BYTES = 5_000_000_000


def write_config(folder: Path, shape: str, layers: int | None = None) -> ModelSpec:
    """Write the files of a model folder other than its weights; layers: None: as many as it has."""
    name = shape.removesuffix("-as-llama")
    sizes = dict(zip(SIZES, (LLAMAS | OTHERS)[name], strict=True))
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    base = json.loads((TOKENIZER / "config.json").read_bytes())
    kept = {"attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "torch_dtype"}
    other = CONFIGS.get(shape)
    config = base if other is None else {key: base[key] for key in kept} | other
    config |= sizes | {"tie_word_embeddings": False, "max_position_embeddings": 65536}
    folder.mkdir()
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(folder)


def linears(spec: ModelSpec) -> list[ProjectionSpec]:
    """Return all linears, the head last."""
    return [*(p for sublayer in spec.sublayers for p in sublayer.projections), spec.head]


def plain(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return what is not a weight of a linear: embedding, routers, norms of 1, biases of 0."""
    return filled(spec, expected_tensors(spec), linears(spec))


def plain_of_block(block: MtpSpec) -> dict[str, torch.Tensor]:
    """Return what is not a weight of a linear in an MTP block."""
    return filled(block.layer, block.tensors, linears_of_block(block))


def linears_of_block(block: MtpSpec) -> list[ProjectionSpec]:
    """Return the linears of an MTP block; the head is the model's."""
    return [block.joint, *linears(block.layer)[:-1]]


def filled(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], matrices: Iterable[ProjectionSpec]
) -> dict[str, torch.Tensor]:
    """Return random values for tensors of these shapes but those of matrices; norms are 1."""
    left_out = {f"{projection.key}.weight" for projection in matrices}
    random = partial(torch.randn, device="cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name, shape in shapes.items():
        if name == f"{spec.embedding_key}.weight":
            found[name] = random(shape).half().cpu()
        elif name not in left_out and len(shape) == 2:
            found[name] = (random(shape) * shape[1] ** -0.5).half().cpu()
        elif name not in left_out:
            value = 0.0 if name.endswith(".bias") else 1 - spec.family.norm_offset
            found[name] = torch.full(shape, value).half()
    return found


def make_model(folder: Path, shape: str, layers: int | None = None) -> None:
    """Write a model of random fp16 weights."""
    spec = write_config(folder, shape, layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tensors = {
        f"{p.key}.weight": (
            torch.randn(p.out_features, p.in_features, device=device) * p.in_features**-0.5
        ).half()
        for p in linears(spec)
    }
    for number, shard in enumerate(shards(tensors | plain(spec))):
        write_tensors(folder / f"model-{number:05d}.safetensors", shard)


def shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors into files of the size usual on the Hub."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor.cpu()
    yield shard
