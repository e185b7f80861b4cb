"""The plan that the tutorial shows is the one that its command prints."""

from pathlib import Path

import pytest

from exl2flow.core.options.config import ConversionConfig
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "convert-your-first-model.md"


def test_tutorial_shows_the_plan_of_its_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    command, _, rest = PAGE.read_text(encoding="utf-8").partition(" --dry-run\n```\n\n```\n")

    config = ConversionConfig(source="demo/model", out="demo-3bpw", bpw=3.0, device="cpu")
    plan = preflight(config, STAGES)

    assert command.endswith("convert demo/model --out demo-3bpw --bpw 3.0")
    shown = rest.partition("\n```")[0].splitlines()
    told = [f"{name:13}{value}".replace(str(tmp_path), "…") for name, value in plan.rows()]
    assert shown == told
