"""What ends jobs against their will: the device, callbacks that raise, refusals, other threads."""

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from small_pages import is_empty

from exl2flow.core.errors import ConfigError, InferenceError, OutOfDeviceMemory
from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings

GREEDY = SamplingSettings.greedy()
FAILURE = RuntimeError("CUDA error: an illegal memory access\nwas encountered")


def request(i: int, **more: object) -> Request:
    given = {"max_new_tokens": 12, "settings": GREEDY, "stops": (), "tag": i, **more}
    return Request((5, 6, 7 + i), **given)


def drive(generator: Generator) -> None:
    """Step until all jobs have ended, or should have."""
    for _ in range(40):
        if not generator.is_idle:
            generator.step()


def break_device(generator: Generator, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def broken(*given: object, **named: object) -> None:
        raise FAILURE

    for name in names:
        monkeypatch.setattr(generator._device_slots, name, broken)


@pytest.mark.parametrize("broken", [("forward",), ("forward", "leave"), ("leave",), ("read",)])
def test_a_failure_ends_every_job_once_and_the_generator_for_good(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    generator, events = Generator(model, tokens=2048, slots=2), list[Event]()
    for i in range(4):  # two of them wait
        generator.submit(request(i), deliver=events.append)
    if broken != ("read",):
        generator.step()
    break_device(generator, monkeypatch, *broken)

    drive(generator)
    later = generator.step()

    last = [event for event in events if event.reason]
    assert sorted(event.tag for event in last) == [0, 1, 2, 3]
    assert {event.error for event in last} == {generator.failure} == {FAILURE}
    assert all(event.statistics is not None for event in last)
    assert later == []
    assert is_empty(generator)
    with pytest.raises(InferenceError, match="failed: CUDA error: an illegal memory access; make"):
        generator.submit(request(5))


def test_a_job_that_is_submitted_while_the_generator_fails_is_refused(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, events = Generator(model, tokens=2048, slots=2), list[Event]()
    break_device(generator, monkeypatch, "read")
    generator.submit(request(0), deliver=events.append)
    check = generator._device_slots.sampler.check

    def fails_meanwhile(settings: SamplingSettings) -> None:
        generator.step()
        check(settings)

    monkeypatch.setattr(generator._device_slots.sampler, "check", fails_meanwhile)

    with pytest.raises(InferenceError, match="the generator has failed"):
        generator.submit(request(1), deliver=events.append)
    assert [event.tag for event in events if event.reason] == [0]
    assert generator.is_idle


def test_a_generator_that_has_failed_does_nothing_on_the_device(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(model, tokens=2048, slots=2)
    generator.submit(request(0))
    break_device(generator, monkeypatch, "forward")
    drive(generator)

    for call in (lambda: generator.states.hidden((5, 6)), generator.warmup):
        with pytest.raises(InferenceError, match="failed: CUDA error: an illegal memory access; "):
            call()


def raising(at: int | None) -> tuple[Callable[[Event], None], list[Event]]:
    """Return a callback that raises at one event, or at all of them, and what it is given."""
    seen = list[Event]()

    def deliver(event: Event) -> None:
        seen.append(event)
        if at is None or len(seen) == at:
            raise ValueError("of the callback")

    return deliver, seen


@pytest.mark.parametrize("at", [1, 2, 3, None])
def test_a_callback_that_raises_ends_its_own_job_and_is_logged(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, at: int | None
) -> None:
    generator, others = Generator(model, tokens=2048, slots=4), list[Event]()
    deliver, seen = raising(at)
    generator.submit(request(0), deliver=deliver)
    for i in (1, 2):
        generator.submit(request(i), deliver=others.append)

    with caplog.at_level(logging.ERROR):
        drive(generator)

    assert [event.reason for event in seen] == [None] * (at or 1) + ["error"]
    assert str(seen[-1].error) == "of the callback"
    assert [event.reason for event in others if event.reason] == ["max_new_tokens"] * 2
    assert generator.failure is None
    assert is_empty(generator)
    assert "of the callback" in caplog.text


def test_a_callback_that_raises_keeps_nobody_from_hearing_of_a_failure(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator, others = Generator(model, tokens=2048, slots=4), list[Event]()
    generator.submit(request(0), deliver=raising(None)[0])
    generator.submit(request(1), deliver=others.append)
    break_device(generator, monkeypatch, "read")

    generator.step()

    assert [event.error for event in others if event.reason] == [FAILURE]
    assert "of the callback" in caplog.text


def test_a_refused_request_takes_those_before_it_along(model: LoadedModel) -> None:
    generator = Generator(model, tokens=2048, slots=4)

    with pytest.raises(InferenceError, match="id 999999"):
        generator.generate([(5, 6), (7, 8), (5, 999_999)], max_new_tokens=500)

    assert is_empty(generator)


def test_another_thread_may_submit_while_the_queue_is_looked_at(model: LoadedModel) -> None:
    generator = Generator(model, tokens=2048, slots=1)
    ended = generator.submit(request(0))

    class Watched:
        @property
        def is_done(self) -> bool:
            thread = threading.Thread(target=generator._scheduler.add, args=(ended,))
            thread.start()
            thread.join()
            return True

    ended.is_done = True
    generator._scheduler.add(Watched())

    assert generator.is_idle
    assert generator._scheduler.all() == []
    assert len(generator._scheduler._waiting) == 4


@pytest.mark.parametrize("seed", ["x", 1.5, True])
def test_seed_that_is_no_integer_is_refused(model: LoadedModel, seed: object) -> None:
    with pytest.raises(ConfigError, match=r"`seed` is .*; it must be an integer"):
        Generator(model, tokens=256, slots=1).generate("a", seed=seed)


class Panic(BaseException):
    """As extensions in Rust raise it."""


FEW = OutOfDeviceMemory, "no memory is left for what a text's settings, filters or adapters need"


@pytest.mark.parametrize(
    "more",
    [
        {"settings": SamplingSettings(token_bias=((40, 2.0),))},
        {"settings": SamplingSettings(dry_multiplier=1.0, dry_breakers=(5,))},
        {"settings": SamplingSettings(dry_multiplier=1.0)},
        {"settings": SamplingSettings(xtc_probability=0.5, top_k=50)},
        {"settings": SamplingSettings(typical=0.5)},
        {"min_new_tokens": 4, "stops": (7,)},
        {"excluded": (9,)},
    ],
    ids=("bias", "breakers", "dry", "xtc", "typical", "minimum", "excluded"),
)
def test_a_text_that_finds_no_memory_for_its_settings_ends_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    generator, mine, others = Generator(model, tokens=2048, slots=2), list[Event](), list[Event]()
    sampler = generator._device_slots.sampler

    def no_memory(name: str) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name}")

    monkeypatch.setattr(sampler, "late", no_memory)
    generator.submit(request(0, max_new_tokens=8), deliver=others.append)
    generator.step()
    generator.submit(request(1, **more), deliver=mine.append)

    drive(generator)

    assert [type(event.error) for event in mine if event.reason] == [FEW[0]]
    assert FEW[1] in str(mine[-1].error)
    assert [event.reason for event in others if event.reason] == ["max_new_tokens"]
    assert generator.failure is None
    assert is_empty(generator)


def test_a_prompt_is_read_once_more_if_memory_ends_in_a_pass_over_several(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, read = Generator(model, tokens=2048, slots=2), list[int]()
    plain = generator._device_slots.read

    def first_fails(ids: list[int], *given: object, **named: object) -> torch.Tensor:
        read.append(len(ids))
        if len(read) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(ids, *given, **named)

    prompts = [(5, 6, 7), (8, 9, 10, 11)]
    options = {"max_new_tokens": 8, "settings": GREEDY, "stops": ()}
    expected = Generator(model, tokens=2048, slots=2).generate(prompts, **options)
    monkeypatch.setattr(generator._device_slots, "read", first_fails)

    assert generator.generate(prompts, **options) == expected
    assert read == [5, 2, 3]


def test_a_panic_in_a_step_ends_all_texts_with_an_error(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, events = Generator(model, tokens=2048, slots=2), list[Event]()
    generator.submit(request(0), deliver=events.append)

    def panics(*given: object, **named: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(generator._device_slots, "forward", panics)
    drive(generator)

    assert isinstance(events[-1].error, InferenceError)
    assert events[-1].error is generator.failure
    assert "failed with `Panic`: index out of bounds" in str(generator.failure)
    assert isinstance(generator.failure.__cause__, Panic)


@pytest.mark.parametrize("where", ["hook", "callback"])
def test_a_panic_in_what_a_text_brings_along_ends_that_text(model: LoadedModel, where: str) -> None:
    generator, others, mine = Generator(model, tokens=2048, slots=2), list[Event](), list[Event]()

    def panics(seen: object) -> None:
        raise Panic("of this text")

    def deliver(event: Event) -> None:
        mine.append(event)
        if where == "callback":
            panics(event)

    generator.submit(request(0), deliver=others.append)
    hooks = (panics,) if where == "hook" else ()
    generator.submit(request(1, hooks=hooks), deliver=deliver)
    drive(generator)

    assert isinstance(mine[-1].error, InferenceError)
    assert "`Panic`: of this text" in str(mine[-1].error)
    assert [event.reason for event in others if event.reason] == ["max_new_tokens"]
    assert generator.failure is None


def test_a_panic_while_a_request_is_prepared_refuses_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(model, tokens=2048, slots=2)

    def panics(*given: object) -> None:
        raise Panic("of the encoder")

    monkeypatch.setattr(generator, "_check", panics)

    with pytest.raises(InferenceError, match="`Panic`: of the encoder"):
        generator.submit(request(0))
    assert is_empty(generator)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_is_no_failure_of_the_generator(
    model: LoadedModel, error: type[BaseException]
) -> None:
    generator = Generator(model, tokens=2048, slots=2)

    def ends(seen: object) -> None:
        raise error

    with pytest.raises(error):
        generator.generate([(5, 6)], max_new_tokens=3, hooks=(ends,))

    assert generator.failure is None
    assert generator.generate([(5, 6)], max_new_tokens=3)
