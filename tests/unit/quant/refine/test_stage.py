"""Refining a whole model: what changes, what stays, who judges, and how it goes on."""

import shutil
from pathlib import Path

import pytest
import torch
from refinements import disguise, refine_until, refinement, rough_model, with_rising_bits
from safetensors.torch import load_file, save_file
from traces import contents

from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import RECORD_FILE, Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.model import QuantizedMatrix, TensorFiles, expected_tensors, resolve
from exl2flow.model.files.exl2 import is_quantized, tensor_names
from exl2flow.pipeline.stages import REFINE_STAGES
from exl2flow.quant.judge.stage import JUDGEMENT_FILE
from exl2flow.quant.refine.stage import hessian_rows
from exl2flow.quant.tokenize.stage import load_rows, split_rows
from exl2flow.quant.tune.written import TUNING_FILE

DOWN = "model.layers.0.mlp.down_proj"
CHANGING = 3  # of a matrix's five tensors: codes, scale codes, maxima


class Refined:
    """A refined model, and the rough one in disguise that it came from; not to be changed."""

    def __init__(self, root: Path) -> None:
        self.source, self.model = rough_model(root, num_hidden_layers=1)
        weight = load_file(self.source / "model.safetensors")[f"{DOWN}.weight"]
        with_rising_bits(self.model, DOWN, weight)
        disguise(self.model)
        self.config = refinement(self.source, self.model, root / "out")
        self.pipeline = refine_until(self.config, "validate")
        self.old, self.new = TensorFiles(self.model), TensorFiles(self.config.out)

    def path(self, stage: str) -> Path:
        return self.pipeline.path(stage)


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Refined:
    return Refined(tmp_path_factory.mktemp("refined"))


def fitted(names: tuple[str, ...]) -> set[str]:
    """Return those names that refining may change."""
    suffixes = tuple(tensor_names("")[:CHANGING])
    return {name for name in names if name.endswith(suffixes)}


def test_only_codes_and_scales_differ(refined: Refined) -> None:
    assert refined.new.names == refined.old.names
    same = {n for n in refined.old.names if torch.equal(refined.old.read(n), refined.new.read(n))}

    assert set(refined.old.names) - same <= fitted(refined.old.names)
    changed = fitted(refined.old.names) - same
    assert all(any(n.startswith(f"{p}.") for n in changed) for p in (DOWN, "lm_head"))
    assert any(name.endswith(".q_perm") for name in same)
    assert len({n.rpartition(".")[0] for n in changed}) == 7 + 1


