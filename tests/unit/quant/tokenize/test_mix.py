"""Rows of the standard set and of a user's Parquet file."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from exl2flow.calibration_data import standard
from exl2flow.core.errors import CalibrationError, NotEnoughRows
from exl2flow.quant.tokenize import mix as calibration
from exl2flow.quant.tokenize.mix import (
    MIX,
    TEXT_KINDS,
    CalibrationRows,
    RowRequest,
    calibration_rows,
    row_counts,
)

BOS, EOS = 256, 257
ROW_COUNTS = [1, 7, 19, 24, 100, 115, 145]


class ByteTokenizer:
    """One token per byte of UTF-8, BOS and EOS beyond."""

    bos_token_id: int | None = BOS
    vocab_size = 258

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [BOS] * add_bos + list(text.encode()) + [EOS] * add_eos


class PlainTokenizer(ByteTokenizer):
    """Has neither BOS nor EOS and ignores requests for them."""

    bos_token_id = None
    vocab_size = 256

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return list(text.encode())


def text_of(ids: torch.Tensor) -> str:
    return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


def of_kind(rows: CalibrationRows, kind: str) -> torch.Tensor:
    return rows.ids[[index for index, name in enumerate(rows.kinds) if name == kind]]


def texts_of(kind: str) -> list[str]:
    records = pq.read_table(standard()).to_pylist()
    return [record["text"] for record in records if record["kind"] == kind]


def written(folder: Path, columns: dict[str, Any], name: str = "mine.parquet") -> Path:
    pq.write_table(pa.table(columns), folder / name)
    return folder / name


@pytest.fixture
def short_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard set of 100 bytes per kind."""
    kinds = list(calibration.TEXT_KINDS)
    texts = [f"{kind}\n".ljust(100, "abcdef"[index]) for index, kind in enumerate(kinds)]
    path = written(tmp_path, {"kind": kinds, "text": texts}, "short.parquet")
    monkeypatch.setattr(calibration, "standard", lambda: path)
    return path


@pytest.mark.parametrize(
    ("rows", "mix", "noise", "counts"),
    [
        (19, "measure", False, [2, 4, 3, 2, 3, 1, 2, 2]),
        (115, "quantize", False, [10, 48, 15, 10, 15, 5, 2, 10]),
        (24, "measure", True, [2, 4, 3, 2, 3, 1, 2, 2, 5]),
        (145, "quantize", True, [10, 48, 15, 10, 15, 5, 2, 10, 30]),
    ],
)
def test_usual_numbers_of_rows_are_the_table(
    rows: int, mix: Any, noise: bool, counts: list[int]
) -> None:
    found = row_counts(RowRequest(rows=rows, row_tokens=32, mix=mix, noise=noise))

    assert list(found.values()) == counts
    assert list(found) == [kind for kind in MIX if noise or kind != "noise"]


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("mix", ["measure", "quantize"])
@pytest.mark.parametrize("noise", [False, True])
def test_any_row_count_keeps_the_proportions(rows: int, mix: Any, noise: bool) -> None:
    counts = row_counts(RowRequest(rows=rows, row_tokens=32, mix=mix, noise=noise))

    column = 0 if mix == "measure" else 1
    total = sum(MIX[kind][column] for kind in counts)
    assert sum(counts.values()) == rows
    for kind, count in counts.items():
        assert abs(count - rows * MIX[kind][column] / total) < 1


def test_one_row_is_of_the_largest_kind() -> None:
    rows = calibration_rows(None, ByteTokenizer(), RowRequest(rows=1, row_tokens=64))

    assert rows.kinds == ("encyclopedia",)


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_ids_and_kinds_agree_with_the_counts(rows: int) -> None:
    request = RowRequest(rows=rows, row_tokens=96, noise=True)

    made = calibration_rows(None, ByteTokenizer(), request)

    assert made.ids.shape == (rows, 96)
    assert made.ids.dtype == torch.int64
    listed = [kind for kind, count in row_counts(request).items() for _ in range(count)]
    assert list(made.kinds) == listed


def test_seed_changes_shuffled_and_random_rows_only() -> None:
    first, again, second = (
        calibration_rows(None, ByteTokenizer(), RowRequest(rows=115, row_tokens=128, seed=seed))
        for seed in (0, 0, 1)
    )

    assert torch.equal(first.ids, again.ids)
    changed = (first.ids != second.ids).any(dim=1)
    assert [kind in ("shuffled", "random") for kind in first.kinds] == changed.tolist()


