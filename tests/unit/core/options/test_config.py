"""Options: defaults, bounds, targets and what a refusal says."""

import itertools
import os
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from exl2flow.core.options.base import MEASUREMENT_FILE, measurement_path
from exl2flow.core.options.config import (
    HEAD_BITS,
    TARGETS,
    CalibrationOptions,
    ConversionConfig,
    FitOptions,
    Options,
    RoundingOptions,
)
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows.validate import Comparison

GROUPS = [
    type(field.default)
    for field in ConversionConfig.model_fields.values()
    if isinstance(field.default, Options)
]


def test_defaults_are_those_of_the_standard_calibration() -> None:
    config = ConversionConfig(source="model", out="out")

    calibration = config.calibration
    assert (calibration.rows, calibration.row_tokens) == (115, 2048)
    assert (calibration.measure_rows, calibration.measure_row_tokens) == (19, 2048)
    assert (config.quality, config.bpw, config.fixed_head_bits) == ("standard", 4.0, 6)
    assert (config.shard_size_mb, config.tune.steps, config.allocate.rounds) == (8192, 0, 0)
    assert (config.validate_options.warn_perplexity_ratio, config.device) == (1.3, "auto")
    assert config.validate_options.fail_perplexity_ratio == 3.0


def test_head_bits_are_those_with_parameters() -> None:
    assert HEAD_BITS == (2, 3, 4, 5, 6, 8)
    for bits in HEAD_BITS:
        assert ConversionConfig(source="model", out="out", head_bits=bits).head_bits == bits


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 16])
def test_other_head_bits_are_refused_by_name(bits: int) -> None:
    with pytest.raises(ValidationError, match=rf"`head_bits` is {bits}; choose one of \(2, 3"):
        ConversionConfig(source="model", out="out", head_bits=bits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bpw", 1.99),
        ("bpw", 8.01),
        ("bpw", float("nan")),
        ("bpw_total", 1.99),
        ("bpw_total", 16.01),
        ("max_memory", 0),
        ("max_memory", "lots"),
        ("target_bytes", 0),
        ("target_bytes", 1.5),
        ("quality", "fine"),
        ("quality", ["fast"]),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("device", "cuda:-1"),
        ("calibration.text", ""),
        ("calibration.share", 0),
        ("calibration.share", 1.01),
        ("calibration.rows", 0),
        ("calibration.row_tokens", 100),
        ("calibration.measure_rows", 0),
        ("calibration.measure_row_tokens", 16),
        ("calibration.seed", -1),
        ("rope.scale", 0),
        ("rope.alpha", -2),
        ("sensitivity.kind", "hessian"),
        ("sensitivity.rows", 0),
        ("sensitivity.block", -1),
        ("rounding.scale_search", "row"),
        ("rounding.damping", 0),
        ("rounding.rounds", -1),
        ("rounding.sweeps", 0),
        ("rounding.output_damping", 0),
        ("rounding.fisher_share", 1.01),
        ("tune.steps", -1),
        ("tune.tokens", 16),
        ("tune.held_out_rows", 0),
        ("allocate.objective", "best"),
        ("allocate.power", 0),
        ("allocate.rounds", -1),
        ("validate_options.rows", 0),
        ("validate_options.row_tokens", 1),
        ("validate_options.fail_perplexity_ratio", 0),
        ("validate_options.sample_tokens", -1),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    group, _, name = field.rpartition(".")
    values = {group: {name: value}} if group else {name: value}

    with pytest.raises(ValidationError, match=field):
        ConversionConfig(source="model", out="out", **values)


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(ValidationError) as refusal:
        ConversionConfig(source="model", out="out", bpw=9, calibration={"rows": 0}, speed=3)

    for name in ("bpw", "calibration.rows", "speed"):
        assert name in str(refusal.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_tilde_means_the_users_folder_in_every_path(home: Path) -> None:
    given = {
        "work_root": "~/work",
        "measurement": "~/m.json",
        "calibration": {"text": "~/c.parquet"},
        "validate_options": {"text": "~/v.txt"},
    }

    one = ConversionConfig(source="~/model", out="~/out", **given)
    several = SweepConfig.model_validate(
        {"source": "~/model", "out": "~/out", "bpw": [3, 4], **given}
    )

    for config in (one, several, several.conversion(3)):
        assert config.source == home / "model"
        assert (config.work_dir_root, config.measurement) == (home / "work", home / "m.json")
        assert config.calibration.file == home / "c.parquet"
        assert config.validate_options.text == home / "v.txt"
    assert (one.out, several.conversion(3).out) == (home / "out", home / "out" / "3.0bpw")


def test_tilde_means_the_users_folder_where_models_are_published_refined_and_compared(
    home: Path,
) -> None:
    published = PublishConfig.model_validate({"repo": "a/b", "models": ["~/x", "y"]})
    compared = Comparison.model_validate({"models": ["~/x"], "reference": "~/r"})
    refined = RefinementConfig.model_validate({"source": "s", "out": "o", "model": "~/x"})

    assert published.models == (home / "x", Path("y"))
    assert (*compared.models, compared.reference) == (home / "x", home / "r")
    assert refined.model == home / "x"


def test_work_root_beside_an_output_with_tilde_is_beside_the_output(home: Path) -> None:
    assert ConversionConfig(source="m", out="~/out").work_dir_root == home / ".exl2flow"


def test_unknown_user_is_left_to_the_checks_before_a_conversion() -> None:
    assert ConversionConfig(source="~no-such-user/m", out="o").source == Path("~no-such-user/m")


@pytest.mark.parametrize("field", ["source", "out", "work_root"])
def test_path_that_is_not_utf8_is_refused_by_name(field: str) -> None:
    values = {"source": "m", "out": "o", field: Path(os.fsdecode(b"a\xff"))}

    with pytest.raises(ValidationError, match="its name is not UTF-8"):
        ConversionConfig(**values)


@pytest.mark.parametrize("spelling", ["model", "model/", "other/../model", "link"])
def test_output_onto_the_source_is_refused(spelling: str, tmp_path: Path) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")

    with pytest.raises(ValidationError, match="`out` is the source folder"):
        ConversionConfig(source=tmp_path / "model", out=f"{tmp_path}/{spelling}")


@pytest.mark.parametrize(
    ("values", "unknown"),
    [
        ({}, {"expert_tokens", "block_steps", "block_rate"}),
        ({"expert_tokens": 5}, {"block_steps", "block_rate"}),
        ({"block_steps": 5}, {"expert_tokens"}),
    ],
)
def test_fingerprints_know_every_option_of_rounding_but_the_defaults_of_the_latest(
    values: dict[str, int], unknown: set[str]
) -> None:
    options = RoundingOptions(rounds=7, **values)

    assert options.fingerprinted() == options.model_dump(exclude=unknown)
    assert options.fingerprinted() != RoundingOptions(**values).fingerprinted()


def test_configuration_cannot_be_changed() -> None:
    config = ConversionConfig(source="model", out="out")

    with pytest.raises(ValidationError, match="frozen"):
        config.bpw = 3.0  # type: ignore[misc]  # what is tested


def test_work_root_lies_beside_the_output_unless_given(tmp_path: Path) -> None:
    beside = ConversionConfig(source="model", out=tmp_path / "out")
    given = ConversionConfig(source="model", out=tmp_path / "out", work_root=tmp_path / "work")

    assert beside.work_dir_root == tmp_path / ".exl2flow"
    assert given.work_dir_root == tmp_path / "work"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({}, "4bpw"),
        ({"bpw": 2.50}, "2.5bpw"),
        ({"bpw_total": 3.25}, "3.25bpw-total"),
        ({"target_bytes": 123456789}, "123456789bytes"),
    ],
)
def test_run_name_is_model_and_target(target: dict[str, object], name: str, tmp_path: Path) -> None:
    config = ConversionConfig(source=tmp_path / "Llama-7B", out="out", **target)

    assert config.run_name == f"Llama-7B@{name}"


