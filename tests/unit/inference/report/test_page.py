"""The page of converted models: one section for each source and text."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from expert_reports import SCORE
from zeros import zeros

from exl2flow.core.store.files import write_tensors
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.page import write_up
from exl2flow.model import QuantParams


def convert(folder: Path, source: str, *, layers: int = 1, bits: int = 4, **score: Any) -> None:
    """Write what a conversion leaves: layers of one matrix each, a head of 6 bits, a score."""
    folder.mkdir(parents=True)
    keys = [f"model.layers.{index}.mlp.up_proj" for index in range(layers)]
    widths = {**dict.fromkeys(keys, bits), "lm_head": 6}
    tensors = {}
    for key, width in widths.items():
        params = QuantParams(bit_widths=(width,), proportions=(1.0,), group_sizes=(32,))
        tensors |= zeros(params).to_tensors(key)
    write_tensors(folder / "model.safetensors", tensors)
    names = [key.removesuffix(".up_proj") for key in widths]
    written = {
        "source": source,
        "fingerprint": folder.name,
        "options": {"quality": "standard", "bpw": 4.0},
        "layers": [{"name": name, "bpw": 4.0, "rel_err": 0.1} for name in names],
    }
    (folder / RECORD_FILE).write_text(json.dumps(written))
    scored = {"fingerprint": folder.name, "score": {**SCORE, **score}}
    (folder / SCORE_FILE).write_text(json.dumps(scored))


def edit_record(folder: Path, **changes: Any) -> None:
    path = folder / RECORD_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sections(page: str) -> list[str]:
    """Return the texts of the sections, with a bar between cells."""
    found = re.findall(r"<section.*?</section>", page, flags=re.DOTALL)
    plain = [re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) for text in found]
    return [unescape(re.sub(r"(<[^>]*>)+", "|", text)) for text in plain]


def test_each_source_has_a_section_with_its_own_figures(tmp_path: Path) -> None:
    convert(tmp_path / "small", "/models/demo", reference_perplexity=2.5)
    convert(tmp_path / "large", "/models/wiki", reference_perplexity=30.0, kl_divergence=0.9)

    page = write_up(tmp_path)

    demo, wiki = sections(page)
    assert "|demo|" in demo
    assert "source perplexity 2.5000" in demo
    assert "small" in demo
    assert "large" not in demo
    assert "|wiki|" in wiki
    assert "source perplexity 30.0000" in wiki
    assert "small" not in wiki
    assert "diverges no less" not in page
    assert "Tokens of experts" not in page


def test_a_larger_model_of_another_source_is_not_compared(tmp_path: Path) -> None:
    rows = {
        "tokens": [100] * 8,
        "losses": [200.0] * 8,
        "divergences": [10.0] * 8,
        "agreements": [9] * 8,
    }
    convert(tmp_path / "a", "/models/demo", rows=rows)
    worse = {**rows, "divergences": [90.0] * 8}
    convert(tmp_path / "b", "/models/demo", kl_divergence=0.9, bytes=2000, rows=worse)
    assert "rises with bytes" in write_up(tmp_path)

    convert(tmp_path / "apart" / "a", "/models/demo", rows=rows)
    convert(tmp_path / "apart" / "b", "/models/wiki", kl_divergence=0.9, bytes=2000, rows=worse)

    assert "rises with bytes" not in write_up(tmp_path / "apart")


def test_models_scored_on_different_texts_are_apart(tmp_path: Path) -> None:
    for name, text in (("one", "a"), ("two", "b"), ("three", "a")):
        convert(tmp_path / name, "/models/demo", text=text)

    found = sections(write_up(tmp_path))

    assert len(found) == 2
    assert sorted("two" in text for text in found) == [False, True]


@pytest.mark.parametrize(("perplexity", "count"), [(9.0, 1), (9.5, 2)])
def test_old_scores_without_a_text_are_grouped_by_the_perplexity_of_the_source(
    tmp_path: Path, perplexity: float, count: int
) -> None:
    convert(tmp_path / "one", "/models/demo", text=None)
    convert(tmp_path / "two", "/models/demo", text=None, reference_perplexity=perplexity)

    assert len(sections(write_up(tmp_path))) == count


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    convert(tmp_path / "one", "/a/model")
    convert(tmp_path / "two", "/b/model")

    first, second = sections(write_up(tmp_path))

    assert "|a/model|" in first
    assert "|b/model|" in second


def test_models_of_a_source_that_was_moved_share_a_section(tmp_path: Path) -> None:
    for name, source in (("one", "/before/model"), ("two", "/after/model")):
        convert(tmp_path / name, source)
        edit_record(tmp_path / name, source_fingerprint="1f")

    (text,) = sections(write_up(tmp_path))

    assert "|one|" in text
    assert "|two|" in text
    assert "|source|model|" in re.sub(r"\|\s+\|", "|", text)


def test_other_weights_in_the_same_folder_are_another_source(tmp_path: Path) -> None:
    for name, fingerprint, perplexity in (("one", "1f", 2.5), ("two", "2f", 30.0)):
        convert(tmp_path / name, "/models/demo", reference_perplexity=perplexity)
        edit_record(tmp_path / name, source_fingerprint=fingerprint)

    first, second = sections(write_up(tmp_path))

    assert "source perplexity 2.5000" in first
    assert "1f" in first
    assert "|two|" not in first
    assert "source perplexity 30.0000" in second
    assert "2f" in second
    assert "|one|" not in second


def test_records_of_older_versions_are_told_apart_by_the_folder_of_the_source(
    tmp_path: Path,
) -> None:
    for name, source in (("one", "/a/model"), ("two", "/b/model"), ("three", "/a/model")):
        convert(tmp_path / name, source)

    assert len(sections(write_up(tmp_path))) == 2


def test_sublayers_of_different_depths_are_matched_by_name(tmp_path: Path) -> None:
    convert(tmp_path / "deep", "/models/demo", layers=3, bits=2)
    convert(tmp_path / "flat", "/models/demo", layers=1, bits=3)

    (text,) = sections(write_up(tmp_path))

    rows = dict(re.findall(r"\|(\d\.mlp|lm_head)\|([^\n]*)\|", text))
    deep, flat = rows["lm_head"].split("|")
    assert deep == flat
    assert float(deep) > 6
    assert "–" in rows["2.mlp"].split("|")


def test_wide_tables_and_plots_scroll_in_boxes_of_their_own(tmp_path: Path) -> None:
    convert(tmp_path / "one", "/models/demo")

    page = write_up(tmp_path)

    assert page.count('<div class="wide"><table') + page.count('<table class="facts">') == (
        page.count("<table")
    )
    assert page.count("<svg") == page.count('<div class="wide plot"><svg')


def test_page_can_be_sent_and_read_by_everyone(tmp_path: Path) -> None:
    convert(tmp_path / "one", "/home/me/clients/model")
    edit_record(
        tmp_path / "one",
        options={"quality": "fast", "bpw": 4.0, "validate_options": {"sample_seed": 3}},
    )

    page = write_up(tmp_path)

    assert "/home/me" not in page
    assert str(tmp_path) not in page
    assert "validate_options" not in page
    assert "seed of the sample" in page
    assert "prefers-color-scheme: dark" in page
    plots = re.findall(r"<svg [^>]*>\s*<title>[^<]+</title>", page)
    assert len(plots) == page.count("<svg ") == 2
    assert all('role="img"' in plot and "aria-label=" in plot for plot in plots)
    sizes = [float(size) for size in re.findall(r"font: (?:[a-z]+ )*([\d.]+)px", page)]
    assert min(sizes) >= 11
