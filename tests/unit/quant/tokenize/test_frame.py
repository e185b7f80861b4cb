"""Calibration text from a DataFrame: the file that is written, and what goes by its content."""

import re
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from conversions import small_options
from tiny import make_tiny

from exl2flow.core.errors import CalibrationError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.quant.tokenize.frame import calibrate_on
from exl2flow.quant.tokenize.parquet import records
from exl2flow.quant.tokenize.stage import TOKENIZE

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "own-calibration-data.md"


def test_text_columns_become_records_in_their_order(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "title": ["one", None, " "],
            "stars": [1, 2, 3],
            "text": pd.Series(["first", "second", None], index=[7, 8, 9], dtype=object),
            "kind": pd.Categorical(["a", "b", "a"]),
        },
        index=[7, 8, 9],
    )

    options = calibrate_on(frame, folder=tmp_path, rows=3)

    assert options.rows == 3
    assert options.file is not None
    assert list(records(options.file, None)) == [["one", "first", "a"], ["second", "b"], ["a"]]
    assert pq.read_schema(options.file).names == ["title", "text", "kind"]


def test_columns_of_one_name_are_all_kept(tmp_path: Path) -> None:
    frame = pd.DataFrame([["a", "b"]], columns=["text", "text"])

    options = calibrate_on(frame, folder=tmp_path)

    assert options.file is not None
    assert list(records(options.file, None)) == [["a", "b"]]


def test_stages_go_by_the_text_and_by_nothing_else(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny")

    def fingerprint(frame: pd.DataFrame, folder: str) -> object:
        calibration = calibrate_on(frame, folder=tmp_path / folder)
        config = ConversionConfig(source=source, out=tmp_path / "out", calibration=calibration)
        return TOKENIZE.options(config)

    frame = pd.DataFrame({"text": ["some words"] * 3, "stars": [1, 2, 3]})
    first = fingerprint(frame, "a")

    assert fingerprint(frame.assign(stars=0), "b") == first
    assert fingerprint(frame.assign(text="other words"), "a") != first
    assert len(list((tmp_path / "a").iterdir())) == 2


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"n": [1, 2]}), r"holds no text in `n` \(int64\)"),
        (pd.DataFrame({"text": ["", " ", None]}), "holds no text in `text`"),
        (pd.DataFrame(), "holds no text in no columns"),
        (pd.DataFrame({"text": pd.Series(["a", 1], dtype=object)}), "column `text` of the Data"),
    ],
)
def test_a_frame_without_text_is_refused_and_writes_nothing(
    tmp_path: Path, frame: pd.DataFrame, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate_on(frame, folder=tmp_path / "new")

    assert not (tmp_path / "new").exists()


def test_the_example_of_the_page_converts_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = (
        block
        for block in re.findall(
            r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
        )
        if "calibrate_on" in block
    )
    monkeypatch.chdir(tmp_path)
    make_tiny("llama", tmp_path / "model")
    (tmp_path / "novel.txt").write_text("One morning it rained.\n\n" * 2000)
    small = {key: value for key, value in small_options().items() if key != "calibration"}
    script = script.replace(
        "rows=16, row_tokens=512", "rows=2, row_tokens=64, measure_row_tokens=64"
    )
    script = script.replace("bpw=4.0,", "bpw=4.0, **small,")

    exec(compile(script, str(PAGE), "exec"), {"small": small})

    record = read_json(tmp_path / "model-4bpw" / RECORD_FILE)
    assert re.fullmatch(r"calibration-[0-9a-f]{12}\.parquet", record["calibration"]["dataset"])
    assert set(record["calibration"]["quantize"]["kinds"]) == {"text"}
