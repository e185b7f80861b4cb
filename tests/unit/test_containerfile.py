"""The image of the server: what its file and its page name exists."""

import json
import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from exl2flow.cli.main import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## In a container\n")[2].partition("\n## ")[0]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instruction(name: str) -> str:
    """Return what follows the last instruction of a name."""
    return re.findall(rf"^{name} (.*)$", TEXT, re.MULTILINE)[-1]


def test_the_page_builds_from_a_file_that_there_is() -> None:
    (named,) = re.findall(r"docker build .*-f (\S+) \.", SECTION)

    assert (ROOT / named).is_file()
    assert f"](../../{named})" in SECTION


def test_arguments_of_the_build_exist_and_name_extras() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", TEXT, re.MULTILINE))
    given = re.findall(r"--build-arg (\w+)=(\w+)", SECTION)

    assert given
    assert {name for name, _ in given} <= defaults.keys()
    for extra in (*defaults.values(), *(value for _, value in given)):
        assert PROJECT["project"]["optional-dependencies"][extra]


def test_the_command_is_one_and_has_its_options() -> None:
    program, command, folder, *options = json.loads(instruction("ENTRYPOINT"))
    options += re.findall(r"exl2flow-serve (--[a-z-]+)", SECTION)

    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout

    assert program in PROJECT["project"]["scripts"]
    assert f":{folder}:ro" in SECTION
    assert {"--host", "--keys"} <= set(options)
    assert all(option in shown for option in options if option.startswith("--"))


def test_the_health_check_is_a_program_that_asks_the_port() -> None:
    python, flag, program = json.loads(instruction("HEALTHCHECK").partition(" CMD ")[2])

    compile(program, "HEALTHCHECK", "exec")
    assert (python, flag) == ("python", "-c")
    assert f":{instruction('EXPOSE')}/health" in program
    assert f":{instruction('EXPOSE')}" in SECTION


def test_the_wheel_is_made_of_what_the_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    needed = {*PROJECT["tool"]["setuptools"]["package-dir"].values(), "README.md", "LICENSE"}

    assert not needed & set(ignored)
    assert {".git", ".venv*"} <= set(ignored)