def test_text_rows_are_all_different() -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=115, row_tokens=2048))

    assert made.ids.shape == (115, 2048)
    assert len(made.ids.unique(dim=0)) == 115


def test_encyclopedia_rows_begin_with_bos_in_the_second_half_only() -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=115, row_tokens=512))

    for kind, count in (("encyclopedia", 48), ("stories", 10)):
        begins = (of_kind(made, kind)[:, 0] == BOS).tolist()
        assert begins == [False] * (count // 2) + [True] * (count - count // 2)


def test_articles_lose_their_titles_and_gain_bos_and_eos() -> None:
    title, _, body = texts_of("encyclopedia")[0].partition("\n")
    article = body.strip()
    length = -(-(len(article.encode()) + 2) // 32) * 32

    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=length))

    row = of_kind(made, "encyclopedia")[0].tolist()
    end = len(article.encode())
    assert text_of(torch.tensor(row[:end])) == article
    assert row[end : end + 2] == [EOS, BOS]
    assert not article.startswith(title)


def test_stories_keep_their_first_line() -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=32))

    assert texts_of("stories")[0].startswith(text_of(of_kind(made, "stories")[0]))


def test_web_rows_are_consecutive_and_documents_stand_apart() -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=115, row_tokens=1024))

    stream = "\n\n".join(f"{text}\n" for text in texts_of("web")).encode()
    assert of_kind(made, "web").flatten().tolist() == list(stream[: 10 * 1024])


@pytest.mark.parametrize("kind", ["code", "multilingual", "technical"])
def test_other_text_is_cut_from_its_start(kind: str) -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=256))

    rows = of_kind(made, kind).flatten().tolist()
    stream = "\n".join(f"{text}\n" for text in texts_of(kind)).encode()
    assert rows == list(stream[: len(rows)])


def test_random_ids_stay_below_the_vocabulary() -> None:
    narrow = RowRequest(rows=19, row_tokens=2048, mix="measure", vocab_size=10)
    tokenizers = RowRequest(rows=19, row_tokens=2048, mix="measure")

    few = of_kind(calibration_rows(None, ByteTokenizer(), narrow), "random")
    all_of_them = of_kind(calibration_rows(None, ByteTokenizer(), tokenizers), "random")

    assert few.unique().tolist() == list(range(10))
    assert all_of_them.unique().tolist() == list(range(258))


def test_noise_rows_hold_minus_one_and_come_last() -> None:
    request = RowRequest(rows=24, row_tokens=64, mix="measure", noise=True)

    made = calibration_rows(None, ByteTokenizer(), request)

    assert (made.ids[19:] == -1).all()
    assert (made.ids[:19] >= 0).all()


def test_a_tokenizer_without_bos_gives_plain_rows() -> None:
    made = calibration_rows(None, PlainTokenizer(), RowRequest(rows=115, row_tokens=256))

    assert made.ids.shape == (115, 256)
    assert int(made.ids.max()) < 256


def test_short_kinds_overlap_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=calibration.__name__)

    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=115, row_tokens=8192))

    notes = [note for note in made.notes if note.startswith("stories")]
    total = sum(len(text.encode()) + 2 for text in texts_of("stories"))
    assert notes == [f"stories: {total} tokens for 10 rows of 8192; rows overlap"]
    assert len(of_kind(made, "stories").unique(dim=0)) == 10
    assert [record.message for record in caplog.records] == list(made.notes)


def test_enough_text_needs_no_note() -> None:
    assert calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=512)).notes == ()


def test_a_kind_shorter_than_a_row_is_followed_by_others(short_set: Path) -> None:
    made = calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=160))

    web = text_of(of_kind(made, "web")[0])
    assert web.startswith("web\naaa")
    assert "bbb" in web
    assert "web: 101 tokens for 2 rows of 160; text of other kinds follows it" in made.notes


def test_a_set_shorter_than_a_row_is_refused(short_set: Path) -> None:
    with pytest.raises(NotEnoughRows, match=r"59\d tokens .* needs 1024; lower `row_tokens`"):
        calibration_rows(None, ByteTokenizer(), RowRequest(rows=19, row_tokens=1024))


