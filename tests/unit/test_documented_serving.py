"""The pages about the server name every field, alias, metric and status, and their code runs."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml
from serving import serving

from exl2flow.cli.options.layers import layered
from exl2flow.core.options.serving import ServeOptions
from exl2flow.serve.answers.fields import ALIASES, HARMLESS, ChatBody, CompletionBody
from exl2flow.serve.apis.sections import checked
from exl2flow.serve.errors import TYPES
from exl2flow.serve.hosts.keys import read_keys
from exl2flow.serve.hosts.metrics import TABLE
from exl2flow.serve.hosts.reloading import RELOADED, TABLES

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "docs" / "reference" / "agents-http.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
TABBY = (ROOT / "docs" / "how-to" / "coming-from-tabbyapi.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([a-z0-9_]+)`")
FIELDS = {*ChatBody.model_fields, *CompletionBody.model_fields, *HARMLESS}
NAMES = {*FIELDS, *(alias for names in ALIASES.values() for alias in names)}


def part(heading: str, page: str = REFERENCE) -> str:
    """Return a section of a reference."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def block(language: str, index: int = 0) -> str:
    """Return a block of a language in the how-to."""
    return HOW_TO.split(f"```{language}\n")[index + 1].partition("```")[0]


def test_every_field_and_alias_is_in_the_reference() -> None:
    assert NAMES - {*CODE.findall(part("Fields")), *CODE.findall(AGENTS)} == set()


def test_aliases_stand_beside_their_field() -> None:
    rows = [line for line in part("Fields").splitlines() if line.startswith("| `")]
    for field, aliases in ALIASES.items():
        [row, *_] = [r for r in rows if field in CODE.findall(r.split("|")[1])]
        assert {*aliases} <= {*CODE.findall(row)}, field


def test_every_status_and_type_is_in_the_reference() -> None:
    rows = part("Errors")
    for status, kind in TYPES.items():
        assert re.search(rf"^\| [\d, ]*\b{status}\b[\d, ]* \| `{kind}`", rows, re.MULTILINE), status


def test_keys_of_the_page_are_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(block("toml"), encoding="utf-8")
    (tmp_path / "keys.toml").chmod(0o600)

    assert [key.name for key in read_keys(tmp_path / "keys.toml")] == ["editor", "webui"]


def test_the_configuration_of_the_page_is_one(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(block("toml", 1), encoding="utf-8")

    found = checked(layered(ServeOptions, {}, path=path, prefix="-", of="serve"), path)

    assert (found.slots, found.defaults["temperature"]) == (32, 0.7)
    assert all(f"`{name}`" in HOW_TO for name in RELOADED - TABLES)
    assert all(f"`[{name}]`" in HOW_TO for name in TABLES - {"aliases"})


@pytest.fixture(scope="module")
def metrics_and_text() -> tuple[str, str, str]:
    with serving("--format", "chatml", "--max-answer", "20") as served:
        text, out = block("python"), io.StringIO()
        assert "http://127.0.0.1:5000/v1" in text
        with redirect_stdout(out):
            exec(text.replace("http://127.0.0.1:5000", served.url), {})
        with served.http() as client:
            told = client.get("/metrics").text, out.getvalue(), client.get("/v1/status").text
    return told


def test_the_program_of_the_page_prints_an_answer(metrics_and_text: tuple[str, str, str]) -> None:
    assert metrics_and_text[1].strip()


def test_metrics_of_the_page_are_those_of_the_server(
    metrics_and_text: tuple[str, str, str],
) -> None:
    families = re.findall(r"^# TYPE exl2flow_(\w+) (\w+)", metrics_and_text[0], re.MULTILINE)
    labels = TABLE["counters"]
    found = {
        name: (kind, labels.get(name.removesuffix("_total"), []))
        for name, kind in families
        if not name.endswith("_created")
    }

    rows = [
        row.split("|")[1:4] for row in part("Metrics", METRICS).splitlines() if "| `" in row[:3]
    ]
    assert {
        CODE.findall(name)[0]: (kind.strip(), CODE.findall(more)) for name, kind, more in rows
    } == found


def test_queries_and_configuration_of_the_page_name_what_is_there() -> None:
    [config] = re.findall(r"```yaml\n(.*?)```", METRICS, re.DOTALL)
    [queries] = re.findall(r"```promql\n(.*?)```", METRICS, re.DOTALL)
    known = {row.partition("`")[0] for row in part("Metrics", METRICS).split("\n| `")[1:]}

    named = re.findall(r"exl2flow_(\w+?)(?:_bucket)?[\[{]", queries)
    assert len(named) == 6
    assert {*named} <= known
    assert [*yaml.safe_load(config)] == ["scrape_configs"]


def test_fields_of_the_status_are_on_the_page(metrics_and_text: tuple[str, str, str]) -> None:
    status = json.loads(metrics_and_text[2])
    found = {*status, *(f"cache.{name}" for name in status["cache"])} - {"cache"}
    rows = [row.split("|")[1] for row in part("Status", METRICS).splitlines() if "| `" in row[:3]]

    assert {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)} == found


def test_fields_of_tabbyapi_that_work_are_fields() -> None:
    rows = [row.split("|") for row in TABBY.splitlines() if row.count("|") == 4]
    used = [
        name for _, names, _, here, _ in rows if " used" in here for name in CODE.findall(names)
    ]

    assert len(used) > 40
    assert {*used} <= NAMES
