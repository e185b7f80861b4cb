"""The rules that keep runs going: what they wait for."""

from prefect.events.schemas.automations import EventTrigger, Posture

from exl2flow.flows.server.provision import STARTING, automations

PREFIX = "prefect.flow-run."


def test_no_rule_takes_what_a_worker_says_while_it_starts_a_run_for_its_begin() -> None:
    [trigger] = [
        automation.trigger
        for automation in automations()
        if isinstance(automation.trigger, EventTrigger)
        and f"{PREFIX}Submitting" in automation.trigger.after
    ]

    assert trigger.after == {PREFIX + name for name in STARTING}
    assert trigger.after.isdisjoint(trigger.expect)
    assert not any("*" in event for event in trigger.expect)
    assert trigger.posture == Posture.Proactive
    assert {PREFIX + name for name in ("Running", "heartbeat", "Crashed")} <= trigger.expect