def test_own_records_are_joined_by_spaces_and_concatenated(tmp_path: Path) -> None:
    columns = {
        "title": ["one", None, "five"],
        "score": [1, 2, 3],
        "body": ["two", "three four", "x" * 60],
    }
    path = written(tmp_path, columns)

    made = calibration_rows(path, ByteTokenizer(), RowRequest(rows=2, row_tokens=32))

    expected = "one twothree fourfive " + "x" * 60
    assert "".join(text_of(row) for row in made.ids) == expected[:64]
    assert made.kinds == ("text", "text")
    assert made.notes == ()


def test_own_text_of_any_string_type_is_read(tmp_path: Path) -> None:
    columns = {
        "small": pa.array(["aa"] * 20).dictionary_encode(),
        "large": pa.array(["bb"] * 20, pa.large_string()),
        "list": pa.array([["cc"]] * 20),
    }
    path = written(tmp_path, columns)

    made = calibration_rows(path, ByteTokenizer(), RowRequest(rows=1, row_tokens=32))

    assert text_of(made.ids[0]) == "aa bb" * 6 + "aa"


def test_pandas_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    pd.DataFrame({"text": ["hello " * 10, None]}).to_parquet(path)

    made = calibration_rows(path, ByteTokenizer(), RowRequest(rows=1, row_tokens=32))

    assert text_of(made.ids[0]).startswith("hello hello")


def test_reading_stops_when_the_rows_are_full(tmp_path: Path) -> None:
    class CountingTokenizer(ByteTokenizer):
        calls = 0

        def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
            CountingTokenizer.calls += 1
            return super().encode(text, add_bos=add_bos, add_eos=add_eos)

    path = written(tmp_path, {"text": ["x" * 32] * 100})

    calibration_rows(path, CountingTokenizer(), RowRequest(rows=3, row_tokens=32))

    assert CountingTokenizer.calls == 3


def test_short_own_text_is_read_at_other_offsets(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": ["".join(chr(i) for i in range(32, 127))]})

    made = calibration_rows(path, ByteTokenizer(), RowRequest(rows=4, row_tokens=32))

    assert made.ids[:, 0].tolist() == [32, 53, 74, 95]
    assert made.notes == ("mine.parquet: 95 tokens for 4 rows of 32; rows overlap",)


def test_equal_rows_are_admitted_where_unavoidable(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": ["x" * 33]})

    made = calibration_rows(path, ByteTokenizer(), RowRequest(rows=4, row_tokens=32))

    assert made.notes == ("mine.parquet: 33 tokens for 4 rows of 32; some rows are equal",)


def test_own_text_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": ["too short"]})

    with pytest.raises(NotEnoughRows, match=r"mine\.parquet` has 9 tokens.*needs 32.*need 64; add"):
        calibration_rows(path, ByteTokenizer(), RowRequest(rows=2, row_tokens=32))


RECORDS = {"text": [f"record {i}" * 9 for i in range(500)]}
NO_PARQUET = "cannot be read as Parquet"


def damaged(folder: Path) -> Path:
    path = written(folder, RECORDS)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    return path


def containing(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "text.parquet").write_bytes(content)
        return folder / "text.parquet"

    return write


def holding(**columns: Any) -> Callable[[Path], Path]:
    return lambda folder: written(folder, columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.parquet", "no calibration file at"),
        (lambda folder: folder, NO_PARQUET),
        *((containing(c), NO_PARQUET) for c in (b"", b"just some text\n" * 20, b"PAR1junkPAR1")),
        (damaged, NO_PARQUET),
        (
            holding(number=[1, 2], raw=[b"a", b"b"]),
            r"no text column, only `number` \(int64\), `raw` \(binary\)",
        ),
        (holding(), "no text column, only no columns"),
        *(
            (holding(body=pa.array(texts, pa.string())), r"holds no text in `body` \(string\)")
            for texts in ([], [None, None], ["", "  \n"])
        ),
    ],
)
def test_files_that_hold_no_text_are_refused(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = make(tmp_path)

    with pytest.raises(CalibrationError, match=message) as caught:
        calibration_rows(path, ByteTokenizer(), RowRequest(rows=1, row_tokens=32))

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("mix", ["measure", "quantize"])
def test_some_row_is_text_however_few_there_are(
    mix: Literal["measure", "quantize"], noise: bool
) -> None:
    for rows in range(1, 40):
        counts = row_counts(RowRequest(rows=rows, row_tokens=32, mix=mix, noise=noise))

        assert sum(counts.values()) == rows
        assert any(counts[kind] for kind in TEXT_KINDS)
