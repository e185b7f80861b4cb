"""Names of the tensors that a conversion writes against those that exllamav2 loads."""

from pathlib import Path

import pytest
from checkpoints import ALL, make_checkpoint, rename
from exllamav2_names import NAMES, expanded
from mapped import MAPPED

from exl2flow.model import CanonicalTensors, resolve
from exl2flow.quant.allocate.layout import output_layout
from exl2flow.quant.measure.candidates import PROJECTION_OPTIONS


@pytest.mark.parametrize("name", NAMES)
def test_conversion_writes_the_names_that_exllamav2_loads(name: str, tmp_path: Path) -> None:
    spec = resolve(make_checkpoint(name, tmp_path))
    keys = [*(p.key for s in spec.sublayers for p in s.projections), spec.head.key]

    layout = output_layout(spec, dict.fromkeys(keys, PROJECTION_OPTIONS[0]))

    names = [n for pattern in NAMES[name] for n in expanded(pattern, spec.num_layers)]
    assert sorted(layout) == sorted(names)


@pytest.mark.parametrize("start", ["vision_tower.", "model.vision_tower.vision_model."])
def test_tower_of_gemma3_has_its_published_names(start: str, tmp_path: Path) -> None:
    make_checkpoint("gemma3", tmp_path)
    published = set(CanonicalTensors(resolve(tmp_path)).names)
    rename(tmp_path, lambda old: old.replace("vision_tower.vision_model.", start))

    assert set(CanonicalTensors(resolve(tmp_path)).names) == published


def test_names_are_those_of_checkpoints() -> None:
    assert {*NAMES} <= {*ALL, *MAPPED}
