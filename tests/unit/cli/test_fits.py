"""`exl2flow fits` on folders: the same bytes as `--fit`, what to type, and what nothing fits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conversions import small_config
from made_once import made_once
from mtp_checkpoints import with_block
from packed_models import make_packed
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.core.errors import BudgetUnreachable
from exl2flow.core.options.groups import FitOptions
from exl2flow.model import resolve
from exl2flow.model.memory import host_embedding
from exl2flow.model.memory.footprint import DEVICE_BYTES, Footprint
from exl2flow.model.memory.on_card import OnCard, needs_of
from exl2flow.model.memory.plan import MemoryPlan, plan_of
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.fit import find_fit
from exl2flow.quant.forecast.outputs import outputs
from exl2flow.quant.forecast.preflight import preflight

POSITIONS = 1000
BASE = {"memory": "24GB", "context": 512, "cache": "q6"}


@pytest.fixture(scope="module")
def bitrates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two EXL2 models below it, and other things."""

    def make(root: Path) -> None:
        for bits, layers in ((3.0, 1), (5.0, 2)):
            folder = root / f"{bits}bpw"
            make_packed(
                "llama", folder, num_hidden_layers=layers, max_position_embeddings=POSITIONS
            )
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "exl2", "bits": bits}
            (folder / "config.json").write_text(json.dumps(config))
        make_tiny("llama", root / "not-quantized")
        (root / "notes").mkdir()

    return made_once(tmp_path_factory, "fits-bitrates", make)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fits") / "tiny"
    return make_tiny("llama", folder, max_position_embeddings=POSITIONS)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["fits", *map(str, words)])


