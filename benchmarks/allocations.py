"""Choices of our allocator for real models: `allocations.json`, and what benchmarks take from it.

    exl2flow sweep DIR --out OUT --bpw 3,4,5 --no-prefect
    python benchmarks/allocations.py NAME OUT/*bpw

replaces the choices of the model NAME. The table holds wiki16m, a Llama of 16 M weights in 6
layers, wiki16m-speed, the same with `--prefer speed`, and demo, `demo/model`. For each bitrate
and role it lists a choice per layer, in the order of layers, written as in `exl2flow.json`:
`share:widthb_groupg` for each bit width.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.model import ModelSpec, ProjectionSpec, QuantParams, resolve
from exl2flow.model.files.group_table import BIT_WIDTHS

TABLE = Path(__file__).with_name("allocations.json")
DEFAULT = "wiki16m"
HEAD_BITS = 6
GROUP_ROWS = 128  # of uniform matrices
PART = re.compile(r"([\d.]+):(\d+)b_(\d+)g")
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
# matrices of a layer with a state, and what joins the inputs of an MTP block: as attention's
LIKE = {"qkv": "v", "z": "q", "out": "o", "joint": "o"}
Choices = dict[str, list[str]]  # role → a choice per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The parameters of matrices by role, for each layer of some model."""

    name: str
    choices: Mapping[str, Sequence[QuantParams]]

    @classmethod
    def uniform(cls, bits: float) -> Self:
        """Return groups of 128 for all matrices, of one width, or of the two nearest to `bits`.

        The head has 6 bits or more.
        """
        choices = {role: [mixed(bits)] for role in ROLES}
        return cls(
            name=f"with {bits:g} bits in groups of {GROUP_ROWS}",
            choices={**choices, "head": [mixed(max(bits, HEAD_BITS))]},
        )

    @classmethod
    def nearest(cls, bpw: float, model: str = DEFAULT) -> Self:
        """Return the choices for a model at the bitrate of the table that is nearest."""
        table = tables()[model]
        found = min(table, key=lambda listed: abs(float(listed) - bpw))
        choices = {role: [*map(parsed, texts)] for role, texts in table[found].items()}
        return cls(name=f"as {model} at {found} bpw", choices=choices)

    def params(self, role: str, layer: int = 0, layers: int = 1, expert: int = 0) -> QuantParams:
        """Return the choice for a matrix of one of `layers` at the same relative depth.

        Experts of a layer have the choices of all layers in turn.
        """
        choices = self.choices[LIKE.get(role, role)]
        return choices[(int((layer + 0.5) / layers * len(choices)) + expert) % len(choices)]

    def of(self, spec: ModelSpec) -> list[tuple[ProjectionSpec, QuantParams]]:
        """Return all linears of a model with their parameters, the head last."""
        found = [
            (
                projection,
                self.params(
                    projection.role, sublayer.layer_index, spec.num_layers, expert_of(projection)
                ),
            )
            for sublayer in spec.sublayers
            for projection in sublayer.projections
        ]
        return [*found, (spec.head, self.params("head"))]

    def bpw(self, spec: ModelSpec) -> float:
        """Return all stored bits per weight of a model's layers, without the head."""
        sizes = [(p.in_features, p.out_features, params) for p, params in self.of(spec)[:-1]]
        return sum(params.total_bits(k, n) for k, n, params in sizes) / sum(
            k * n for k, n, _ in sizes
        )


def expert_of(projection: ProjectionSpec) -> int:
    """Return the expert of a projection; 0 for others."""
    found = re.match(r"(\d+)\.", projection.capture)
    return int(found[1]) if found else 0


def mixed(bits: float) -> QuantParams:
    """Return groups of the two nearest widths, which average `bits`."""
    low = max(width for width in BIT_WIDTHS if width <= bits)
    high = min(width for width in BIT_WIDTHS if width >= bits)
    if low == high:
        return QuantParams.uniform(low, GROUP_ROWS)
    share = (bits - low) / (high - low)
    return QuantParams(
        bit_widths=(high, low),
        proportions=(share, 1 - share),
        group_sizes=(GROUP_ROWS, GROUP_ROWS),
    )


def tables() -> dict[str, dict[str, Choices]]:
    """Return the committed choices: model → bitrate → role → a choice per layer."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def parsed(text: str) -> QuantParams:
    """Invert `str` of parameters."""
    shares, widths, sizes = zip(*PART.findall(text), strict=True)
    params = QuantParams(
        bit_widths=tuple(map(int, widths)),
        proportions=tuple(map(float, shares)),
        group_sizes=tuple(map(int, sizes)),
    )
    assert str(params) == text, text
    return params


def add_allocation(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which parameters random matrices have."""
    parser.add_argument(
        "--choices",
        choices=tables(),
        default=DEFAULT,
        help="matrices as the allocator chose them for this model, at the nearest bitrate",
    )
    parser.add_argument(
        "--uniform", action="store_true", help=f"one width in groups of {GROUP_ROWS} instead"
    )


def allocation_of(bpw: float, arguments: argparse.Namespace) -> Allocation:
    """Return the parameters that options of `add_allocation` name."""
    if arguments.uniform:
        return Allocation.uniform(bpw)
    return Allocation.nearest(bpw, arguments.choices)


def chosen(folder: Path) -> tuple[str, Choices]:
    """Return the bitrate of a converted model, and the choices by role in order of layers."""
    record, spec = json.loads((folder / RECORD_FILE).read_text()), resolve(folder)
    reports = {layer["name"]: layer["projections"] for layer in record["layers"]}
    choices: Choices = {}
    for sublayer in spec.sublayers:
        for projection in sublayer.projections:
            report = reports[sublayer.name][projection.name]
            choices.setdefault(projection.role, []).append(report["params"])
    head = reports[spec.head.name][spec.head.name]
    return f"{record['options']['bpw']:.1f}", {**choices, "head": [head["params"]]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("folders", nargs="+", type=Path, metavar="MODEL_DIR")
    arguments = parser.parse_args()
    table = tables()
    table[arguments.name] = dict(sorted(map(chosen, arguments.folders)))
    text = json.dumps(table, indent=1)
    TABLE.write_text(
        re.sub(r"\[[^]]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"
    )
    for bpw, choices in table[arguments.name].items():
        print(bpw, {role: len(texts) for role, texts in choices.items()})


if __name__ == "__main__":
    main()
