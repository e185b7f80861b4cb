"""The program `exl2flow` in a fork of an interpreter that has imported it already."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = ("exl2flow.cli.main", "exl2flow.cli.work.loading", "exl2flow.serve.http.app")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*IMPORTED])


def start(words: Sequence[str], log: Path, env: Mapping[str, str]) -> BaseProcess:
    """Start `exl2flow` with these words in the folder of the log, which has all that it says."""
    return call(_be, words, {**os.environ, **env}, log=log)


def call(work: Callable[..., object], *arguments: object, log: Path) -> BaseProcess:
    """Start a function of a module in the folder of the log, which has all that it says."""
    log.touch()
    process = FORKS.Process(target=_heard, args=(log, work, arguments), daemon=True)
    with chdir(log.parent):  # also that of the first interpreter, whose libraries import `kernels`
        process.start()
    return process


def _heard(log: Path, work: Callable[..., object], arguments: Sequence[object]) -> None:
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    work(*arguments)


def _be(words: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["exl2flow", *words]
    sys.modules["exl2flow.cli.main"].main()  # type: ignore[attr-defined]  # the package has another
