"""Texts of several requests, generated together."""

from collections.abc import Sequence

from exl2flow.inference import Event, Generator, Request


def run(generator: Generator, wanted: Sequence[Request]) -> list[list[Event]]:
    """Return the events of each request; no page is left in use."""
    found = [list[Event]() for _ in wanted]
    for request, events in zip(wanted, found, strict=True):
        generator.submit(request, deliver=events.append)
    while not generator.is_idle:
        generator.step()
    assert generator.free_pages == generator.pages
    return found


def ids_of(events: list[Event]) -> list[int]:
    return [i for event in events for i in event.ids]
