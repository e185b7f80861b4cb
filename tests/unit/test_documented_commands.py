"""Commands, options, links and anchors that the pages name are there."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from starlette.testclient import TestClient

from exl2flow.cli.main import app
from exl2flow.flows import webhook

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "cli.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:a|img)[^>]* (?:href|src)=\"([^\"]+)\"")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
CALL = re.compile(  # but `createdb --owner exl2flow exl2flow`
    r"(?:^|[\s`$(|])(?<!--owner )exl2flow "
    r"((?:--debug |--version )?[a-z][^\n`|#;)]*|--[a-z-]+)"
)
ROW = re.compile(r"^\| `(--[a-z0-9-]+)", re.MULTILINE)
Options = frozenset[str]


@cache
def commands() -> dict[tuple[str, ...], Options]:
    """Return the options of every command, and of the program itself under no name."""
    found: dict[tuple[str, ...], Options] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        context = typer.Context(command)
        parameters = command.get_params(context)
        found[path] = frozenset(n for p in parameters for n in (*p.opts, *p.secondary_opts))
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))

    walk(typer.main.get_command(app), ())
    return found


def calls(text: str) -> Iterator[str]:
    """Yield what follows the program's name in code, commands over several lines joined."""
    joined = text.replace("\\\n", " ")
    code = [*FENCE.findall(joined), *CODE.findall(FENCE.sub("", joined))]
    for part in code:
        yield from CALL.findall(part)


def wrong_call(call: str) -> str | None:
    """Return what a call names that does not exist, if anything."""
    words, path = call.split(), tuple[str, ...]()
    while words and words[0].startswith("--") and words[0] in commands()[()]:
        words = words[1:]
    while words and (*path, words[0]) in commands():
        path, words = (*path, words[0]), words[1:]
    if words and words[0].startswith("--") and not path:
        return f"{words[0]} of the program"
    if not path:
        return None if not words or words[0] == "COMMAND" else f"command {words[0]}"
    if words and not words[0].startswith("-") and any(p[:-1] == path for p in commands()):
        return f"command {' '.join((*path, words[0]))}"
    given = OPTION.findall(" ".join(words).partition("  (")[0])
    return next((f"{o} of {' '.join(path)}" for o in given if o not in commands()[path]), None)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    result = set[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = (c for c in plain.lower() if c in " -_" or unicodedata.category(c)[0] in "LNM")
        name = "".join(kept).replace(" ", "-")
        result.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return result | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", page))


def broken_links(page: Path) -> set[str]:
    """Return the relative links of a page whose file or anchor is missing."""
    text, found = FENCE.sub("", page.read_text(encoding="utf-8")), set[str]()
    for link in {one or other for one, other in LINK.findall(text)}:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.add(link)
            continue
        known = {""} | (anchors(target.read_text(encoding="utf-8")) if anchor else set())
        if anchor not in known:
            found.add(link)
    return found


def sections() -> dict[str, str]:
    """Return the sections of the reference that describe a command, by its name."""
    parts = re.split(r"^## (\w+)\n", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = {path[0] for path in commands() if path}
    return {name: text.partition("\n## ")[0] for name, text in found.items() if name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_of_a_page_exist(page: Path) -> None:
    assert broken_links(page) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_on_a_page_exist(page: Path) -> None:
    found = {wrong_call(call) for call in calls(page.read_text(encoding="utf-8"))}

    assert found - {None} == set()


def test_pages_name_enough_commands_to_be_worth_a_walk() -> None:
    assert sum(len([*calls(page.read_text(encoding="utf-8"))]) for page in PAGES) > 100


def test_reference_lists_and_describes_every_command() -> None:
    names = {path[0] for path in commands() if path}
    listed = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\)", REFERENCE.read_text(), re.MULTILINE)

    assert {name for name, _ in listed} == names == set(sections())
    assert all(name == anchor for name, anchor in listed)


@pytest.mark.parametrize("command", sorted({path[0] for path in commands() if path}))
def test_options_in_the_tables_of_a_command_exist(command: str) -> None:
    known = set[str]().union(*(o for path, o in commands().items() if path[:1] == (command,)))

    assert set(ROW.findall(sections()[command])) - known == set()


@pytest.mark.parametrize("command", ["convert", "sweep", "publish", "clean", "why", "bench"])
def test_every_option_of_a_command_is_in_the_reference(command: str) -> None:
    named = set(OPTION.findall(REFERENCE.read_text(encoding="utf-8")))

    long = {option for option in commands()[command,] if option.startswith("--")}
    assert long - named - {"--help", "--help-all"} == set()


def test_the_message_that_a_page_sends_to_the_webhook_is_taken() -> None:
    page = (ROOT / "docs" / "how-to" / "run-a-server.md").read_text(encoding="utf-8")
    call = re.search(r'curl -H "(.*): \$EXL2FLOW_WEBHOOK_SECRET" \S+ -d \'(.*?)\'', page, re.DOTALL)
    assert call

    with pytest.MonkeyPatch.context() as patch, TestClient(webhook.receiver("agreed on")) as client:
        patch.setattr(webhook, "announce", lambda revisions: None)
        answer = client.post("/", content=call[2], headers={call[1]: "agreed on"})

    assert answer.json()["repo_id"] == "org/model"


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("convert a --out b --bpw 4", None),
        ("--debug convert a --out b", None),
        ("server status --json", None),
        ("COMMAND --help", None),
        ("convert a --bits 4", "--bits of convert"),
        ("frobnicate", "command frobnicate"),
        ("server sideways", "command server sideways"),
    ],
)
def test_what_is_missing_is_found(call: str, wrong: str | None) -> None:
    assert wrong_call(call) == wrong


def test_anchors_follow_the_rule_of_github() -> None:
    page = "# A `--b` c, d\n## Über x_y\n## Twice\n## Twice\n```\n# no heading\n```\n"

    assert anchors(page) == {"a---b-c-d", "über-x_y", "twice", "twice-1"}
