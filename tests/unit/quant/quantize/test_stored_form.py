"""A rounded matrix on its way to a file: what is stored, what is reported, what is refused."""

import json
from pathlib import Path

import pytest
import torch

from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.reports import SublayerReport
from exl2flow.core.store.files import digest, read_metadata, read_tensors
from exl2flow.model import DenseLinear, ProjectionSpec, QuantizedMatrix
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.quantize.stored_form import Packed, reconstruction_digest, storing
from exl2flow.quant.rounding.error_feedback import RoundedMatrix
from exl2flow.quant.sensitivity.fisher import Factors, OutputFactor, estimate

K, N, STORED = 64, 50, 64  # in-features, out-features, the same padded


def matrix() -> RoundedMatrix:
    params = QuantParams.uniform(4, 32)
    codes = torch.randint(0, 16, (K, STORED), dtype=torch.uint8)
    codes[:, N:] = 8  # decodes to 0
    return RoundedMatrix(
        codes=codes,
        groups=params.groups(K),
        scale_codes=torch.randint(0, 16, (2, STORED), dtype=torch.uint8),
        max_scales=torch.tensor([0.02, 0.03], dtype=torch.float16),
        perm=torch.randperm(K),
    )


def projection(name: str = "q_proj") -> ProjectionSpec:
    return ProjectionSpec(
        name=name,
        key=f"model.layers.0.self_attn.{name}",
        role="q",
        in_features=K,
        out_features=N,
        has_bias=True,
        capture="hidden",
    )


def linear(*, has_bias: bool = True) -> DenseLinear:
    return DenseLinear(torch.randn(N, K) / 8, torch.randn(N) if has_bias else None)


HESSIAN = torch.diag(torch.linspace(1, 2, K))


def factors() -> Factors:
    output = torch.diag(torch.linspace(0.5, 1, STORED))[None]
    return Factors(input=HESSIAN, output=OutputFactor(blocks=output, columns=STORED))


def test_report_has_error_cost_size_and_digest_of_what_is_stored() -> None:
    rounded, dense = matrix(), linear()
    packed = Packed(projection(), dense, rounded, HESSIAN, factors())

    report = packed.report(packed.tensors())

    weight = torch.nn.functional.pad(dense.weight.T, (0, STORED - N))
    values = rounded.dequantize()
    error = weight - values.float()
    scale = HESSIAN.diagonal().sqrt()[:, None]
    assert report.to_json() == {
        "rel_err": pytest.approx(float((scale * error).norm() / (scale * weight).norm())),
        "nats": pytest.approx(estimate(error, factors())),
        "bits": packed.matrix.total_bits,
        "bpw": packed.matrix.total_bits / (K * STORED),
        "sha256": reconstruction_digest(values),
    }
    assert reconstruction_digest(packed.matrix.dequantize()) == report.sha256


def test_without_factors_the_cost_is_unknown() -> None:
    packed = Packed(projection(), linear(), matrix(), HESSIAN)

    assert packed.report(packed.tensors()).nats is None


def test_bias_is_padded_like_the_columns() -> None:
    dense = linear()
    assert dense.bias is not None

    found = Packed(projection(), dense, matrix(), HESSIAN).matrix.bias
    without = Packed(projection(), linear(has_bias=False), matrix(), HESSIAN).matrix.bias

    assert found is not None
    torch.testing.assert_close(found[:N], dense.bias.half(), rtol=0, atol=0)
    assert not found[N:].any()
    assert found.shape == (STORED,)
    assert without is None


def test_digest_depends_on_every_bit() -> None:
    values = matrix().dequantize()
    other = values.clone()
    other[3, 4] = -other[3, 4]

    assert reconstruction_digest(values) == reconstruction_digest(values.clone())
    assert reconstruction_digest(values) != reconstruction_digest(other)


@pytest.mark.parametrize("place", [(0, 0), (K - 1, N - 1)])
def test_one_wrong_code_is_refused(place: tuple[int, int]) -> None:
    class Careless(RoundedMatrix):
        def pack(self, bias: torch.Tensor | None) -> QuantizedMatrix:
            codes = self.codes.clone()
            codes[place] ^= 1
            rest = {name: getattr(self, name) for name in RoundedMatrix.__slots__}
            return RoundedMatrix(**{**rest, "codes": codes}).pack(bias)

    rounded = matrix()
    careless = Careless(**{name: getattr(rounded, name) for name in RoundedMatrix.__slots__})
    packed = Packed(projection(), linear(), careless, HESSIAN)

    with pytest.raises(ReconstructionMismatch, match=r"`model\.layers\.0\.self_attn\.q_proj`"):
        packed.report(packed.tensors())


def test_file_holds_all_matrices_and_their_report(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj")
    packed = [Packed(projection(name), linear(), matrix(), HESSIAN) for name in names]
    figures = {"error": torch.tensor(0.25)}
    path = tmp_path / "one.safetensors"

    store = storing(
        path,
        packed,
        figures,
        lambda reports, host: SublayerReport(
            name="self_attn", matrices=tuple(reports), rel_err=float(host["error"])
        ),
    )
    assert not path.exists()  # until it is called
    sha256 = store()

    assert sha256 == digest(path)
    report = SublayerReport.from_json(json.loads(read_metadata(path)["report"]))
    assert report.rel_err == 0.25
    assert list(report.matrices) == [item.report(item.tensors()) for item in packed]
    tensors = read_tensors(path)
    expected = packed[0].matrix.to_tensors(projection("q_proj").key)
    expected |= packed[1].matrix.to_tensors(projection("k_proj").key)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