def test_files_have_the_names_sizes_and_headers_of_the_old_ones(refined: Refined) -> None:
    sizes = [
        {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        for folder in (refined.model, refined.config.out)
    ]

    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 2
    for name in ("config.json", "tokenizer.json"):
        assert (refined.config.out / name).read_bytes() == (refined.model / name).read_bytes()


def test_file_that_leaves_the_model_leaves_the_refined_one(tmp_path: Path) -> None:
    source, model = rough_model(tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    config = refinement(source, model, tmp_path / "out")
    refine_until(config, "compile")
    assert (config.out / "chat_template.jinja").exists()
    (model / "chat_template.jinja").unlink()

    refine_until(config, "compile")

    assert not (config.out / "chat_template.jinja").exists()


def test_refined_model_is_nearer_to_its_reference_on_rows_that_no_hessian_saw(
    refined: Refined,
) -> None:
    _, rows = split_rows(refined.path("tokenize"), 3)
    judgement = read_json(refined.path("judge") / JUDGEMENT_FILE)

    scores = evaluate([refined.model, refined.config.out], rows, reference=refined.source)

    assert judgement["rows"] == len(rows) == 3
    assert judgement["refined"]
    assert judgement["kl_after"] < 0.9 * judgement["kl_before"]
    # the score leaves out the last position of every row
    found = [score.kl_divergence for score in scores]
    assert found == pytest.approx([judgement["kl_before"], judgement["kl_after"]], rel=0.1)


def test_rows_that_judge_are_not_in_hessians(refined: Refined) -> None:
    folder = refined.path("tokenize")
    everything = load_rows(folder, "quantize")
    _, judges = split_rows(folder, 3)

    rows = hessian_rows(folder, 3)

    seen = {tuple(row.tolist()) for row in rows}
    assert not seen & {tuple(row.tolist()) for row in judges}
    assert seen | {tuple(r.tolist()) for r in judges} == {tuple(r.tolist()) for r in everything}


def test_record_names_the_model_the_judgement_and_errors_of_both(refined: Refined) -> None:
    record = read_json(refined.config.out / RECORD_FILE)

    assert record["source"] == str(refined.source)
    assert record["refinement"]["model"] == str(refined.model)
    assert record["refinement"]["refined"] is True
    assert [layer["name"] for layer in record["layers"]][-1] == "lm_head"
    assert len(record["layers"]) == 3
    for layer in record["layers"]:
        for name, entry in layer["projections"].items():
            assert min(entry["losses"].values()) < entry["before"]["loss"], name
    assert record["allocation"]["bpw"] == pytest.approx(
        sum(layer["bits"] for layer in record["layers"][:-1])
        / sum(layer["bits"] / layer["bpw"] for layer in record["layers"][:-1])
    )


def test_killed_refinement_goes_on_and_gives_the_same_bytes(
    refined: Refined, tmp_path: Path
) -> None:
    config = refinement(refined.source, refined.model, tmp_path / "out")
    pipeline = Pipeline(config, REFINE_STAGES, device="cpu")
    for name in ("tokenize", "sensitivity"):
        shutil.copytree(refined.path(name), pipeline.path(name))

    def crash(tick: Tick) -> None:
        if (tick.stage, tick.done) == ("refine", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run("refine", progress=crash)
    before = contents(pipeline.path("refine") / "sublayers")
    refine_until(config, "compile")

    assert len(before) == 1
    assert contents(pipeline.path("refine") / "sublayers") == contents(
        refined.path("refine") / "sublayers"
    )
    for path in refined.config.out.glob("*.safetensors"):
        assert (config.out / path.name).read_bytes() == path.read_bytes()


def test_old_matrices_stay_where_refining_brings_nothing(refined: Refined, tmp_path: Path) -> None:
    exact = tmp_path / "exact"  # a reference that the model reproduces
    exact.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(refined.source / name, exact)
    save_file(decoded(refined.model), exact / "model.safetensors")
    config = refinement(exact, refined.model, tmp_path / "out")

    pipeline = refine_until(config, "compile")

    judgement = read_json(pipeline.path("judge") / JUDGEMENT_FILE)
    assert judgement["kl_before"] == judgement["kl_after"] == 0
    assert judgement["refined"] is False
    for path in refined.model.glob("*.safetensors"):
        assert (config.out / path.name).read_bytes() == path.read_bytes()
    record = read_json(config.out / RECORD_FILE)
    assert record["refinement"]["refined"] is False
    assert {layer["rel_err"] for layer in record["layers"]} == {0}


def decoded(model: Path) -> dict[str, torch.Tensor]:
    """Return the dense tensors that a model decodes to, fp32."""
    spec, tensors = resolve(model), TensorFiles(model)
    found = {}
    for name in expected_tensors(spec):
        key, _, kind = name.rpartition(".")
        if is_quantized(key, tensors) and kind == "weight":
            names = [n for n in tensor_names(key) if n in tensors]
            matrix = QuantizedMatrix.from_tensors(key, {n: tensors.read(n) for n in names})
            width = expected_tensors(spec)[name][0]
            found[name] = matrix.dequantize()[:, :width].T.float().contiguous()
        else:
            found[name] = tensors.read(name)[: expected_tensors(spec)[name][0]].float()
    return found


def test_head_with_spare_columns_is_kept_as_it_is(refined: Refined, tmp_path: Path) -> None:
    model = Path(shutil.copytree(refined.model, tmp_path / "model"))
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.startswith("lm_head.") and tensor.dim() == 2:  # codes and scale codes
                tensors[name] = torch.cat([tensor, tensor[:, : tensor.shape[1] // 10]], dim=1)
        save_file(tensors, path)
    config = refinement(refined.source, model, tmp_path / "out", sensitivity={"kind": "error"})

    pipeline = refine_until(config, "compile")

    assert "sensitivity" not in pipeline.stages
    old, new = TensorFiles(model), TensorFiles(config.out)
    assert old.shape(tensor_names("lm_head")[0])[1] == 352
    changed = [n for n in old.names if not torch.equal(old.read(n), new.read(n))]
    decoder = {p.key for sublayer in resolve(model).sublayers for p in sublayer.projections}
    assert {name.rpartition(".")[0] for name in changed} == decoder
    folder = StageFolder.load(pipeline.path("refine"), pipeline.refs["refine"].fingerprint)
    assert folder is not None
    assert folder.manifest.notes == ["lm_head: 352 columns, kept as they are"]


@pytest.mark.parametrize(("head", "layers"), [("quantized", None), ("dense", 1)])
def test_refining_with_training_lifts_a_file_of_another_program(
    head: str, layers: int | None, tmp_path: Path
) -> None:
    source, model = rough_model(tmp_path, num_hidden_layers=1)
    if head == "dense":
        path = model / "model.safetensors"
        tensors = {n: t for n, t in load_file(path).items() if not n.startswith("lm_head.")}
        weight = load_file(source / "model.safetensors")["lm_head.weight"].half()
        save_file(tensors | {"lm_head.weight": weight}, path)
    disguise(model)
    config = refinement(
        source,
        model,
        tmp_path / "out",
        rounding={"rounds": 1, "sweeps": 1, "block_steps": 4},
        tune={"steps": 4, "tokens": 64, "interval": 2, "scale_rate": 1e-2, "layers": layers},
    )

    pipeline = refine_until(config, "compile")

    blocks = read_json(config.out / RECORD_FILE)["layers"]
    assert all(block["trained"] <= 1.0 for block in blocks if block["name"] != "lm_head")
    tuning = read_json(pipeline.path("tune") / TUNING_FILE)
    assert set(tuning["texts"]) == {"calibration", "held-out"}
    judgement = read_json(pipeline.path("judge") / JUDGEMENT_FILE)
    assert judgement["refined"]
    assert set(judgement["texts"]) == set(tuning["texts"])
    old, new, made = (
        TensorFiles(f) for f in (model, config.out, pipeline.path("tune") / "sublayers")
    )
    same = {name for name in old.names if torch.equal(old.read(name), new.read(name))}
    assert set(old.names) - same <= fitted(old.names)
    for name in fitted(old.names):
        assert torch.equal(new.read(name), made.read(name))
