"""Quality of a small model with experts: presets, bits by expert, rare experts, shared factors.

    python demo/train.py --shape moe --output DIR
    python benchmarks/experts.py --model DIR [--text demo/heldout.txt] [--bpw 3.0 4.0]
        [--parts presets bits rare factors hessians] [--set FIELD=VALUE ...] [--work DIR]

`presets` compares `standard` with `exllamav2`, `bits` compares bits by expert with the same bits
for all experts of a layer, at equal bytes. `factors` compares Fisher factors that experts of a
layer share with own ones, `hessians` an expert's own Hessian for gate and up with that of all
tokens, at equal bits. The mean divergence on the text is printed with the bytes of the weight
files; the ratio is that of the first to the second.

`rare` subtracts from a router's row in a copy of the model until the calibration rows send fewer
than `--rare-tokens` tokens to that expert, quantizes the copy and the model with the same
parameters for all matrices, and compares the relative error of the expert's outputs on the tokens
of the text that the unchanged router sends to it with that of the other experts on theirs. A
stopped run continues when it is repeated.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import ValidationFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_json, write_tensors
from exl2flow.core.store.model_files import weights_size
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.validate.stage import held_out_rows
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.allocate import stage as allocating
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.sensitivity import stage as sensing
from exl2flow.quant.sensitivity.fisher import storing_factors
from exl2flow.quant.tokenize.stage import text_rows
from exl2flow.quant.walk.source_model import SourceModel

HERE = Path(__file__).resolve().parent
STANDARD: Mapping[str, object] = {"quality": "standard"}
MEASURED = ("tokenize", "sensitivity", "measure")
GOALS = {"presets": "<= 0.6", "bits": "<= 1, goal 0.97", "rare": "<= 1.5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A conversion: its divergence in nats, the bytes of its weight files, and its stages."""

    kl: float
    size: int
    pipeline: Pipeline


def configured(
    arguments: argparse.Namespace, name: str, bpw: float, root: str, values: Mapping[str, object]
) -> ConversionConfig:
    """Return the configuration of a conversion; `root` names the folder of its checkpoints."""
    groups: dict[str, Any] = {"source": arguments.model, **values}
    for key, value in arguments.set.items():
        group, _, field = key.rpartition(".")
        target = groups.setdefault(group, {}) if group else groups
        target[field] = value
    scored = {"text": arguments.text, "sample_tokens": 0, "fail_perplexity_ratio": 1e6}
    return ConversionConfig(
        out=arguments.work / "models" / f"{name}-{bpw:g}",
        work_root=arguments.work / root,
        bpw=bpw,
        device="cpu",
        validate_options=scored,
        **groups,
    )


def convert(
    config: ConversionConfig,
    patch: AbstractContextManager[object] | None = None,
    shared: Mapping[str, Path] | None = None,
) -> Made:
    """Convert with something patched, beginning with finished stages of another work root."""
    pipeline = open_pipeline(config, STAGES)
    for name, folder in (shared or {}).items():
        target = pipeline.work.root / pipeline.refs[name].path
        if not target.exists():
            shutil.copytree(folder, target)
    with patch or nullcontext():
        try:
            run_locally(config)
        except ValidationFailed as error:  # a bad model is a result, too
            print(f"{config.out.name}: {error}", file=sys.stderr)
    kl = read_json(pipeline.path("validate") / "report.json")["score"]["kl_divergence"]
    size = weights_size(config.out)
    print(f"{config.out.name}: KL {kl:.5f}, {size:,} bytes", file=sys.stderr)
    return Made(kl=kl, size=size, pipeline=pipeline)


def own_factors() -> AbstractContextManager[object]:
    """Patch `sensitivity`: every expert has factors of its own, in blocks as dense matrices."""
    stack = ExitStack()

    def storing(path: Path, spec: Any, sums: Any, layer: object, tokens: int) -> Any:
        return storing_factors(path, spec.projections, sums, tokens)

    def nothing(path: Path, layer: object, tokens: int) -> Any:
        return lambda: write_tensors(path, {"none": torch.zeros(1)})

    stack.enter_context(mock.patch.object(sensing, "storing_group", storing))
    stack.enter_context(mock.patch.object(sensing, "storing_layer", nothing))
    return stack