@pytest.mark.parametrize(
    "values",
    [
        {"bpw": 3.5, "rope": {"alpha": 2.0}, "calibration": {"rows": 7, "text": "mine.parquet"}},
        {"bpw_total": 3.5, "head_bits": 8, "allocate": {"objective": "log"}},
        {"target_bytes": 10**12, "work_root": "work", "measurement": "measurement.json"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_json_round_trip_keeps_every_option(values: dict[str, object]) -> None:
    config = ConversionConfig(source="model", out="out", **values)

    assert ConversionConfig.model_validate_json(config.model_dump_json()) == config


TARGET_VALUES: dict[str, object] = {
    "bpw": 3.0,
    "bpw_total": 4.0,
    "target_bytes": 10**9,
    "fit": FitOptions.model_validate({"memory": "24GB"}),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(TARGETS, 2)))
def test_two_targets_are_refused_by_name(first: str, second: str) -> None:
    values = {name: TARGET_VALUES[name] for name in (first, second)}

    with pytest.raises(ValidationError, match="choose one target") as refusal:
        ConversionConfig(source="model", out="out", **values)

    assert f"`{first}`" in str(refusal.value)
    assert f"`{second}`" in str(refusal.value)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_takes_the_place_of_the_default(target: str) -> None:
    config = ConversionConfig(source="model", out="out", **{target: TARGET_VALUES[target]})

    given = {name: getattr(config, name) for name in TARGETS}
    assert given == dict.fromkeys(TARGETS) | {target: TARGET_VALUES[target]}


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ({}, 6),
        ({"bpw": 3}, 6),
        ({"bpw": 3, "head_bits": 8}, 8),
        ({"bpw_total": 3}, None),
        ({"target_bytes": 10**9}, None),
        ({"bpw_total": 3, "head_bits": 5}, 5),
        ({"target_bytes": 10**9, "head_bits": 4}, 4),
    ],
)
def test_the_head_is_free_with_a_total_unless_given(
    values: dict[str, object], bits: int | None
) -> None:
    assert ConversionConfig(source="model", out="out", **values).fixed_head_bits == bits


