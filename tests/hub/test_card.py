"""The card: metadata that the Hub reads, figures from records, what people need to choose."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from expert_reports import group_report

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.naming import bitrate_name
from exl2flow.core.reports import CarriedReport
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.inference.report.card import CONTEXTS, render_card
from exl2flow.inference.report.licences import ALLOWED, FORBIDDEN, licence_problem
from exl2flow.inference.report.publication import (
    Bitrate,
    Origin,
    describe,
    is_branch,
    origin_from,
    origin_problems,
    without_paths,
)
from exl2flow.inference.report.record import Record
from exl2flow.model.config.families import FAMILIES
from exl2flow.model.memory.footprint import cache_bytes
from exl2flow.quant.quantize.routing import experts_summary

ORIGIN = Origin(repo="org/tiny", commit="c" * 40, license="mit", license_link="LICENSE")


@pytest.fixture(scope="module")
def bitrates(converted: list[Path]) -> list[Bitrate]:
    return [describe(folder) for folder in converted]


def changed(record: Record, **entries: object) -> Record:
    return Record.from_json({**record.content, **entries})


def parts(card: str) -> tuple[dict[str, object], str]:
    """Return metadata and text."""
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def rows(text: str, title: str) -> list[list[str]]:
    """Return the cells of the first table behind a line."""
    lines = text.partition(title)[2].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    assert {len(row) for row in table} == {len(table[0])}
    return table


def test_metadata_carries_source_and_licence(bitrates: list[Bitrate]) -> None:
    metadata, _ = parts(render_card("org/tiny-exl2", bitrates, ORIGIN))

    assert metadata == {
        "base_model": "org/tiny",
        "base_model_relation": "quantized",
        "license": "mit",
        "license_link": f"https://huggingface.co/org/tiny/blob/{'c' * 40}/LICENSE",
        "pipeline_tag": "text-generation",
        "tags": ["exl2", "exllamav2", "exl2flow", "quantized"],
    }


def test_metadata_cannot_be_broken_by_a_name(bitrates: list[Bitrate]) -> None:
    origin = replace(ORIGIN, license_name='a: "b"\n---\nevil: true')

    metadata, _ = parts(render_card("org/tiny-exl2", bitrates, origin))

    assert metadata["license_name"] == origin.license_name
    assert "evil" not in metadata


def test_bitrates_are_listed_with_what_validation_found(bitrates: list[Bitrate]) -> None:
    _, text = parts(render_card("org/tiny-exl2", bitrates[::-1], ORIGIN))

    head, _, *found = rows(text, "## Bitrates")
    assert head[4] == "KL divergence"
    for cells, bitrate in zip(found, bitrates, strict=True):
        assert bitrate.score is not None
        assert cells[0].startswith(f"[{bitrate.branch}](https://huggingface.co/org/tiny-exl2/tree/")
        assert float(cells[1]) == pytest.approx(bitrate.bpw, abs=1e-3)
        assert float(cells[4]) == pytest.approx(bitrate.score.kl_divergence, abs=1e-5)
        assert cells[2] == f"{bitrate.weight_bytes / 1e3:.2f} kB"


def test_experts_have_two_sentences(bitrates: list[Bitrate]) -> None:
    layers = [group_report(layer, range(4), [150, 200, 250, 90]) for layer in range(2)]
    summary = experts_summary(layers)
    sparse = [replace(b, record=replace(b.record, experts=summary)) for b in bitrates]

    _, text = parts(render_card("org/tiny-exl2", sparse, ORIGIN))

    assert "Each of the 8 experts in 2 layers was chosen by 90 to 250 calibration tokens" in text
    listed = ", ".join(f"2.00 % at {bitrate.branch}" for bitrate in sparse)
    assert f"Of the choices of experts, these differ from the source's: {listed}." in text
    assert "experts" not in render_card("org/tiny-exl2", bitrates, ORIGIN)


def test_memory_is_weights_and_cache(bitrates: list[Bitrate]) -> None:
    spec = replace(bitrates[0].spec, max_positions=40_000)
    long = [replace(bitrate, spec=spec) for bitrate in bitrates]

    _, text = parts(render_card("org/tiny-exl2", long, ORIGIN))

    head, _, first, _ = rows(text, "Cache **q4**")
    assert head[1:] == [f"{tokens:,}" for tokens in CONTEXTS[:4]]
    total = long[0].weight_bytes + cache_bytes(spec, context=32768, cache_format="q4")
    assert first[4] == f"{total / 1e6:.2f} MB"


def test_parts_that_are_not_quantized_are_listed(bitrates: list[Bitrate]) -> None:
    apart = CarriedReport(parts="visual", tensors=18, bytes=147_584)
    first, second = bitrates
    mixed = [replace(first, record=replace(first.record, not_quantized=apart)), second]

    plain, text = (parts(render_card("org/tiny-exl2", b, ORIGIN))[1] for b in (bitrates, mixed))

    facts = {row[0]: row[1:] for row in rows(text, "## How they were made")}
    assert facts["not quantized"] == ["visual (147.58 kB)", "none"]
    assert "not quantized" not in plain


def test_it_says_how_to_run_and_how_it_was_made(bitrates: list[Bitrate]) -> None:
    _, text = parts(render_card("org/tiny-exl2", bitrates, ORIGIN, has_measurement=True))

    assert "hf download org/tiny-exl2 --revision 3.0bpw" in text
    assert "python test_inference.py -m tiny-3.0bpw" in text
    assert "model_name: tiny-3.0bpw" in text
    assert "exl2flow generate tiny-3.0bpw" in text
    assert "`main` has the measurement" in text
    facts = {row[0]: row[1:] for row in rows(text, "## How they were made")}
    calibration = bitrates[0].record.content["calibration"]
    assert facts["source commit"] == ["c" * 12] * 2
    assert facts["sha256 of its rows"] == [calibration["sha256"][:12]] * 2
    assert facts["seed of calibration"] == ["0", "0"]
    assert facts["preferred"] == ["quality", "quality"]
    assert facts["bits of the head"] == ["6", "6"]
    assert facts["fingerprint"][0] != facts["fingerprint"][1]


@pytest.mark.parametrize(
    ("bpw", "name"), [(4, "4.0bpw"), (3.25, "3.25bpw"), (2.995, "2.995bpw"), (4.001, "4.001bpw")]
)
def test_branches_are_named_after_their_bits(bpw: float, name: str) -> None:
    assert bitrate_name(bpw) == name
    assert is_branch(name)


def test_other_branches_are_none_of_ours() -> None:
    assert not any(map(is_branch, ("main", "bpw", "a4bpw", "4.0", "4.0.1bpw")))


def test_licences_are_allowed_forbidden_or_unknown() -> None:
    assert not ALLOWED & set(FORBIDDEN)
    assert not any(map(licence_problem, ALLOWED))
    assert all(map(licence_problem, (*FORBIDDEN, None, "other", "unknown", "made-up")))


def test_paths_are_cut_down_to_names() -> None:
    value = {
        "a": ["/home/me/model", "clients/acme/mail.parquet", "~/x y/z"],
        "provenance": {"repo": "org/name", "revision": "refs/pr/3"},
        "options": {"text": "clients of mine/acme/mail.parquet", "sample_prompt": "and/or"},
        "notes": ["row 3/4 of `/home/me/my.parquet`, twice", "https://a.example/b", "/a\n/b"],
        "d": 1.5,
    }

    assert without_paths(value) == {
        "a": ["model", "mail.parquet", "z"],
        "provenance": {"repo": "org/name", "revision": "refs/pr/3"},
        "options": {"text": "mail.parquet", "sample_prompt": "and/or"},
        "notes": ["row 3/4 of `my.parquet`, twice", "https://a.example/b", "/a\n/b"],
        "d": 1.5,
    }


def test_a_source_that_was_quantized_already_is_named(bitrates: list[Bitrate]) -> None:
    plain = render_card("org/tiny-exl2", bitrates, ORIGIN)
    lossy = [replace(b, record=changed(b.record, source_form="gptq")) for b in bitrates]

    card = render_card("org/tiny-exl2", lossy, ORIGIN)

    assert "KL divergence is that of the model from the unquantized one" in plain
    assert "was quantized already" not in plain
    assert "**The source was quantized already,** by GPTQ to 4 bits." in card
    assert "KL divergence is that of the model from its source" in card
    made = dict((row[0], row[1]) for row in rows(parts(card)[1], "## How they were made"))
    assert made["form of the source"] == "gptq"


def test_a_card_may_list_several_licences() -> None:
    origin = origin_from({"repo": "org/tiny", "license": ["mit", "bsd"], "license_name": 3})

    assert origin == Origin(repo="org/tiny", license="mit, bsd")
    assert origin_problems(origin) == [licence_problem("mit, bsd", None)]


@pytest.mark.parametrize(
    "change",
    [
        {"allocation": None},
        {"allocation": {"bpw": "4"}},
        {"allocation": {"bpw": 0}},
        {"options": {"bpw": -1.0}},
    ],
)
def test_a_record_without_its_bits_is_refused(
    change: dict[str, object], converted: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(converted[0], tmp_path / "out"))
    record = json.loads((folder / RECORD_FILE).read_text())
    (folder / RECORD_FILE).write_text(json.dumps(record | change))

    with pytest.raises(ConfigError, match="records how it was made"):
        describe(folder)


def test_figures_that_are_no_numbers_are_left_out(bitrates: list[Bitrate]) -> None:
    odd = {"predicted_kl": "0.1", "not_quantized": {"parts": "tower", "bytes": "many"}}

    spoiled = [replace(each, record=changed(each.record, **odd)) for each in bitrates]
    card = render_card("org/tiny-exl2", spoiled, ORIGIN)

    assert "| not quantized | none |" in card


OTHER_PROGRAMS = ("test_inference.py", "TabbyAPI")


def test_programs_that_load_the_model_are_named(bitrates: list[Bitrate]) -> None:
    _, text = parts(render_card("org/tiny-exl2", bitrates, ORIGIN))

    assert [name for name in OTHER_PROGRAMS if name not in text] == []


@pytest.mark.parametrize("reason", ["architecture", "extension"])
def test_programs_that_cannot_load_the_model_are_not_named(
    reason: str, bitrates: list[Bitrate]
) -> None:
    spec = bitrates[0].spec
    if reason == "architecture":
        row = FAMILIES["Olmo2ForCausalLM", None]
        spec = replace(spec, family=row)
    else:
        block = {"quantization_config": {"extension": ["linear_attention"]}}
        spec = replace(spec, config={**spec.config, **block})
    odd = [bitrates[0], *(replace(bitrate, spec=spec) for bitrate in bitrates[1:])]

    metadata, text = parts(render_card("org/tiny-exl2", odd, ORIGIN))

    assert [name for name in OTHER_PROGRAMS if name in text] == []
    assert "exllamav2" not in str(metadata["tags"])
    assert "exllamav2 does not know" in text
    assert "exl2flow generate" in text
