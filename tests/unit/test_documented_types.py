"""The programs on the pages have no errors in an editor, whichever type checker it runs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"^ *(from|import) exl2flow\b", re.MULTILINE)
ONCE_INSTALLED = '"exllamav2.'  # modules that exist while a program runs, after `install()`


def programs() -> dict[str, str]:
    """Return the programs of each page that use this package, joined in their order."""
    found = {
        re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix(""))): "\n".join(
            dedent(match[2]) for match in PROGRAM.finditer(page.read_text(encoding="utf-8"))
        )
        for page in PAGES
    }
    return {name: text for name, text in found.items() if OURS.search(text)}


def errors(folder: Path, texts: dict[str, str]) -> list[str]:
    """Return what pyright says of programs."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT / ".links")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, str(folder)]
    said = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    return [
        f"{Path(row['file']).name}:{row['range']['start']['line'] + 1}: {row['message']}"
        for row in json.loads(said.stdout)["generalDiagnostics"]
        if row["severity"] == "error" and ONCE_INSTALLED not in row["message"]
    ]


def fields_without_keyword(path: Path) -> list[int]:
    """Return the lines of calls `Field(default, …)`, whose default type checkers do not see."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [
        node.lineno
        for node in calls
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Field"
        and node.args
    ]


@pytest.mark.parametrize("folder", ["core", "flows"])
def test_type_checkers_see_every_default(folder: str) -> None:
    found = {path: fields_without_keyword(path) for path in (ROOT / folder).rglob("*.py")}

    assert {path: lines for path, lines in found.items() if lines} == {}


def test_pages_have_programs() -> None:
    assert {"README", "docs_reference_configuration", "docs_how_to_own_calibration_data"} <= {
        *programs()
    }


@pytest.mark.slow
def test_programs_on_pages_are_clean(tmp_path: Path) -> None:
    assert errors(tmp_path, programs()) == []


@pytest.mark.slow
def test_options_take_what_users_write_and_nothing_else(tmp_path: Path) -> None:
    """A path may be text, a size, too; a misspelt or a missing option is an error."""
    right = """
        from pathlib import Path
        from exl2flow.core.options.comparison import Comparison
        from exl2flow.core.options.config import ConversionConfig, FitOptions
        from exl2flow.core.options.validation import ValidateOptions
        from exl2flow.core.options.measure import MeasureConfig
        from exl2flow.core.options.publication import PublishConfig, PublishOptions
        from exl2flow.core.options.refine import RefinementConfig
        from exl2flow.core.options.sweep import SweepConfig
        from exl2flow.core.options.watch import WatchConfig
        from exl2flow.inference import Generator, SamplingSettings
        config = ConversionConfig(
            source="a", out=Path("b"), fit=FitOptions(memory="24GB"), max_memory="10GB",
            work_root="work", measurement="measured", publish=PublishOptions(repo="me/name"),
            validate_options=ValidateOptions(text="held-out.txt"),
        )
        folder: Path = config.out
        root: Path | None = config.work_root
        SweepConfig(source="a", out="b", bpw=[2.5, 3, 4])
        MeasureConfig(source="a", out="b")
        RefinementConfig(model="m", source="a", out="b")
        PublishConfig(models=["a", Path("b")], repo="me/name")
        Comparison(models=["a"], reference="b")
        WatchConfig(repositories=("org/name",), work_root="seen")
        def texts(generator: Generator) -> tuple[str, list[str]]:
            greedy = SamplingSettings.greedy()
            several = generator.generate(["a", [1, 2]], settings=greedy, stops=["b", 3], seed=1)
            return generator.generate("a", max_new_tokens=3), several
    """
    wrong = """
        from exl2flow.core.options.config import ConversionConfig
        from exl2flow.inference import Generator
        ConversionConfig(source="a")
        ConversionConfig(source=3, out="b")
        ConversionConfig(source="a", out="b", bits=4)
        def texts(generator: Generator) -> None:
            generator.generate("a", max_tokens=3)
            generator.generate("a", max_new_tokens="3")
    """
    found = errors(tmp_path, {"right": dedent(right), "wrong": dedent(wrong)})

    lines = {each.partition(": ")[0] for each in found}
    assert lines == {f"wrong.py:{line}" for line in (4, 5, 6, 8, 9)}