def test_a_group_that_is_no_group_is_a_problem_like_others() -> None:
    with pytest.raises(ValidationError) as refusal:
        ConversionConfig(
            source="model", out="out", quality="fast", rounding=5, sensitivity=[], bpw=9
        )

    for name in ("rounding\n", "sensitivity\n", "bpw\n"):
        assert name in str(refusal.value)


def test_error_for_two_targets_has_no_prefix() -> None:
    with pytest.raises(ValidationError, match=r"`bpw` and `bpw_total` are given"):
        ConversionConfig(source="model", out="out", bpw=3, bpw_total=4)


def test_calibration_text_is_a_name_or_a_file() -> None:
    named = [CalibrationOptions(text=text) for text in CalibrationOptions.BUILT_IN]
    files = [
        CalibrationOptions(text=text) for text in ("mine.parquet", Path("b.parquet"), "./chat")
    ]

    assert [options.file for options in named] == [None] * 4
    assert [options.file for options in files] == [
        Path("mine.parquet"),
        Path("b.parquet"),
        Path("chat"),
    ]


def test_records_name_the_text_without_its_folder() -> None:
    texts = ("standard", "chat", "self", "/home/me/mine.parquet")

    names = [CalibrationOptions(text=text).dataset for text in texts]

    assert names == ["(default)", "(chat)", "(self)", "mine.parquet"]


@pytest.mark.parametrize(
    ("text", "share", "rows", "special"),
    [
        ("standard", 0.5, 115, 0),
        ("mine.parquet", 1.0, 115, 0),
        ("chat", 0.5, 115, 58),
        ("self", 0.5, 19, 10),
        ("self", 0.01, 19, 1),
        ("chat", 1.0, 7, 7),
        ("chat", 0.5, 1, 1),
    ],
)
def test_share_of_special_rows_is_rounded_and_at_least_one(
    text: str, share: float, rows: int, special: int
) -> None:
    assert CalibrationOptions(text=text, share=share).special_rows(rows) == special


