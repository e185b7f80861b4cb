"""Shares of a stage that others make: the same bytes, told files, and refusals."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from stage_runs import calibrated_on, text_parquet
from tiny import make_tiny
from traces import contents

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.apart import CPU_KIND, ApartShare, work_apart
from exl2flow.core.store.crew import Errand
from exl2flow.core.store.stage import Pipeline
from exl2flow.pipeline.stages import MEASURE_STAGES

COUNT = 3


def measuring(folder: Path, **values: object) -> Pipeline:
    """Return a pipeline that is about to measure."""
    source = make_tiny("llama", folder / "model", num_hidden_layers=2)
    calibration = calibrated_on(text_parquet(folder / "text.parquet"), (4, 32), (2, 32))
    config = small_config(source, folder / "out", calibration=calibration, **values)
    pipeline = Pipeline(config, MEASURE_STAGES, device="cpu")
    for name in pipeline.stages:
        if name != "measure":
            pipeline.run(name, progress=silent)
    return pipeline


def share(rank: int, probe: Path) -> ApartShare:
    return ApartShare(rank=rank, count=COUNT, kind=CPU_KIND, probe=(probe, "seen"))


@pytest.mark.parametrize("kind", ["fisher", "error"])
def test_shares_are_what_one_process_makes(kind: str, tmp_path: Path) -> None:
    sensitivity = {"kind": kind, "rows": 2}
    alone = measuring(tmp_path / "alone", sensitivity=sensitivity)
    shared = measuring(tmp_path / "shared", sensitivity=sensitivity)
    found = list[list[tuple[str, Any]]]()

    def make(errand: Errand, stop: StopRequest) -> Iterator[tuple[str, Any]]:
        probe = errand.path / "probe"
        probe.write_text("seen")
        for rank in range(COUNT - 1):  # the last worker is lost
            own = share(rank, probe)
            work_apart(errand, own, "cpu")
            found.append(own.told())
            yield from found[-1]

    alone.run("measure", progress=silent)
    shared.share_out("measure", make)
    left = {content[0] for told in found for kind, content in told if kind == "commit"}
    shared.run("measure", progress=silent)
    shared.share_out("measure", make)  # of a complete stage nothing is made

    one, several = (contents(p.path("measure")) for p in (alone, shared))
    files = {name for name in one if name.startswith("sublayers")}
    assert 2 <= len(left) < len(files)
    assert len(found) == COUNT - 1
    assert {name: several[name] for name in files} == {name: one[name] for name in files}


def refused(check: ApartShare) -> str:
    with pytest.raises(ConfigError) as caught:
        check.check("cpu")
    return str(caught.value)


def test_a_host_without_the_work_root_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    assert "does not see" in refused(share(0, probe))
    probe.write_text("another one")
    assert "give it with `--work-root`" in refused(share(0, probe))
    probe.write_text("seen")
    share(0, probe).check("cpu")

    other = replace(share(0, probe), kind="a NVIDIA H200")

    assert "has a CPU, and this run a NVIDIA H200" in refused(other)
