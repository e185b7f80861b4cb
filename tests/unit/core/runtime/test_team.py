"""Followers answer, tell and fail; one that is lost ends all of them."""

from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from toy_follower import ToyFollower

from exl2flow.core.errors import ConfigError, Exl2FlowError, InferenceError, OutOfDeviceMemory
from exl2flow.core.runtime.following import Follower
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.runtime.team import Team, error_of, failure_of

CPU = torch.device("cpu")


class ToyTeam(Team[WorkRanks]):
    """Followers that run `toy_follower`."""

    program, again, remedy = "toy_follower", "ask again", "ask for less"

    def meet(self, method: str) -> WorkRanks:
        return WorkRanks.join(method, 0, len(self.devices), ["cpu"] * len(self.devices))


@pytest.fixture(scope="module")
def team() -> Iterator[ToyTeam]:
    made = ToyTeam([CPU] * 3)
    made.use()()
    yield made
    made.close()


def test_answers_come_by_rank(team: ToyTeam) -> None:
    assert team.begin("twice", 4)() == [(1, 8), (2, 8)]


def test_what_a_follower_cannot_do_is_raised_and_it_lives_on(team: ToyTeam) -> None:
    with pytest.raises(ConfigError, match="not this"):
        team.begin("refuse")()
    with pytest.raises(InferenceError, match=r"rank 1 failed with `KeyError`: 'what'"):
        team.begin("stumble")()
    with pytest.raises(OutOfDeviceMemory, match="left on `cpu` for rank 1; ask for less"):
        team.begin("exhaust")()

    assert team.begin("twice", 1)() == [(1, 2), (2, 2)]


def test_what_followers_tell_unasked_is_heard(team: ToyTeam) -> None:
    heard = SimpleQueue[tuple[int, str, Any]]()
    team.hear(lambda *told: heard.put(told))

    team.begin("say", ["a", 1])()

    found = sorted(heard.get(timeout=60) for _ in range(2))
    assert found == [(1, "said", ["a", 1]), (2, "said", ["a", 1])]


def test_a_follower_that_ends_ends_the_team() -> None:
    team = ToyTeam([CPU] * 2)
    team.use()()
    ends = "rank 1 of 2 ended with status 3; ask again"

    with pytest.raises(InferenceError, match=ends):
        team.begin("end")()

    with pytest.raises(InferenceError, match=ends):
        team.begin("twice", 1)
    assert team.failure is not team.failure  # each raise holds its own frames


def test_an_error_in_the_listener_ends_the_team() -> None:
    team = ToyTeam([CPU] * 2)

    def refuse(rank: int, kind: str, content: Any) -> None:
        raise ConfigError(f"nobody expects `{kind}`")

    team.hear(refuse)
    with suppress(Exl2FlowError):
        team.begin("say", 1)()

    with pytest.raises(ConfigError, match="nobody expects `said`"):
        team.begin("twice", 1)()


def test_errors_keep_their_class_between_processes() -> None:
    out_of_memory = failure_of(torch.OutOfMemoryError("full"), 1, CPU, "less")

    assert isinstance(error_of(*out_of_memory), OutOfDeviceMemory)
    assert isinstance(error_of(*failure_of(ConfigError("so"), 1, CPU, "less")), ConfigError)
    assert type(error_of("os", "words")) is InferenceError
    assert str(error_of("Exl2FlowError", "words")) == "words"


def test_a_follower_takes_its_device() -> None:
    follower = ToyFollower(1)
    assert isinstance(follower, Follower)

    follower.use(["cpu", "cpu"])

    assert follower.device == CPU
    assert follower.objects[0] is follower
