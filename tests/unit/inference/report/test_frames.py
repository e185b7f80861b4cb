import json
import math
from pathlib import Path

from exl2flow.inference.report.frames import measurement_frame

PARAMS = {"group_size": {"4": 64}, "bits": [4], "bits_prop": [1.0], "scale_bits": 4}


def test_a_measurement_by_sublayers_lists_the_parameters_of_all_projections(
    tmp_path: Path,
) -> None:
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
        *("slot", "candidate", "parameters", "stored_bits", "relative_error", "cost_nats")
    ]