def answer(*words: object, code: int = 0) -> dict[str, object]:
    done = run(*words, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_an_exl2_folder_takes_the_bytes_that_fit_counts(bitrates: Path, tmp_path: Path) -> None:
    folder = bitrates / "5.0bpw"
    fit = find_fit(small_config(folder, tmp_path, fit=BASE))
    assert fit is not None

    [row] = answer(folder, "--memory", "24GB", "--context", "512", "--cache", "q6")["models"]

    weights = plan_of(folder, context=512, cache_format="q6").weights
    parts = ("cache", "layout", "work", "device")
    assert {part: row[part] for part in parts} == {p: getattr(fit.needs, p) for p in parts}
    assert row["weights"] == weights
    assert row["total"] == weights + fit.needs.total
    assert row["size"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (row["bits"], row["fits"]) == (5.0, True)


def test_rows_of_a_source_are_what_its_plan_and_fit_say(source: Path, tmp_path: Path) -> None:
    found = answer(source, "--memory", "24GB", "--context", "512", "--cache", "q6")
    row = next(each for each in found["models"] if each["bits"] == 5.0)

    plan = preflight(small_config(source, tmp_path / "out", bpw=5.0), STAGES)
    exact = find_fit(small_config(source, tmp_path, fit={**BASE, "memory": row["total"]}))

    assert row["size"] == plan.output_bytes
    assert exact is not None
    assert exact.weights == row["weights"]
    assert exact.needs.total == row["total"] - row["weights"]


def test_the_block_that_drafts_counts(tmp_path: Path) -> None:
    folder, _, _ = with_block("qwen3.5-text", tmp_path / "model")
    wanted = FitOptions(memory="24GB", context=128)

    [*_, output] = outputs(folder, wanted)

    fit = find_fit(small_config(folder, tmp_path, fit={"memory": "24GB", "context": 128}))
    assert fit is not None
    without = Footprint.of(resolve(folder), context=128, cache_format="fp16")
    assert output.card.plan.needs == fit.needs
    assert output.card.plan.needs.cache > without.cache


def test_a_large_embedding_stays_in_host_memory(
    bitrates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bitrates / "3.0bpw"
    [before] = answer(folder, "--memory", "24GB")["models"]
    spec = resolve(folder)
    nbytes = 2 * spec.vocab_size * spec.hidden_size
    monkeypatch.setattr(host_embedding, "HOST_FROM", nbytes - 1)

    [row] = answer(folder, "--memory", "24GB")["models"]

    assert (before["host"], row["host"]) == (0, nbytes)
    assert row["total"] == before["total"] - nbytes


def test_folders_below_a_folder_are_listed_by_bits_with_what_to_type(bitrates: Path) -> None:
    done = run(bitrates, "--memory", "24GB", "--context", "512", "--cache", "q8/q6")

    assert done.exit_code == 0, done.stderr
    assert re.findall(r"^ ?(\S+bpw) +(\d\.\d\d)", done.stdout, re.M) == [
        ("5.0bpw", "5.00"),
        ("3.0bpw", "3.00"),
    ]
    command = f"exl2flow chat {bitrates / '5.0bpw'} --cache q8/q6 --max-tokens 512"
    assert f"\nwhat to type\n  {command}\n" in done.stdout


@pytest.mark.parametrize("name", ["3.0bpw", "5.0bpw"])
def test_what_to_type_is_a_command(bitrates: Path, name: str) -> None:
    [row] = answer(bitrates / name, "--memory", "24GB", "--context", "512")["models"]

    words = [*row["command"].split()[1:], "--device", "cpu", "--format", "raw", "--max-answer", "2"]
    done = CliRunner().invoke(app, words, input="Hello")

    assert done.exit_code == 0, done.output


def test_the_command_for_the_largest_is_accepted(source: Path, tmp_path: Path) -> None:
    largest = answer(source, "--memory", "2GB", "--context", "512", "--cache", "q6")["largest"]

    assert largest["command"].startswith(f"exl2flow convert {source} --out ./tiny-2GB --fit 2GB ")
    words = largest["command"].replace("./tiny-2GB", str(tmp_path / "out")).split()[1:]
    words = [*words, "--dry-run", "--json", "--device", "cpu", "--rows", "2", "--row-tokens", "64"]
    words = [*words, "--measure-rows", "1", "--measure-row-tokens", "64"]
    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    fit = json.loads(done.stdout)["fit"]
    assert (fit["weights"], fit["context"]) == (largest["size"], 512)


def on_card(folder: Path, room: int) -> OnCard:
    needs = needs_of(resolve(folder), cache_format="q4", block=None)
    plan = MemoryPlan(weights=5000, host=1000, needs=needs(256))
    return OnCard.of(plan, needs, memory=room + 4000, positions=POSITIONS)


def test_most_tokens_fit_and_one_page_more_does_not(source: Path) -> None:
    def total(context: int) -> int:
        return Footprint.of(resolve(source), context=context, cache_format="q4").total

    assert on_card(source, total(768)).most_tokens == 768
    assert on_card(source, total(768) - 1).most_tokens == 512
    assert on_card(source, total(256) - 1).most_tokens == 0
    assert on_card(source, 10**12).most_tokens == POSITIONS


def test_nothing_fits_names_what_would(bitrates: Path) -> None:
    wanted = ("--context", "768", "--cache", "fp16")
    roomy = answer(bitrates, "--memory", "24GB", *wanted)["models"][1]
    q4 = answer(bitrates, "--memory", "24GB", *wanted[:2])["models"][1]
    memory = roomy["total"] - 1

    done = run(bitrates, "--memory", memory, *wanted)

    assert done.exit_code == 1
    assert "what to type" not in done.stdout
    assert f"the smallest model, `{bitrates / '3.0bpw'}`, takes 1." in done.stderr
    ways = re.search(r"use `--memory (.*)` or `--context (\d+)` or `--cache (q4)`", done.stderr)
    assert ways is not None, (done.stderr, q4)
    assert answer(bitrates, "--memory", ways[1], *wanted)["fits"]
    assert answer(bitrates, "--memory", memory, "--context", ways[2])["fits"]
    assert answer(bitrates, "--memory", memory, "--context", "768", "--cache", ways[3])["fits"]


def test_no_output_of_a_source_fits(source: Path) -> None:
    found = run(source, "--memory", DEVICE_BYTES, "--json")

    assert found.exit_code == 1
    assert not json.loads(found.stdout)["fits"]
    error = json.loads(found.stderr.splitlines()[-1])["error"]
    assert error["type"] == BudgetUnreachable.__name__
    assert re.search(r"`.*tiny` at \d\.\d bpw, takes .*; use `--memory 1\.1GB`$", error["message"])


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--memory", "24"), "`--memory` is 24: 24 bytes are too few; give the unit, as 24GB", 2),
        (("--memory", "much"), "`--memory` is much: could not parse value and unit", 2),
        (
            ("--memory", "24GB", "--context", "32kB"),
            "`--context 32kB` is not a number of tokens; give one such as 8192",
            2,
        ),
        (("--memory", "24GB", "--context", "0"), "`--context` is 0: input should be greater", 2),
        (("--memory", "24GB", "--context", "1k"), "`--context 1024` exceeds the model's 1000", 2),
        (("--memory", "24GB", "--cache", "q7"), "`q7` is not one of `fp16`", 2),
    ],
)
def test_wrong_options_are_explained(
    source: Path, words: tuple[str, ...], message: str, code: int
) -> None:
    done = run(source, *words)

    assert done.exit_code == code
    assert message in done.stderr


def test_without_a_gpu_the_memory_must_be_given(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    done = run(source)

    assert done.exit_code == 2
    assert "no GPU here to take the memory of; give that of a card: `--memory 24GB`" in done.stderr


def test_folders_without_a_model_are_explained(bitrates: Path, tmp_path: Path) -> None:
    empty, missing = run(bitrates / "notes", "--memory", "8GB"), run("absent", "--memory", "8GB")
    make_tiny("llama", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    config["architectures"] = ["OtherForCausalLM"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    other = run(tmp_path / "x", "--memory", "8GB")

    assert [each.exit_code for each in (empty, missing, other)] == [1, 1, 1]
    assert "holds neither a model (a `config.json` beside `*.safetensors`) nor" in empty.stderr
    assert "error: no folder `absent`; give that of a model" in missing.stderr
    assert "OtherForCausalLM" in other.stderr


def test_exl2_folders_need_no_library_of_an_extra(bitrates: Path) -> None:
    program = """
import json, sys
for name in ("scipy", "highspy", "pandas", "pyarrow", "matplotlib", "prefect"):
    sys.modules[name] = None
from typer.testing import CliRunner
from exl2flow.cli.main import app
done = [CliRunner().invoke(app, ["fits", path, "--memory", "24GB"]) for path in sys.argv[1:]]
print(json.dumps([[each.exit_code, each.output] for each in done]))
"""
    folders = [str(bitrates), str(bitrates / "not-quantized")]
    command = [sys.executable, "-c", program, *folders]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    exl2, dense = json.loads(done.stdout)
    assert exl2[0] == 0, exl2[1]
    assert "5.0bpw" in exl2[1]
    assert dense[0] == 1
    assert "error: `highspy` is missing, which the extra `convert` brings" in dense[1]
