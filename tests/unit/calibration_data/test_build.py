"""The committed Parquet files and their page are what `build.py` makes of the sources."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from exl2flow.calibration_data import build, chat, heldout, standard
from exl2flow.calibration_data.generate import Document

REMEDY = "run `python -m exl2flow.calibration_data.build` and commit what it wrote"


def read(path: Path) -> list[Document]:
    return [Document(**record) for record in pq.read_table(path).to_pylist()]


def source(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_committed_standard_set_equals_its_sources() -> None:
    assert read(standard()) == build.standard_documents(), REMEDY


def test_committed_dialogues_equal_their_sources() -> None:
    assert read(chat()) == build.chat_documents(), REMEDY


def test_committed_heldout_text_equals_its_sources() -> None:
    assert read(heldout()) == build.heldout_documents(), REMEDY


def test_provenance_table_is_current() -> None:
    page = (build.HERE / "PROVENANCE.md").read_text(encoding="utf-8")

    listed = page.partition(build.BEGIN)[2].partition(build.END)[0]

    assert listed == build.provenance_table(build.groups()), REMEDY


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"

    build.write_documents(build.standard_documents(), first)
    build.write_documents(build.standard_documents(), second)

    assert first.read_bytes() == second.read_bytes()


def test_documents_end_at_separator_lines_only(tmp_path: Path) -> None:
    path = source(tmp_path, "a.txt", "\none </doc> more\n  indented\n</doc>\n\n    two\n\n</doc>\n")

    texts = [document.text for document in build.read_documents(path, kind="web")]

    assert texts == ["one </doc> more\n  indented", "    two"]


def test_code_files_may_name_the_language_of_each_document(tmp_path: Path) -> None:
    named = source(tmp_path, "lua_r.txt", "a\n</doc>\nb\n")
    joint = source(tmp_path, "html_css.txt", "a\n</doc>\nb\n</doc>\nc\n")

    languages = [
        [document.language for document in build.read_documents(path, kind="code")]
        for path in (named, joint)
    ]

    assert languages == [["lua", "r"], ["html_css"] * 3]


def test_dialogues_are_english_unless_named_by_a_language(tmp_path: Path) -> None:
    paths = [source(tmp_path, name, "<user>\na\n") for name in ("de.txt", "code.txt")]

    documents = [build.read_documents(path, kind="chat")[0] for path in paths]

    assert [document.language for document in documents] == ["de", "en"]


def test_sources_alternate_in_proportion_to_their_lengths() -> None:
    long, short = (
        [Document(kind="web", name=f"{name}{i}", language="en", text="") for i in range(count)]
        for name, count in (("a", 6), ("b", 2))
    )

    names = [document.name for document in build.alternated([long, short])]

    assert names == ["a0", "a1", "b0", "a2", "a3", "a4", "b1", "a5"]


def test_missing_sources_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)

    with pytest.raises(FileNotFoundError, match="checkout"):
        build.standard_documents()


def test_main_writes_files_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (*build.KINDS, build.CHAT):
        (tmp_path / "text" / kind).mkdir(parents=True)
        source(tmp_path / "text" / kind, "en.txt", "words\n")
    (tmp_path / "heldout").mkdir()
    source(tmp_path / "heldout", "01_news.txt", "other words\n")
    page = source(tmp_path, "PROVENANCE.md", f"before\n{build.BEGIN}old\n{build.END}after\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "standard", lambda: tmp_path / "standard.parquet")
    monkeypatch.setattr(build, "chat", lambda: tmp_path / "chat.parquet")
    monkeypatch.setattr(build, "heldout", lambda: tmp_path / "heldout.parquet")

    build.main()

    table = capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == f"before\n{build.BEGIN}{table}{build.END}after\n"
    assert "| heldout | written | news | 1 | 11 | en |" in table
    assert [document.text for document in read(tmp_path / "heldout.parquet")] == ["other words"]
    assert [document.text for document in read(tmp_path / "chat.parquet")] == ["words"]
