"""The rules that keep runs going: what they wait for, and how a newer version is recognized."""

from pathlib import Path

import pytest
import yaml
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.server.schemas.states import StateType

from exl2flow.flows.server import deployments
from exl2flow.flows.server.deployments import RULES, rules
from exl2flow.flows.server.reminders import EVENTS
from exl2flow.flows.server.services import HEARTBEAT_SECONDS

PREFIX = "prefect.flow-run."
TAKEN = {"Pending", "Submitting", "InfrastructurePending"}


def trigger_after(event: str) -> EventTrigger:
    [trigger] = [
        automation.trigger
        for automation in rules()
        if isinstance(automation.trigger, EventTrigger)
        and f"{PREFIX}{event}" in automation.trigger.after
    ]
    return trigger


def test_rule_waits_anew_for_the_begin_of_a_run_with_each_state_that_a_worker_sets() -> None:
    trigger = trigger_after("Submitting")

    taken = {PREFIX + name for name in TAKEN}
    assert trigger.after == taken | {EVENTS[StateType.PENDING]}
    assert trigger.after & trigger.expect == taken
    assert not any("*" in event for event in trigger.expect)
    assert trigger.posture == Posture.Proactive
    assert {PREFIX + name for name in ("Running", "heartbeat", "Crashed")} <= trigger.expect


def test_run_is_lost_after_three_heartbeats() -> None:
    assert trigger_after("heartbeat").within.total_seconds() == 3 * HEARTBEAT_SECONDS


def test_rules_know_all_reminders() -> None:
    triggers = [rule.trigger for rule in rules() if isinstance(rule.trigger, EventTrigger)]

    known = {event for trigger in triggers for event in trigger.after | trigger.expect}
    assert {event for event in known if not event.startswith(PREFIX)} == set(EVENTS.values())


def test_states_that_rules_give_are_those_that_other_rules_wait_for() -> None:
    given = [a for rule in rules() for a in rule.actions if isinstance(a, ChangeFlowRunState)]
    names = [action.name for action in given]
    assert names == ["Crashed", "Requeued", "Failed", "AwaitingRetry", "Requeued"]
    for rule in rules():
        assert isinstance(rule.trigger, EventTrigger)
        assert rule.trigger.for_each == {"prefect.resource.id"}
        assert "prefect.tag.exl2flow" in str(rule.trigger.match_related)


def test_description_tells_a_changed_rule_from_that_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [rule.description for rule in rules()]
    content = yaml.safe_load(RULES.read_text())
    content[0]["trigger"]["within"] = 120
    changed = tmp_path / "automations.yaml"
    changed.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(deployments, "RULES", changed)

    now = [rule.description for rule in rules()]

    assert now[0] != before[0]
    assert now[1:] == before[1:]