@pytest.mark.parametrize("options", [ConversionConfig, *GROUPS])
def test_every_option_is_described_for_the_form(options: type[Options]) -> None:
    undescribed = [
        name
        for name, field in options.model_fields.items()
        if not field.description and field.annotation not in GROUPS
    ]

    assert undescribed == []


@pytest.mark.parametrize(
    ("options", "name", "others"),
    [(ConversionConfig, "max_memory", ["null"]), (FitOptions, "memory", [])],
)
def test_forms_ask_for_a_size_by_one_choice_with_names(
    options: type[Options], name: str, others: list[str]
) -> None:
    asked = options.model_json_schema()["properties"][name]

    assert [choice["type"] for choice in asked["anyOf"]] == ["string", "integer", *others]
    assert "24GB" in asked["description"]


@pytest.mark.parametrize(
    ("options", "name"), [(ConversionConfig, "max_memory"), (FitOptions, "memory")]
)
@pytest.mark.parametrize(
    ("value", "is_a_size"),
    [("24GB", True), (" 1.5 GiB", True), (1, True), ("GB", False), ("lots", False), (0, False)],
)
def test_forms_tell_sizes_from_other_values(
    value: object, is_a_size: bool, options: type[Options], name: str
) -> None:
    asked = options.model_json_schema()["properties"][name]

    assert jsonschema.Draft202012Validator(asked).is_valid(value) == is_a_size


def test_forms_begin_with_what_a_person_decides_first() -> None:
    names = [*ConversionConfig.model_json_schema()["properties"]]

    assert names[:4] == ["source", "out", "quality", "bpw"]
    assert {*names} == ConversionConfig.model_fields.keys()


def test_a_configuration_is_taken_as_it_is_and_a_value_that_is_none_is_named() -> None:
    config = ConversionConfig(source="model", out="out", quality="fast", bpw=3)

    assert ConversionConfig.model_validate(config) == config
    with pytest.raises(ValidationError, match=r"input_value='fast', input_type=str"):
        ConversionConfig.model_validate("fast")


def test_a_measurement_is_the_beginning_of_a_conversion(tmp_path: Path) -> None:
    config = MeasureConfig(
        source="model",
        out=tmp_path / "found.json",
        lossy_source=True,
        calibration=CalibrationOptions(rows=7),
    )

    conversion = config.conversion()

    assert MEASUREMENT_FILE == "measurement.json"  # exllamav2's name
    assert conversion.out == tmp_path / ".found.unused"
    assert (conversion.bpw, conversion.lossy_source, conversion.calibration.rows) == (8.0, True, 7)
    assert conversion.work_dir_root == config.work_dir_root == tmp_path / ".exl2flow"
    assert conversion.work_root == config.work_dir_root


def test_a_measurement_may_be_made_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for out in (".", "..", "/", "", tmp_path):
        config = MeasureConfig(source="model", out=out)

        assert config.file == Path(out) / MEASUREMENT_FILE
        assert config.conversion().out.name == ".measurement.unused"
    assert MeasureConfig(source="model", out="own.json").file == Path("own.json")


def test_a_measurement_may_be_given_as_its_folder(tmp_path: Path) -> None:
    assert measurement_path(tmp_path) == tmp_path / "measurement.json"
    assert measurement_path(tmp_path / "own.json") == tmp_path / "own.json"


def test_runs_have_names_for_people() -> None:
    refinement = RefinementConfig(model="out/rough", source="org/model", out="better")
    sweep = SweepConfig(source="org/model", out="out", bpw=[3, 4.25])
    fit = ConversionConfig(source="org/model", out="out", fit=FitOptions(memory="24GB"))

    assert (refinement.run_name, refinement.target) == ("model@refined:rough", "refined:rough")
    assert sweep.run_name == "model@3,4.25bpw"
    assert "fit-24.0GB" in fit.run_name
