import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from packed_models import make_packed

from exl2flow.core.reports import RowSums, Score
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.frames import measurement_frame, score_frame
from exl2flow.inference.scoring.intervals import intervals

PARAMS = {"group_size": {"4": 64}, "bits": [4], "bits_prop": [1.0], "scale_bits": 4}


def test_a_measurement_by_sublayers_lists_the_parameters_of_all_projections(tmp_path: Path) -> None:
    entry = {"accuracy": 0.75, "total_bits": 800, "up_proj": PARAMS, "down_proj": PARAMS}
    slots = {"model.norm": None, "model.layers.0.mlp": [entry]}
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps({"measurement": slots, "last_module_idx": 1}))

    (row,) = measurement_frame(path).to_dict("records")

    assert (row["slot"], row["candidate"], row["stored_bits"]) == ("model.layers.0.mlp", 0, 800)
    assert row["parameters"] == "up_proj 1:4b_64g s4; down_proj 1:4b_64g s4"
    assert row["relative_error"] == 0.25
    assert math.isnan(row["cost_nats"])


def test_a_measurement_without_slots_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "measurement.json"
    path.write_text('{"measurement": {}}')

    assert list(measurement_frame(path)) == [
        "slot",
        "candidate",
        "parameters",
        "stored_bits",
        "relative_error",
        "cost_nats",
    ]


@pytest.mark.parametrize(("rows", "known"), [(8, True), (7, False), (0, False)])
def test_score_frame_has_source_text_and_intervals(tmp_path: Path, rows: int, known: bool) -> None:
    """A score of an older version has no rows."""
    sums = RowSums(
        tokens=(10,) * rows,
        losses=tuple(20.0 + row for row in range(rows)),
        divergences=tuple(0.1 * row for row in range(rows)),
        agreements=(9,) * rows,
    )
    score = Score(
        model="",
        perplexity=10.0,
        reference_perplexity=9.0,
        kl_divergence=0.5,
        kl_median=0.5,
        kl_p99=0.5,
        top1_agreement=0.5,
        tokens=100,
        bytes=1000,
        text="digest" if rows else None,
        rows=sums if rows else None,
        intervals=intervals(sums),
    )
    model = make_packed("llama", tmp_path / "exl2").source_dir
    made = {"source": "/models/a", "source_fingerprint": "1f", "fingerprint": "x"}
    (model / RECORD_FILE).write_text(json.dumps(made))
    (model / SCORE_FILE).write_text(json.dumps({"fingerprint": "x", "score": asdict(score)}))

    (row,) = score_frame([model]).to_dict("records")

    assert (row["source"], row["source_fingerprint"]) == ("/models/a", "1f")
    assert (row["text"], row["rows"]) == ("digest", rows) if rows else math.isnan(row["rows"])
    for name in ("perplexity", "kl_divergence_nats", "top1_agreement"):
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        assert low <= high if known else math.isnan(low) and math.isnan(high)
    if known:
        assert score.intervals is not None
        assert (row["kl_divergence_nats_low"], row["kl_divergence_nats_high"]) == (
            score.intervals.kl_divergence
        )


def test_no_models_have_no_scores() -> None:
    assert score_frame([]).empty
