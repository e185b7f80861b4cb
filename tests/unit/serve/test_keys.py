"""Keys of a file that changes, their limits, and turns that are fair between them."""

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import wait_for
from serving import Served, serving
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.fair_queue import Admission, FairQueue
from exl2flow.serve.hosts.keys import Key, Keys, add_key, read_keys

FILE = """
[[key]]
name = "admin"
key = "secret-of-admin"
admin = true

[[key]]
name = "slow"
key = "secret-of-slow"
running = 1
waiting = 1
"""
ROW = '[[key]]\nname = "a"\nkey = "b"\n'
BODY = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "end_loops": False}


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """Write a file of keys."""
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ROW + ROW, r"\[\[key\]\] 2 in .*'a' is there before"),
        (ROW + ROW.replace('"a"', '"c"'), r"\[\[key\]\] 2 in .*is there before"),
        (ROW + "quota = 1\n", r"\[\[key\]\] 1 in .*`quota`"),
        (ROW + "running = 0\n", r"\[\[key\]\] 1 in .*`running`"),
        ('[[key]]\nname = "a"\n', "one of `key` and `sha256`"),
        (ROW + f'sha256 = "{"0" * 64}"\n', "one of `key` and `sha256`"),
        ('[[key]]\nname = "a"\nsha256 = "12"\n', "`sha256`"),
        ("[keys]\na = 1\n", r"`keys`; it takes tables \[\[key\]\]"),
        ("key = 1\n", r"`key`; it takes tables \[\[key\]\]"),
        ("", "`--new-key NAME` adds one"),
        ("[[key]\n", "cannot read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_keys(write(tmp_path / "keys.toml", text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(write(tmp_path / "keys.toml", ROW, mode))


def test_a_file_that_changes_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.toml", ROW)
    keys = Keys(path, "of-the-environment")
    assert (keys.find("b").name, keys.find("of-the-environment").is_admin) == ("a", True)

    for broken in ("[[key]\n", ROW + ROW):
        write(path, broken)
        keys.look()
        assert keys.find("b").name == "a"
    write(path, ROW, 0o644)
    keys.look()
    path.unlink()
    keys.look()
    keys.look()  # said once
    assert keys.find("b").name == "a"
    assert len([r for r in caplog.records if "stay as they were" in r.message]) == 4

    write(path, ROW.replace('"b"', '"c"'))
    keys.look()
    assert keys.find("c").name == "a"
    with pytest.raises(ApiError):
        keys.find("b")


def test_a_key_is_added_and_told_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    words = ["serve", "--keys", str(path), "--new-key", "editor"]
    plain = CliRunner().invoke(app, words).stdout
    again = add_key(path, "web ui")

    assert path.stat().st_mode & 0o777 == 0o600
    assert plain.strip() not in path.read_text()
    keys = Keys(path)
    assert [keys.find(text).name for text in (plain.strip(), again)] == ["editor", "web ui"]
    for name, told in (("editor", "choose another name"), ("a\nb", "is not a name of a key")):
        with pytest.raises(ConfigError, match=told):
            add_key(path, name)


async def run_queue(
    keys: list[Key], room: int, asked: list[tuple[int, int]], seed: int
) -> list[tuple[str, dict[str, int], set[str]]]:
    """Let requests (key, texts) enter at once; return who came, and what ran and waited then."""
    turns, came = FairQueue(room), list[tuple[str, dict[str, int], set[str]]]()
    source, running = random.Random(seed), list[Admission]()

    async def enter(key: Key, texts: int) -> None:
        turn = await turns.enter(key, texts, seconds=60)
        running.append(turn)

    advance = turns._advance

    def watched() -> None:
        before, waiting = Counter(turns.running), [*turns.waiting]
        advance()
        for turn in waiting:
            if turn not in turns.waiting:
                names = {one.key.name for one in turns.waiting}
                came.append((turn.key.name, dict(before), names))

    turns._advance = watched  # type: ignore[method-assign]
    tasks = [asyncio.ensure_future(enter(keys[k], texts)) for k, texts in asked]
    gone = 0
    while gone < len(asked):
        await asyncio.sleep(0)
        used, own = turns.running.total(), turns.running
        assert used <= room or len(running) == 1
        for key in keys:
            mine = [turn for turn in running if turn.key == key]
            assert key.running is None or own[key.name] <= key.running or len(mine) == 1
        if running:
            turns.leave(running.pop(source.randrange(len(running))))
            gone += 1
    await asyncio.gather(*tasks)
    assert not turns.waiting
    assert turns.running.total() == 0
    return came


@given(
    limits=st.lists(st.none() | st.integers(1, 3), min_size=1, max_size=3),
    room=st.integers(1, 5),
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=20),
    seed=st.integers(0, 99),
)
def test_all_turns_come_within_the_limits(
    limits: list[int | None], room: int, asked: list[tuple[int, int]], seed: int
) -> None:
    keys = [Key(str(i), running=limit, waiting=None) for i, limit in enumerate(limits)]
    asked = [(k % len(keys), texts) for k, texts in asked]
    came = asyncio.run(run_queue(keys, room, asked, seed))
    assert Counter(name for name, _, _ in came) == Counter(keys[k].name for k, _ in asked)


