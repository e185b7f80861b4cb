"""The program `exl2flow` in a fork of an interpreter that has imported it already."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = ("exl2flow.cli.main", "exl2flow.cli.work.loading", "exl2flow.serve.http.app")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*IMPORTED])


def start(words: Sequence[str], log: Path, env: Mapping[str, str]) -> BaseProcess:
    """Start `exl2flow` with these words in the folder of the log, which has all that it says."""
    log.touch()
    process = FORKS.Process(target=_be, args=(words, log, {**os.environ, **env}), daemon=True)
    with chdir(log.parent):  # also that of the first interpreter, whose libraries import `kernels`
        process.start()
    return process


def _be(words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["exl2flow", *words]
    sys.modules["exl2flow.cli.main"].main()  # type: ignore[attr-defined]  # the package has another
