"""Which inputs changed since a stage last ran, in the user's words."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from toy_conversions import STAGES, begun, convert, model, other, stage

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import changes
from exl2flow.core.store.changes import Change, Outlook, outlook, stage_rows
from exl2flow.core.store.files import digest_of
from exl2flow.core.store.manifest import RunRecord
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.core.store.store import StageFolder


def looked(config: ConversionConfig, stages: tuple[Stage, ...] = STAGES) -> dict[str, Outlook]:
    return {each.stage: each for each in outlook(Pipeline(config, stages, device="cpu"))}


def states(found: dict[str, Outlook]) -> dict[str, str]:
    return {name: each.state for name, each in found.items()}


def change(what: str, before: str, now: str) -> Change:
    return Change(what=what, before=before, now=now)


def test_nothing_is_known_before_the_first_run(config: ConversionConfig) -> None:
    assert set(states(looked(config)).values()) == {"begins"}
    assert stage_rows([*looked(config).values()], {}) == []


def test_finished_stages_stay(config: ConversionConfig) -> None:
    convert(config)

    found = looked(config)

    assert set(states(found).values()) == {"finished"}
    assert {each.reason({}) for each in found.values()} == {""}


def test_changed_option_is_named_with_both_values(config: ConversionConfig) -> None:
    convert(config)

    found = looked(other(config, bpw=2.5))

    assert [name for name, state in states(found).items() if state == "again"] == [
        "allocate",
        "quantize",
        "compile",
        "validate",
    ]
    expected = (change("`bpw`", "4.0", "2.5"),)
    assert all(each.changes == expected for each in found.values() if each.state == "again")
    assert found["measure"].state == "finished"
    assert stage_rows([*found.values()], {"bpw": "--bpw"}) == [
        ("changed", "`--bpw` 4.0 -> 2.5"),
        ("again", "allocate, quantize, compile, validate"),
    ]


def test_finished_stage_says_what_changed_since_the_result_before(config: ConversionConfig) -> None:
    convert(config)
    convert(other(config, bpw=2.5))

    found = looked(other(config, bpw=2.5))

    assert found["allocate"] == Outlook(
        stage="allocate", state="finished", changes=(change("`bpw`", "4.0", "2.5"),)
    )
    assert looked(config)["allocate"].changes == ()  # there was none before it


def test_changed_file_of_the_source_is_named(config: ConversionConfig) -> None:
    convert(config)
    (config.source / "config.json").write_text('{"other": 1}')

    found = looked(config)

    assert set(states(found).values()) == {"again"}
    assert {each.changes for each in found.values()} == {found["measure"].changes}
    (only,) = found["measure"].changes
    assert only.what == "source file `config.json`"
    assert len(only.before) == len(only.now) == 12
    assert only.before != only.now


def test_added_source_file_is_a_change_from_none(config: ConversionConfig) -> None:
    convert(config)
    (config.source / "tokenizer.json").write_text("{}")

    (only,) = looked(config)["measure"].changes

    assert (only.what, only.before) == ("source file `tokenizer.json`", "none")


def test_results_of_another_source_with_the_same_name_are_ignored(
    config: ConversionConfig, tmp_path: Path
) -> None:
    convert(config)
    elsewhere = model(tmp_path / "elsewhere" / "model", '{"other": 1}')

    found = looked(other(config, source=elsewhere))

    assert set(states(found).values()) == {"begins"}


def test_other_schema_is_a_change_of_code(config: ConversionConfig) -> None:
    convert(config)
    newer = (replace(STAGES[0], schema=2), *STAGES[1:])

    found = looked(config, newer)

    assert found["validate"].changes == (change("code of `measure`", "schema 1", "schema 2"),)


def test_stage_that_is_switched_on_is_a_change(config: ConversionConfig) -> None:
    convert(config)
    tuned = (
        *STAGES[:3],
        stage("tune", "quantize"),
        replace(STAGES[3], inputs=("allocate", "quantize", "tune")),
    )

    found = looked(config, tuned)

    assert found["compile"].changes == (change("stage `tune`", "off", "on"),)
    assert found["tune"].state == "begins"


def test_input_whose_earlier_result_is_gone_is_named_by_its_fingerprint(
    config: ConversionConfig,
) -> None:
    before = convert(config)
    manifest = before.path("measure") / "manifest.json"
    manifest.unlink()

    found = looked(config, (replace(STAGES[0], schema=2), *STAGES[1:]))

    (only,) = found["allocate"].changes
    assert only.what == "result of `measure`"
    assert only.before == before.refs["measure"].fingerprint[:12]


def test_interrupted_stage_continues_where_it_was(config: ConversionConfig) -> None:
    begun(config, "quantize")

    found = looked(config)

    assert found["quantize"].reason({}) == "after 1 of 0"
    assert states(found)["quantize"] == "continues"
    assert stage_rows([*found.values()], {}) == [("continues", "quantize after 1 of 0")]


def test_interrupted_stage_of_another_device_says_so(config: ConversionConfig) -> None:
    begun(config, "quantize")

    found = {e.stage: e for e in outlook(Pipeline(config, STAGES, device="cuda"))}

    assert found["quantize"].detail == "after 1 of 0, but it was begun on cpu and this is cuda"


def test_stage_without_any_result_is_begun_again(config: ConversionConfig) -> None:
    convert(config)
    changed = other(config, bpw=2.5)
    pipeline = begun(changed, "allocate")
    (pipeline.path("allocate") / "note").unlink()

    found = looked(changed)["allocate"]

    assert (found.state, found.reason({})) == ("again", "`bpw` 4.0 -> 2.5")


def test_altered_output_is_the_reason(config: ConversionConfig) -> None:
    convert(config)
    convert(other(config, bpw=2.5, out=config.out.with_name("b")))
    lost = config.out / "0.safetensors"
    lost.unlink()

    found = looked(config)

    assert found["compile"] == Outlook(
        stage="compile", state="again", detail=f"changed or deleted: `{lost}`"
    )
    assert stage_rows([*found.values()], {}) == [
        ("again", f"compile (changed or deleted: `{lost}`)")
    ]


def test_altered_output_is_the_only_reason_whatever_changed_before(
    config: ConversionConfig,
) -> None:
    convert(config)
    changed = other(config, bpw=2.5)
    convert(changed)
    (config.out / "0.safetensors").unlink()

    found = looked(changed)["compile"]

    assert (found.state, found.changes) == ("again", ())


def test_results_are_found_beside_those_set_aside(config: ConversionConfig) -> None:
    made = convert(config)
    for name in made.stages:
        folder = made.path(name)
        shutil.copytree(folder, folder.with_name(f"{folder.name}.damaged-20260101T000000"))

    found = looked(other(config, bpw=2.5))

    assert states(found) == {
        "measure": "finished",
        **dict.fromkeys(("allocate", "quantize", "compile", "validate"), "again"),
    }


def test_many_lost_files_are_counted() -> None:
    assert changes._some(["a", "b", "c"]) == "`a`, `b`, `c`"
    assert changes._some(["a", "b", "c", "d", "e"]) == "`a`, `b`, `c` and 2 more"


def test_plan_separates_what_it_lists() -> None:
    found = [
        Outlook(stage="a", state="continues", detail="after 1 of 2"),
        Outlook(stage="b", state="continues", detail="after 3 of 4"),
        Outlook(stage="c", state="again", changes=(change("`x`", "1", "2"),)),
        Outlook(stage="d", state="again", changes=(change("`x`", "1", "2"), change("y", "3", "4"))),
    ]

    assert stage_rows(found, {"x": "--x"}) == [
        ("changed", "`--x` 1 -> 2; y 3 -> 4"),
        ("again", "c, d"),
        ("continues", "a after 1 of 2, b after 3 of 4"),
    ]


def test_row_joins_what_there_is_to_say() -> None:
    changes = (change("`bpw`", "4", "3"), change("`tune.steps`", "0", "9"))
    found = Outlook(stage="tune", state="again", detail="lost", changes=changes)

    assert found.row({"bpw": "--bpw"}) == {
        "stage": "tune",
        "state": "again",
        "why": "lost; `--bpw` 4 -> 3; `tune.steps` 0 -> 9",
    }
    assert Outlook(stage="tune", state="begins").row({})["why"] == ""


def test_damaged_manifest_is_the_reason(config: ConversionConfig) -> None:
    pipeline = convert(config)
    (pipeline.path("measure") / "manifest.json").write_text("{")

    found = looked(config)["measure"]

    assert (found.state, found.detail) == ("again", "its manifest is damaged")


def test_cleared_stage_is_needed_again_when_the_output_is_lost(config: ConversionConfig) -> None:
    pipeline = convert(config)
    aside = config.out.with_name("aside")
    aside.mkdir()
    folder = StageFolder.load(pipeline.path("quantize"))
    assert folder is not None
    folder.clear(aside)
    assert looked(config)["quantize"].state == "finished"
    (config.out / "1.safetensors").unlink()

    found = looked(config)["quantize"]

    assert found.state == "again"
    assert found.detail.startswith("`exl2flow clean` removed its tensors")


def test_other_versions_of_packages_are_said_and_redo_nothing(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(config)
    was = changes.versions()
    first, second = [*was][:2]
    monkeypatch.setattr(changes, "versions", lambda: {**was, first: "98.0", second: "99.0"})

    found = looked(config)["measure"]

    assert found.state == "finished"
    assert found.detail == (
        f"made with {first} {was[first]}, now 98.0 and {second} {was[second]}, now 99.0"
    )


@pytest.mark.parametrize(("missing", "value"), [("run", None), ("source", {})])
def test_manifest_of_an_earlier_version_shows_its_stored_options(
    missing: str, value: object, config: ConversionConfig
) -> None:
    pipeline = convert(config)
    for name in STAGES:
        folder = StageFolder.load(pipeline.path(name.name))
        assert folder is not None
        setattr(folder.manifest, missing, value)
        folder.save()

    assert looked(other(config, bpw=2.5))["allocate"].changes == (change("`bpw`", "4.0", "2.5"),)


@pytest.mark.parametrize(
    ("name", "entry", "what"),
    [
        ("tokenize", {"rows": 2}, "`calibration.rows`"),
        ("tokenize", {"file": "a" * 64}, "contents of `calibration.text`"),
        ("tokenize", {"template": "a" * 64}, "the model's chat template"),
        ("sensitivity", {"block": 2}, "`sensitivity.block`"),
        ("sensitivity", {"rope": {"scale": 2.0}}, "`rope.scale`"),
        ("validate", {"rows": 2}, "`validate_options.rows`"),
        ("validate", {"text": "a" * 64}, "contents of `validate_options.text`"),
        ("allocate", {"target": {"bpw": 3}}, "`bpw`"),
        ("allocate", {"measurement": "a" * 64}, "contents of `measurement`"),
        ("quantize", {"rounding": {"rounds": 1}}, "`rounding.rounds`"),
        ("quantize", {"limit": {"tall": [1]}}, "`max_memory`"),
        ("compile", {"files": {"config.json": "a" * 64}}, "source file `config.json`"),
        ("compose", {"rows": 2}, "how many rows the model writes"),
        ("compose", {"tokens": 2}, "tokens per row that the model writes"),
        ("compose", {"span": 2}, "tokens per text that the model writes"),
        ("compose", {"seed": 2}, "`calibration.seed`"),
        ("compose", {"openings": "a" * 64}, "how the texts begin that the model writes"),
        ("tokenize", {"dialogues": 2}, "the built-in dialogues"),
        ("tokenize", {"template": 2}, "the model's chat template"),
    ],
)
def test_entries_of_stages_have_the_names_of_options(
    name: str, entry: dict[str, object], what: str, config: ConversionConfig
) -> None:
    before = Pipeline(config, (stage(name),), device="cpu")
    before.run(name, progress=silent)

    found = looked(config, (stage(name, options=lambda config: entry),))

    (only,) = found[name].changes
    assert (only.what, only.before) == (what, "none")
    (value,) = dict(changes._flat(entry)).values()
    assert only.now == ("a" * 12 if value == "a" * 64 else json.dumps(value))


@pytest.mark.parametrize(
    "options",
    [
        lambda c: {"file": "0" * 64, "own": c.calibration.text},
        lambda c: {"file": digest_of(c.calibration.text)},  # its path, not its digest
    ],
)
def test_values_are_those_that_the_user_gave(
    options: Callable[[ConversionConfig], dict[str, object]], config: ConversionConfig
) -> None:
    read = stage("tokenize", options=options)
    Pipeline(config, (read,), device="cpu").run("tokenize", progress=silent)
    mine = config.calibration.model_copy(update={"text": "/data/mine.parquet"})

    found = looked(other(config, calibration=mine), (read,))

    expected = (change("`calibration.text`", "auto", "/data/mine.parquet"),)
    assert found["tokenize"].changes == expected


def test_file_with_other_contents_is_told_by_its_digests(config: ConversionConfig) -> None:
    before, after = (stage("tokenize", options=lambda c, d=d: {"file": d * 64}) for d in "ab")
    Pipeline(config, (before,), device="cpu").run("tokenize", progress=silent)

    found = looked(config, (after,))

    expected = (change("contents of `calibration.text`", "a" * 12, "b" * 12),)
    assert found["tokenize"].changes == expected


def test_record_of_a_run_has_absolute_paths_and_no_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ConversionConfig.model_validate(
        {
            "source": "model",
            "out": "out",
            "measurement": "m.json",
            "token_block": "mine",
            "calibration": {"text": "mine.parquet"},
            "validate_options": {"text": "mine.txt"},
        }
    )

    record = RunRecord.of(["measure"], config)

    found = record.config
    assert record.stages == ["measure"]
    assert {"publish", "token_block"}.isdisjoint(found)
    assert [found[n] for n in ("source", "out", "measurement", "work_root")] == [
        *(str(tmp_path / name) for name in ("model", "out", "m.json")),
        None,
    ]
    assert found["calibration"]["text"] == str(tmp_path / "mine.parquet")
    assert found["validate_options"]["text"] == str(tmp_path / "mine.txt")
    again = RunRecord.of(["measure"], ConversionConfig.model_validate(found))
    assert again == record


def test_record_of_built_in_texts_names_them() -> None:
    found = RunRecord.of([], ConversionConfig(source=Path("a"), out=Path("b"))).config

    assert found["calibration"]["text"] == "auto"
    assert found["validate_options"]["text"] is None
