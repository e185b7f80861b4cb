"""What is news: the first look at a repository or an author, and later ones."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

from exl2flow.flows.watch import WatchConfig
from exl2flow.tasks.revisions import Revision

OLD, NEW, OTHER = (
    Revision(repo_id=repo_id, revision=character * 40)
    for repo_id, character in (("Org/old", "a"), ("Org/new", "b"), ("other/one", "c"))
)
Look = Callable[..., list[Revision]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """A function that runs the flow while the Hub has these commits, without a server."""
    module = import_module("exl2flow.flows.watch")
    announced: list[Revision] = []
    monkeypatch.setattr(module, "logged", nullcontext)
    monkeypatch.setattr(module, "announce", announced.extend)

    def run(*there: Revision, **values: object) -> list[Revision]:
        monkeypatch.setattr(module, "newest_revisions", lambda *_: list(there))
        before = len(announced)
        config = WatchConfig.model_validate({"work_root": tmp_path, **values})
        found: list[Revision] = module.watch.fn(config)
        assert found == announced[before:]
        return found

    return run


def test_a_new_repository_of_a_watched_author_is_announced(look: Look) -> None:
    assert look(OLD, authors=["org"]) == []
    assert look(OLD, NEW, authors=["org"]) == [NEW]
    assert look(OLD, NEW, authors=["org"]) == []


def test_the_first_repository_of_an_author_is_announced(look: Look) -> None:
    assert look(authors=["org"]) == []
    assert look(NEW, authors=["org"]) == [NEW]


def test_the_first_look_at_each_author_or_repository_only_remembers(look: Look) -> None:
    assert look(OLD, authors=["org"]) == []
    assert look(OLD, OTHER, authors=["org", "other"]) == []
    assert look(OLD, NEW, OTHER, authors=["org", "other"]) == [NEW]


def test_a_repository_that_is_named_is_only_remembered_at_first(look: Look) -> None:
    assert look(OLD, repositories=["Org/old"]) == []
    assert look(OLD, NEW, repositories=["Org/old", "Org/new"]) == []


def test_what_exists_is_announced_on_request(look: Look) -> None:
    assert look(OLD, OTHER, authors=["org"], include_existing=True) == [OLD, OTHER]
