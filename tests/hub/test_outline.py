"""A model on the Hub is checked by its headers, and refused, before any of its weights arrives."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hub_requests
import pytest
from conversions import small_config, small_options
from fp8_models import make_fp8
from gptq_models import as_gptq
from hub_fixtures import shards, weights_served
from hub_server import TOKEN, Hub
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.work.sources import sources
from exl2flow.core.errors import Exl2FlowError, HubError, PreflightFailed, SourceModelError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store.outline import Outline
from exl2flow.core.store.source import DIGESTS_FILE, SourceFingerprint, provenance
from exl2flow.core.store.stage import RECORD_FILE, SOURCE_FINGERPRINT
from exl2flow.flows.runs.in_flow import TASKS
from exl2flow.model import resolve
from exl2flow.model.files.canonical import CanonicalTensors
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.outline import outlined
from exl2flow.pipeline.local import RUNS
from exl2flow.pipeline.preparation import prepare, prepare_source
from exl2flow.pipeline.run import Prepared
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast import preflight as preflight_module

SHARD = "model-00001-of-00002.safetensors"
FLAGS = ("--rows", "2", "--row-tokens", "64", "--measure-rows", "1", "--measure-row-tokens", "64")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, which is empty again after each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def conversion(root: Path, **values: object) -> ConversionConfig:
    return small_config(Path("org/tiny"), root / "out", work_root=root / "work", **values)


def prepared(config: ConversionConfig, *, dry_run: bool = False) -> Prepared[ConversionConfig]:
    having = sources(plain=True, renew=False)
    return prepare_source(RUNS["convert"], config, having, dry_run=dry_run)


@contextmanager
def outline_of(root: Path, source: str = "org/tiny") -> Iterator[Path]:
    with outlined(Path(source), root / "work", hub_tasks.Hub.open) as folder:
        assert folder is not None
        yield folder


def test_a_dry_run_fetches_no_weights_and_prints_the_plan_with_the_download(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    commit = hub.add_folder("org/tiny", tiny_source, private=True)
    words = ["convert", "org/tiny", "--out", tmp_path / "out", *FLAGS, "--device", "cpu"]
    words = [str(word) for word in (*words, "--dry-run")]

    people = CliRunner().invoke(app, words)
    program = CliRunner().invoke(app, [*words, "--json"])

    assert people.exit_code == 0, people.output
    plan = json.loads(program.stdout)["plan"]
    folder = hub_tasks.fetch(hub_tasks.HubModel(repo="org/tiny"), tmp_path, hub_tasks.Hub.open())
    assert plan["download_bytes"] == sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    assert re.search(r"download +[\d.]+ kB from the Hub", people.stdout)
    assert people.stderr.count("is not a folder here; using the Hub's model") == 1
    assert plan["model"] == "tiny"
    assert folder.parent.name == commit


def test_a_dry_run_asks_for_headers_alone_and_leaves_nothing(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    hub.add_folder("org/tiny", tiny_source, private=True)
    before = sorted(tmp_path.iterdir())

    found = prepared(conversion(tmp_path), dry_run=True).plan
    seen = {r.server: r.token for r in hub.requests}

    config = small_config(tiny_source, tmp_path / "out", work_root=tmp_path / "work")
    local = prepare(RUNS["convert"], config, anew=True)
    assert len(hub.asked("GET /objects/")) == 2 * len(shards(hub))
    assert weights_served(hub) == 0
    assert sorted(tmp_path.iterdir()) == before
    assert seen == {"hub": TOKEN, "storage": None}
    beside = {"download_bytes": 0, "carried": (), "left_out": (), "model": ""}
    assert replace(found, **beside) == replace(local.plan, **beside)


def without_a_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(folder / SHARD)
    del tensors[next(name for name in tensors if name.endswith("_proj.weight"))]
    save_file(tensors, folder / SHARD)


def of_another_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    (folder / "config.json").write_text(json.dumps(config))


def damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / SHARD).write_bytes(b"?" * 1000)


def empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / SHARD).write_bytes(b"")


def beside_an_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")


def without_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 1000)


def without_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(preflight_module, "shutil", usage)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, r"_proj\.weight.*is missing in `org/tiny@[0-9a-f]{40}`"),
        (of_another_kind, "OtherForCausalLM"),
        (damaged, r"`org/tiny@[0-9a-f]{40}/model-.*` is not a whole safetensors file"),
        (empty, r"`org/tiny@[0-9a-f]{40}/model-.*` is not a whole safetensors file"),
        (beside_an_output, "exists and was not made from this source"),
        (without_memory, "of memory, 1.00 kB may be used"),
        (without_disk, r"of disk space with the download of [\d.]+ kB"),
    ],
)
def test_a_run_is_refused_before_any_weight_is_fetched(
    hub: Hub,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: object,
    message: str,
) -> None:
    folder = shutil.copytree(tiny_source, tmp_path / "changed")
    change(folder, monkeypatch)  # type: ignore[operator]  # cases of two kinds
    hub.add_folder("org/tiny", folder)

    with pytest.raises(PreflightFailed, match=message) as raised:
        prepared(conversion(tmp_path))

    assert str(tmp_path / "temporary") not in str(raised.value)
    assert weights_served(hub) == 0
    assert not (tmp_path / "work" / "sources").exists()


def test_a_flow_is_refused_before_its_task_fetches(
    hub: Hub, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_memory(tmp_path, monkeypatch)

    with pytest.raises(PreflightFailed, match="of memory"):
        prepare_source(RUNS["convert"], conversion(tmp_path), TASKS.sources)

    assert weights_served(hub) == 0


def test_the_disk_must_have_room_for_the_download_of_a_sweep_once(
    hub: Hub, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**small_options(), "work_root": tmp_path / "work", "source": Path("org/tiny")}
    config = SweepConfig.model_validate({**options, "out": tmp_path / "out", "bpw": (3.0, 4.0)})
    plans = prepared(config, dry_run=True).plans.values()  # type: ignore[type-var]  # any config
    [download] = {plan.download_bytes for plan in plans}
    shared = [replace(plan, download_bytes=0) for plan in plans]
    needed: list[int] = []
    monkeypatch.setattr(preflight_module, "size", lambda count: needed.append(count) or "")
    free = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(preflight_module, "shutil", free)

    for some in (list(plans), shared):
        with pytest.raises(Exl2FlowError, match="disk space"):
            preflight_module.check_disk(some, STAGES)

    with_download, without = max(needed[:3]), max(needed[3:])
    assert with_download - without == download > 0


def test_an_accepted_run_has_the_real_source(
    hub: Hub, tiny: str, tiny_source: Path, tmp_path: Path
) -> None:
    found = prepared(conversion(tmp_path))

    folder = found.config.source
    assert folder == tmp_path / "work" / "sources" / tiny / "tiny"
    assert (folder / SHARD).read_bytes() == (tiny_source / SHARD).read_bytes()
    assert found.plan.download_bytes == 0
    assert provenance(folder) is not None
    assert str(tmp_path / "temporary") not in (tmp_path / "work" / DIGESTS_FILE).read_text()


def test_a_source_that_is_here_is_not_outlined(hub: Hub, tiny: str, tmp_path: Path) -> None:
    first = prepared(conversion(tmp_path)).config
    hub.requests.clear()

    again = prepared(conversion(tmp_path), dry_run=True)

    assert (again.config, again.plan.download_bytes) == (first, 0)
    assert not hub.asked("/resolve/|/objects/")


def test_what_an_interrupted_download_left_need_not_be_fetched(
    hub: Hub, tiny: str, tmp_path: Path
) -> None:
    whole = prepared(conversion(tmp_path), dry_run=True).plan.download_bytes
    hub.fail(f"(GET|HEAD) .*/{SHARD}", "status", times=None, status=404)
    with pytest.raises(HubError, match="404"):
        hub_tasks.fetch(
            hub_tasks.HubModel(repo="org/tiny"), tmp_path / "work", hub_tasks.Hub.open()
        )
    hub.faults.clear()

    left = prepared(conversion(tmp_path), dry_run=True).plan.download_bytes

    assert left < whole


def test_a_server_without_parts_of_files_is_asked_for_whole_ones(
    hub: Hub,
    tiny: str,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub_requests.Response, "part", lambda self, asked: self)

    found = prepared(conversion(tmp_path), dry_run=True)

    assert "cannot check `org/tiny` before it is fetched (the server of `model-" in caplog.text
    assert (found.config.source / SHARD).read_bytes() == (tiny_source / SHARD).read_bytes()


def test_an_outline_has_the_fingerprint_of_the_model_and_no_values(
    hub: Hub, tiny: str, tiny_source: Path, tmp_path: Path
) -> None:
    known = SourceFingerprint.of(tiny_source, memory=tmp_path / "real.json")
    memory = tmp_path / "work" / DIGESTS_FILE

    with outline_of(tmp_path) as folder:
        found = SourceFingerprint.of(folder, memory=memory)
        tensors = CanonicalTensors(resolve(folder))
        with pytest.raises(SourceModelError, match="has no values yet"):
            tensors.read("model.norm.weight")
        with safe_open(folder / SHARD, framework="pt") as file:
            names = set(file.keys())

    assert found.fingerprint == known.fingerprint
    assert names == set(load_file(tiny_source / SHARD))
    assert not memory.exists()


def test_an_output_of_the_same_source_is_replaced_and_of_another_one_refused(
    hub: Hub, tiny: str, tiny_source: Path, tmp_path: Path
) -> None:
    hub.add_folder("org/other", make_tiny("llama", tmp_path / "other", seed=1))
    known = SourceFingerprint.of(tiny_source, memory=tmp_path / "real.json").fingerprint
    (tmp_path / "out").mkdir()
    record = {"source": "/elsewhere/tiny", SOURCE_FINGERPRINT: known}
    (tmp_path / "out" / RECORD_FILE).write_text(json.dumps(record))

    assert prepared(conversion(tmp_path), dry_run=True).plan.layers
    with pytest.raises(PreflightFailed, match="choose another `--out`"):
        prepared(conversion(tmp_path).model_copy(update={"source": Path("org/other")}))


def test_values_are_checked_after_the_download_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("llama", tmp_path / "gptq", num_hidden_layers=1, hidden_size=64)
    as_gptq(source)
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if name.endswith(".scales"))
    weights[name] = weights[name] * float("nan")
    save_file(weights, source / "model.safetensors")
    hub.add_folder("org/tiny", source)
    config = conversion(tmp_path, lossy_source=True)

    assert prepared(config, dry_run=True).plan.layers == 1
    assert weights_served(hub) == 0
    with pytest.raises(PreflightFailed, match="holds NaN"):
        prepared(config)


def test_models_in_fp8_are_checked_by_the_shapes_of_their_scales(hub: Hub, tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, fp32", num_hidden_layers=1)
    hub.add_folder("org/tiny", source)

    assert prepared(conversion(tmp_path), dry_run=True).plan.layers == 1
    assert weights_served(hub) == 0


def test_a_folder_has_no_outline(tmp_path: Path) -> None:
    assert Outline.of(tmp_path) is None
    with outlined(tmp_path, tmp_path / "work", hub_tasks.Hub.open) as folder:
        assert folder is None
