"""A result is compared with the one before it of the same kind of run into the same output."""

from dataclasses import replace
from pathlib import Path

from toy_conversions import STAGES, convert, other

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.changes import Change, Outlook, outlook
from exl2flow.core.store.stage import Pipeline, Stage


def looked(config: ConversionConfig, stages: tuple[Stage, ...] = STAGES) -> dict[str, Outlook]:
    return {each.stage: each for each in outlook(Pipeline(config, stages, device="cpu"))}


def change(what: str, before: str, now: str) -> Change:
    return Change(what=what, before=before, now=now)


def test_only_runs_into_the_same_output_are_compared(
    config: ConversionConfig, tmp_path: Path
) -> None:
    convert(config)
    convert(other(config, bpw=3.0, out=tmp_path / "other"))

    assert looked(other(config, bpw=2.5))["allocate"].changes == (change("`bpw`", "4.0", "2.5"),)
    elsewhere = looked(other(config, bpw=2.5, out=tmp_path / "third"))["allocate"]
    assert elsewhere == Outlook(stage="allocate", state="begins")


def test_bitrates_of_a_sweep_that_never_changed_have_no_changes(
    config: ConversionConfig, tmp_path: Path
) -> None:
    bitrates = [other(config, bpw=bpw, out=tmp_path / f"{bpw}bpw") for bpw in (4.0, 2.5)]
    for bitrate in bitrates:
        convert(bitrate)

    for bitrate in bitrates:
        assert {(each.state, each.changes) for each in looked(bitrate).values()} == {
            ("finished", ())
        }


def test_stage_that_runs_into_several_outputs_share_is_compared_for_each(
    config: ConversionConfig, tmp_path: Path
) -> None:
    later = other(config, bpw=3.0, out=tmp_path / "other")
    convert(config)
    convert(later)  # the last that worked on the result of `measure`
    newer = (replace(STAGES[0], schema=2), *STAGES[1:])

    for each in (config, later):
        found = looked(each, newer)["measure"]
        assert found.changes == (change("code of `measure`", "schema 1", "schema 2"),)


def test_refinement_is_not_compared_with_a_conversion(
    config: ConversionConfig, tmp_path: Path
) -> None:
    def refined(rows: int, *, out: Path) -> Pipeline:
        refinement = RefinementConfig(
            source=config.source,
            model=config.out,
            out=out,
            validate_options=config.validate_options.model_copy(update={"rows": rows}),
        )
        only = (replace(STAGES[-1], inputs=()),)
        return Pipeline(refinement, only, device="cpu")

    convert(other(config, out=tmp_path / "refined"))
    first = refined(2, out=tmp_path / "refined")
    (begins,) = outlook(first)
    first.run("validate", progress=silent)
    (again,) = outlook(refined(3, out=tmp_path / "refined"))
    (elsewhere,) = outlook(refined(3, out=tmp_path / "new"))

    assert begins == elsewhere == Outlook(stage="validate", state="begins")
    assert again.changes == (change("`validate_options.rows`", "2", "3"),)