def layer_hessians() -> AbstractContextManager[object]:
    """Patch coverage: gate and up of all experts have the Hessian of all tokens.

    A layer's experts together read every token as often as experts are chosen, so their own
    Hessians weighted by their tokens are that of all tokens; layers must be undivided.
    """
    own = Coverage.mixed

    def mixed(self: Coverage, hessians: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.sublayer.group.is_whole
        inputs = {e: hessians[f"{e}.input"] for e, count in self.counts.items() if count}
        total = sum(self.counts.values())
        layer = torch.stack([h * (self.counts[e] / total) for e, h in inputs.items()]).sum(0)
        hessians = own(self, hessians)
        return hessians | {f"{e}.input": layer.clone() for e in self.counts}

    return mock.patch.object(Coverage, "mixed", mixed)


def uniform() -> AbstractContextManager[object]:
    """Patch `allocate`: the best allocation with the same parameters for all matrices."""
    own = allocating.allot

    def allot(config: Any, spec: Any, measurement: Any) -> Any:
        return allocating.uniform_allocation(spec, measurement, own(config, spec, measurement))

    return mock.patch.object(allocating, "allot", allot)


def at_layer(
    config: ConversionConfig, ids: torch.Tensor, layer: int
) -> tuple[ExpertsSublayer, torch.Tensor]:
    """Return the source's experts of a layer, and the states of ids (rows, t) that enter them."""
    model = SourceModel.open(config, "cpu")
    states = model.initial_states(ids)
    for spec in model.spec.sublayers:
        sublayer = model.sublayer(spec)
        if isinstance(sublayer, ExpertsSublayer) and spec.layer_index == layer:
            return sublayer, states
        states = torch.stack([sublayer(row[None])[0] for row in states])
    raise SystemExit(f"layer {layer} of `{config.source}` has no experts; give another --layer")


def starve(arguments: argparse.Namespace, ids: torch.Tensor, folder: Path) -> tuple[int, int]:
    """Write a copy of the model whose router seldom chooses an expert.

    Args:
        arguments: of the command line.
        ids: the calibration rows with text.
        folder: of the copy.

    Returns:
        The expert, of those of the layer the one with median tokens, and how many it has left.
    """
    base = configured(arguments, "rare", arguments.bpw[0], "base", STANDARD)
    experts, states = at_layer(base, ids, arguments.layer)
    x, router = experts.inputs(states).double(), experts.router
    top = experts.routes(states).ids.shape[1]
    counts = torch.bincount(experts.routes(states).ids.flatten(), minlength=router.rule.experts)
    expert = int(counts.argsort()[len(counts) // 2])
    gram = x.T @ x
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    direction = torch.linalg.solve(gram, x.sum(0))  # x · direction is about 1
    logits = x @ router.weight.double().T
    others = logits.clone()
    others[:, expert] = -torch.inf
    least = others.topk(top).values[:, -1]  # what the expert's logit must exceed
    need = ((logits[:, expert] - least) / (x @ direction).clamp(min=1e-3)).sort(descending=True)
    shift = float(need.values[arguments.rare_tokens - 8])
    shutil.copytree(arguments.model, folder, dirs_exist_ok=True)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = f"{experts.group.router.key}.weight"
    row = tensors[name][expert].double() - shift * direction
    tensors[name][expert] = row.to(tensors[name].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    changed = x @ tensors[name].double().T
    left = int((changed.topk(top).indices == expert).sum())
    print(f"expert {expert}: {int(counts[expert])} tokens, then {left}", file=sys.stderr)
    if not 0 < left < arguments.rare_tokens:
        raise SystemExit(f"`--rare-tokens {arguments.rare_tokens}` leaves {left}; try another one")
    return expert, left


def expert_errors(arguments: argparse.Namespace, config: ConversionConfig) -> dict[int, float]:
    """Return by expert the relative error of its outputs on the tokens of the text that choose it.

    States and routes are those of the unchanged model.
    """
    base = configured(arguments, "rare", arguments.bpw[0], "base", STANDARD)
    ids = held_out_rows([arguments.model], config.validate_options)
    experts, states = at_layer(base, ids, arguments.layer)
    made = SourceModel.open(config.model_copy(update={"source": config.out}), "cpu")
    quantized = made.sublayer(experts.spec)
    assert isinstance(quantized, ExpertsSublayer)
    reads, errors = experts.reads(states), {}
    for expert in experts.group.experts:
        x = reads[f"{expert}.input"]
        outputs = [
            sublayer.apply_linears(f"{expert}.inner", sublayer.inner(expert, x))[0].double()
            for sublayer in (experts, quantized)
        ]
        errors[expert] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    return errors


def rare_rows(arguments: argparse.Namespace, base: Pipeline, bpw: float) -> Iterator[list[str]]:
    """Yield the rows of `rare` for the model, and for the copy whose expert is seldom chosen."""
    ids, text = text_rows(base.path("tokenize"))
    copy = arguments.work / "rare-source"
    note = arguments.work / "rare.json"
    if not note.exists():
        note.write_text(json.dumps(starve(arguments, ids[text], copy)))
    expert, left = json.loads(note.read_text())
    given = {**STANDARD, "measurement": base.path("measure") / MEASUREMENT_FILE}
    for name, source in (("as trained", arguments.model), (f"{left} tokens", copy)):
        label = "peer" if source == arguments.model else "rare"
        values = {**given, "source": source}
        config = configured(arguments, label, bpw, "uniform", values)
        convert(config, uniform())
        errors = expert_errors(arguments, config)
        peers = [error for e, error in errors.items() if e != expert]
        mean = statistics.mean(peers)
        cells = f"{errors[expert]:.4f}", f"{mean:.4f} ({min(peers):.4f} to {max(peers):.4f})"
        ratio = f"{errors[expert] / mean:.3f}"
        yield [f"error of expert {expert}, {name}; of its peers", f"{bpw:g}", *cells, ratio]


def rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the rows of the table: what, bitrate, first, second, ratio, goal."""
    for bpw in arguments.bpw:
        standard = convert(configured(arguments, "standard", bpw, "base", STANDARD))
        folders = {name: standard.pipeline.path(name) for name in (*MEASURED, "allocate")}

        def compared(what: str, first: Made, second: Made, bpw: float = bpw) -> list[str]:
            cells = [f"{made.kl:.5f} ({made.size:,})" for made in (first, second)]
            return [what, f"{bpw:g}", *cells, f"{first.kl / second.kl:.3f}"]

        if "presets" in arguments.parts:
            other = {"quality": "exllamav2"}
            made = convert(configured(arguments, "exllamav2", bpw, "base", other))
            yield [*compared("`standard`; `exllamav2`", standard, made), GOALS["presets"]]
        if "bits" in arguments.parts:
            joined = {**STANDARD, "allocate": {"experts": "layer"}}
            made = convert(configured(arguments, "layer", bpw, "base", joined))
            yield [*compared("bits by expert; by layer", standard, made), GOALS["bits"]]
        if "rare" in arguments.parts:
            for row in rare_rows(arguments, standard.pipeline, bpw):
                yield [*row, GOALS["rare"]]
        if "factors" in arguments.parts:
            config = configured(arguments, "own-factors", bpw, "own-factors", STANDARD)
            given = {"tokenize": folders["tokenize"]}
            made = convert(config, own_factors(), given)
            yield [*compared("shared Fisher factors; own", standard, made), ""]
        if "hessians" in arguments.parts:
            config = configured(arguments, "hessians", bpw, "hessians", STANDARD)
            made = convert(config, layer_hessians(), folders)
            yield [*compared("own Hessian of gate and up; the layer's", standard, made), ""]


def pair(text: str) -> tuple[str, str]:
    """Divide FIELD=VALUE."""
    name, _, value = text.partition("=")
    return name, value


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["presets", "bits", "rare", "factors", "hessians"]
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=HERE.parent / "demo" / "heldout.txt")
    parser.add_argument("--bpw", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--set", type=pair, nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--layer", type=int, default=3, help="of the rare expert")
    parser.add_argument("--rare-tokens", type=int, default=32, help="tokens that it gets at most")
    parser.add_argument("--work", type=Path, default=Path("quality-work/experts"))
    arguments = parser.parse_args(words)
    arguments.set = dict(arguments.set)
    return arguments


@torch.no_grad()
def main() -> None:
    """Convert, compare and print the table."""
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    head = [["", "bpw", "first", "second", "ratio", "required"], ["---"] * 6]
    for row in chain(head, rows(arguments)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