def test_many_requests_of_a_key_do_not_hold_another_up() -> None:
    many, few = Key("many", waiting=None), Key("few", waiting=None)
    came = asyncio.run(run_queue([many, few], 4, [(0, 1)] * 20 + [(1, 1)] * 3, 0))
    order = [name for name, _, _ in came]
    assert order[:4] == ["many"] * 4
    assert {*order[4:8]} >= {"few"}
    assert order.index("few") == 4
    assert order[4:10].count("few") == 3


def test_who_leaves_or_waits_too_long_is_forgotten() -> None:
    async def run() -> None:
        turns, key = FairQueue(1), Key("a", waiting=2)
        first = await turns.enter(key, 1, seconds=1)
        leaving = asyncio.ensure_future(turns.enter(key, 1, seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="no turn in 0 s") as late:
            await turns.enter(key, 1, seconds=0.01)
        assert (late.value.status, late.value.headers) == (503, {"retry-after": "1"})
        staying = asyncio.ensure_future(turns.enter(key, 9, seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests of 'a' wait") as refused:
            await turns.enter(key, 1, seconds=60)
        assert refused.value.status == 429
        leaving.cancel()
        await asyncio.sleep(0)
        turns.leave(first)
        turns.leave(await staying)
        assert not turns.waiting
        assert turns.running.total() == 0

    asyncio.run(run())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("keys") / "keys.toml", FILE)


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    with serving("--keys", str(path), "--isolate", "--slots", "4") as server:
        yield server


def of(name: str) -> dict[str, str]:
    """Return the header of a key."""
    return {"authorization": f"Bearer secret-of-{name}"}


def test_only_admins_change_what_is_loaded(served: Served) -> None:
    with served.http() as client:
        for name, status in (("slow", 403), ("admin", 404)):
            body = {"name": "nothing"}
            answer = client.post("/v1/model/load", json=body, headers=of(name))
            assert answer.status_code == status
        headers = {"x-admin-key": "secret-of-admin"}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_key_has_its_limits(served: Served) -> None:
    """One of its requests runs and one waits; of three, whichever came last is refused."""
    answers = list[httpx.Response]()

    def ask() -> None:
        url = f"{served.url}/v1/completions"
        answers.append(httpx.post(url, json=BODY, headers=of("slow"), timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: served.status(**of("admin"))["running"] == 2, pause=0.01)
    body = BODY | {"max_tokens": 1}
    with served.http() as client:
        third = client.post("/v1/completions", json=body, headers=of("slow"))
        other = client.post("/v1/completions", json=body, headers=of("admin"))
    for thread in threads:
        thread.join()

    *others, refused = sorted([*answers, third], key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in (*others, other, refused)] == [200, 200, 200, 429]
    assert int(refused.headers["retry-after"]) >= 1
    assert "of 'slow' wait" in refused.json()["error"]["message"]


def test_keys_share_no_cached_prompts(served: Served) -> None:
    text = "The sea was calm, and the ferry left in time. " * 60
    cached = list[int]()
    with served.http() as client:
        for name in ("slow", "slow", "admin"):
            body = {"prompt": text, "max_tokens": 1}
            answer = client.post("/v1/completions", json=body, headers=of(name)).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert max(cached[0], cached[2]) < 10  # of other requests of the key: how they begin
    assert cached[1] > 500


def test_keys_come_and_go_while_the_server_runs(served: Served, path: Path) -> None:
    """The last test."""
    with served.http() as client:
        assert client.get("/v1/models", headers=of("new")).status_code == 401
        new = write(path.with_name("new"), FILE.replace("slow", "new"))
        os.replace(new, path)
        assert client.get("/v1/models", headers=of("new")).status_code == 200
        assert client.get("/v1/models", headers=of("slow")).status_code == 401
        write(path, "no TOML")
        assert client.get("/v1/models", headers=of("new")).status_code == 200
    assert any("keys stay as they were" in line for line in served.lines)
    assert not any("secret-of" in line for line in served.lines)
    assert json.dumps("new")[1:-1] in " ".join(served.lines)
