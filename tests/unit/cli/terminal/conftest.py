"""A chat on a tiny model, with a screen in memory in place of the terminal."""

from collections.abc import Callable
from pathlib import Path

import pytest
from screens import Screen as Terminal
from screens import Script
from tiny import make_tiny

from exl2flow.cli.terminal.commands import obey
from exl2flow.cli.terminal.loop import Chat
from exl2flow.cli.terminal.screen import Screen
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.chat import Session, all_formats
from exl2flow.inference import Generator, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator(load_model(folder, device="cpu"), slots=1)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal(100, 40)


@pytest.fixture
def chat(folder: Path, generator: Generator, terminal: Terminal, tmp_path: Path) -> Chat:
    session = Session(
        generator,
        all_formats()["raw"],
        system="Be brief.",
        seed=1,
        max_answer_tokens=6,
        settings=SamplingSettings(temperature=1.0),
    )
    return Chat(
        session=session,
        screen=Screen(terminal.console),
        model=folder,
        obey=obey,
        file=tmp_path / "kept.json",
        restart=lambda: Generator(generator.model, slots=1),
        typed=Script(),
    )


@pytest.fixture
def say(chat: Chat, terminal: Terminal) -> Callable[[str], str]:
    """Type a line, and return what is printed."""

    def typed(line: str) -> str:
        before = len(terminal.rows())
        chat.take(line)
        return "\n".join(terminal.rows()[before:]).strip("\n")

    return typed
