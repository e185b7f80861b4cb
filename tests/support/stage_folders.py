"""Folders of stages, as stages open and fill them."""

from typing import Any

from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.store import StageFolder, StageRef, WorkDir


def opened(work: WorkDir, ref: StageRef, *, device: str = "cpu") -> StageFolder:
    return work.open(ref, schema=1, inputs={"tokenize": "f"}, options={"bpw": 4}, device=device)


def commit(folder: StageFolder, name: str, text: str, **how: Any) -> None:
    write_text(folder.path / name, text)
    folder.commit(name, digest(folder.path / name), **how)
