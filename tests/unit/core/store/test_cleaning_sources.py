"""Which fetched models `clean` removes."""

from pathlib import Path

import pytest
from toy_conversions import STAGES, begun, convert, model, other, paths, stages_of

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.cleaning import clean, unneeded
from exl2flow.core.store.files import write_json
from exl2flow.core.store.source import provenance_file
from exl2flow.core.store.stage import Pipeline


@pytest.fixture
def config(tmp_path: Path, root: Path) -> ConversionConfig:
    return ConversionConfig(source=model(tmp_path / "model"), out=tmp_path / "out", work_root=root)


def fetched(root: Path, commit: str) -> Path:
    folder = model(root / "sources" / commit / "name", f'{{"commit": "{commit}"}}')
    write_json(provenance_file(folder), {"commit": commit})
    return folder


def test_revision_goes_when_its_output_was_made_from_a_newer_one(
    config: ConversionConfig, root: Path
) -> None:
    old, new = fetched(root, "aaaa"), fetched(root, "bbbb")
    first = convert(other(config, source=old))
    assert old not in paths(unneeded(root, STAGES))

    second = convert(other(config, source=new))
    items = clean(root, STAGES)
    removed = paths(items)

    assert removed == {old} | stages_of(first, *first.stages)
    assert {each.why for each in items if each.path == old} == {"no finished conversion needs it"}
    assert not old.parent.exists()
    assert provenance_file(new).exists()
    assert all(map(second.is_complete, second.stages))


def test_models_beside_one_that_goes_stay(config: ConversionConfig, root: Path) -> None:
    source = fetched(root, "aaaa")
    beside = model(source.with_name("other"))
    write_json(provenance_file(beside), {"commit": "aaaa"})
    begun(other(config, source=source), "quantize")
    convert(other(config, source=beside))

    removed = paths(clean(root, STAGES, partial=True))

    assert source in removed
    assert not source.exists()
    assert beside.is_dir()
    assert provenance_file(beside).exists()


def test_removal_of_a_source_that_was_killed_is_finished_by_the_next(
    config: ConversionConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fetched(root, "aaaa")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            clean(root, STAGES, partial=True)

    [item] = clean(root, STAGES)

    assert item.why == "removed"
    assert not source.parent.exists()


def test_revision_stays_for_a_finished_conversion_into_another_folder(
    config: ConversionConfig, root: Path
) -> None:
    old, new = fetched(root, "aaaa"), fetched(root, "bbbb")
    convert(other(config, source=old))
    convert(other(config, source=new, out=config.out.with_name("other")))

    assert paths(unneeded(root, STAGES)) == set()


def test_source_of_a_conversion_that_was_begun_stays(config: ConversionConfig, root: Path) -> None:
    source = fetched(root, "aaaa")
    begun(other(config, source=source), "quantize")

    assert unneeded(root, STAGES) == []
    assert source in paths(unneeded(root, STAGES, partial=True))


def test_fetched_and_not_yet_converted_models_go_only_with_what_is_not_finished(root: Path) -> None:
    whole, half = fetched(root, "aaaa"), fetched(root, "bbbb")
    provenance_file(half).unlink()

    assert unneeded(root, STAGES) == []
    assert {item.path: item.why for item in unneeded(root, STAGES, partial=True)} == {
        whole: "fetched, never converted",
        half: "its download is not finished",
    }


def test_model_of_a_conversion_that_ended_before_its_first_stage_is_kept(
    config: ConversionConfig, root: Path
) -> None:
    source = fetched(root, "aaaa")
    with Pipeline(other(config, source=source), STAGES, device="cpu").work.lock():
        pass

    assert unneeded(root, STAGES) == []
    [item] = unneeded(root, STAGES, partial=True)
    assert (item.path, item.why) == (source, "fetched, never converted")
