"""Parts of stored matrices decode to parts of what the whole ones decode to."""

import pytest
import torch
from gptq_models import as_gptq
from packed_models import make_packed
from rank_decoders import packed
from thread_ranks import on_both
from tiny import make_tiny

from exl2flow.kernels import get_ops
from exl2flow.model import CanonicalTensors, ModelSpec, resolve
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.model.files.gptq import GptqMatrix
from exl2flow.model.layers.linear import Part, read_part
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import cut_columns, cut_groups, groups_of

KINDS = {"exl2": QuantizedMatrix, "gptq": GptqMatrix}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spec(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("shards") / "model"
    if kind == "exl2":
        return make_packed("llama", folder)
    as_gptq(make_tiny("llama", folder, intermediate_size=256))
    return resolve(folder)


def stored(spec: ModelSpec, role: str) -> Part:
    projection = next(p for p in spec.projections if p.role == role)
    return read_part(CanonicalTensors(spec), projection, gptq=spec.gptq_label)


def decoded(part: Part) -> torch.Tensor:
    """Return the values (k, n) of the columns that are used."""
    assert isinstance(part.stored, QuantizedMatrix | GptqMatrix)
    return torch.cat([x for _, x in part.stored.parts()], dim=1)[:, : part.out_features]


def test_columns_in_any_order_and_number(spec: ModelSpec, kind: str) -> None:
    whole = stored(spec, "gate")
    assert isinstance(whole.stored, KINDS[kind])
    for count in (1, 33, 96):
        columns = torch.randperm(whole.out_features)[:count]

        part = cut_columns(whole, columns)

        assert torch.equal(decoded(part), decoded(whole)[:, columns])


def test_groups_have_their_rows_in_their_order(spec: ModelSpec) -> None:
    whole, down = stored(spec, "down"), next(p for p in spec.projections if p.role == "down")
    found = groups_of(CanonicalTensors(spec), down, spec)
    chosen = [*range(len(found))][1::2]

    part = cut_groups(whole, chosen, has_bias=False)

    rows = torch.cat([found[index].rows for index in chosen])
    assert torch.equal(decoded(part), decoded(whole)[rows])
    assert sum(len(group.rows) for group in found) == down.in_features


def test_parts_are_laid_out_for_kernels(spec: ModelSpec) -> None:
    for part in (
        cut_columns(stored(spec, "gate"), torch.arange(40)),
        cut_groups(stored(spec, "down"), [1], has_bias=True),
    ):
        assert isinstance(part.stored, QuantizedMatrix | GptqMatrix)
        laid = part.stored.laid_out(part.stored.order).cut(part.out_features)

        assert laid.shape == (part.stored.shape[0], part.out_features)
        values = get_ops(laid.words.device).decode_packed(laid)
        assert torch.equal(values, decoded(part))


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "qwen2"])
def test_chains_exchange_what_the_next_product_needs(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = make_packed(family, tmp_path_factory.mktemp("shards") / "model")
    ids = torch.randint(0, spec.vocab_size, (2, 9))
    whole = packed(spec, None)
    expected = whole.forward(ids)

    def of_rank(ranks: Ranks) -> tuple[bool, torch.Tensor]:
        decoder = packed(spec, ranks)
        return decoder.spans[0]._chains is not None, decoder.forward(ids)

    (is_chain, first), (_, second) = on_both(of_rank)

    assert is_chain
    assert torch.equal(first, second)
    assert (first - expected).norm() <= 3e-3 * expected.norm()
