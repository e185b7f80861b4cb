"""Completes one prompt or a file of prompts; its imports take seconds."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from exl2flow.cli.output.console import emit_json, json_line, printable, say
from exl2flow.cli.work.loading import filters_of, load, load_draft, prompt_cache, read_text
from exl2flow.core.errors import ConfigError, Exl2FlowError
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.images import refuse_images
from exl2flow.core.requests.request import Request
from exl2flow.core.store.files import naming
from exl2flow.engine import Adapter, Generator
from exl2flow.engine.generate.prompt import encoded

# what a line of a file of prompts may hold besides `prompt`
OF_A_LINE = ("max_new_tokens", "min_new_tokens", "seed", "stops", "banned_strings", "heal")


def _common(options: GenerationOptions, settings: SamplingSettings) -> dict[str, Any]:
    return {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens,
        "settings": settings,
        "seed": secrets.randbelow(2**31) if options.seed is None else options.seed,
        "banned_strings": options.ban,
        "heal": options.heal,
        "add_bos": not options.no_bos,
        "encode_special": options.special,
        "decode_special": options.special,
        "end_loops": options.end_loops,
        "prefer_end": options.prefer_end,
    }


def _generator(
    model: Path, options: GenerationOptions, requests: list[Request]
) -> tuple[Generator, list[Request]]:
    """Load the model, which says where texts end; a cache for one prompt is as small as it can."""
    filters = filters_of(options)
    slots, keep = options.slots if options.prompts else 1, prompt_cache(options)
    loaded = load(model, options, slots=slots, tokens=options.tokens)
    draft = load_draft(options, loaded)
    adapters = [Adapter.load(folder, loaded) for folder in options.lora]
    ends = () if options.ignore_eos else loaded.tokenizer.eos_token_ids
    stops: tuple[int | str, ...] = (*ends, *options.stop)
    requests = [
        replace(
            request,
            stops=stops if request.stops is None else request.stops,
            filters=filters,
            adapters=adapters,
        )
        for request in requests
    ]
    tokens, slots = options.tokens, options.slots
    if options.prompts is None:
        slots, longest = len(requests[0].prompts), loaded.max_tokens
        prompt, each = encoded(requests[0], loaded.tokenizer), Generator.page_tokens
        tokens = tokens or each * prompt.pages(min(options.max_new_tokens, longest), each)
    generator = Generator(
        loaded, cache=options.cache, tokens=tokens, slots=slots, draft=draft, keep=keep
    )
    return generator, requests


def complete(
    model: Path,
    prompt: str,
    options: GenerationOptions,
    settings: SamplingSettings,
    *,
    as_json: bool,
) -> None:
    """Print a prompt that is not refused, and its continuation as it comes."""
    pair = prompt if options.negative_prompt is None else (prompt, options.negative_prompt)
    asked = Request(pair, **_common(options, settings))
    generator, [request] = _generator(model, options, [asked])
    text, ids, is_begun = "", list[int](), False
    try:
        for event in generator.stream(request):
            ids += event.ids
            text += event.text
            if not as_json:
                sys.stdout.write(printable(event.text if is_begun else prompt + event.text))
                sys.stdout.flush()
                is_begun = True
    finally:  # what follows, an error or the last line, begins on a line of its own
        sys.stdout.write("\n" * is_begun)
        generator.close()
    counts = event.statistics
    assert counts is not None
    seconds = counts.prompt_seconds + counts.text_seconds
    speed = counts.new_tokens / seconds if seconds else 0.0
    if as_json:
        emit_json(
            {
                "seed": request.seed,
                "prompt": prompt,
                "text": text,
                "tokens": ids,
                "reason": event.reason,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(speed, 2),
                "drafted_tokens": counts.drafted_tokens,
                "accepted_tokens": counts.accepted_tokens,
                "drafts": {kind: [*pair] for kind, pair in counts.drafts.items()},
                "steps": counts.steps,
            }
        )
        return
    kinds = (f"{made} of {n} by {kind}" for kind, (n, made) in counts.drafts.items())
    drafted = f", draft tokens accepted: {', '.join(kinds)}"
    drafted += f", {counts.tokens_per_step:.2f} tokens a step"
    say(
        f"{len(ids)} tokens in {seconds:.1f} s, {speed:.1f} tokens/s, stopped by {event.reason}, "
        f"seed {request.seed}{drafted if counts.drafts else ''}",
        style="dim",
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where a line is, and its object; raises `ConfigError` for none, or an image."""
    # only "\n" ends a line: strings of JSON may hold other separators, such as U+2028
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of `{path}`"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
        if isinstance(value, dict):
            refuse_images({**value, "tag": None}, where)
        if not isinstance(value, dict) or "prompt" not in value:
            raise ConfigError(f"{where} is not an object with a `prompt`")
        if unknown := [key for key in value if key not in ("prompt", "tag", *OF_A_LINE)]:
            raise ConfigError(
                f"{where} has `{unknown[0]}`; it may have `prompt`, `tag`, "
                + ", ".join(f"`{name}`" for name in OF_A_LINE)
            )
        prompt = value["prompt"]
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            value["prompt"] = tuple(prompt)  # JSON has no other form of a pair
        yield where, value


def complete_all(model: Path, options: GenerationOptions, settings: SamplingSettings) -> None:
    """Write the answers to all prompts, each as soon as it ends; one that fails stops no other.

    Raises:
        ConfigError: a line is not a request; it is named.
        Exception: what ended the generator, and with it all prompts without an answer.
    """
    assert options.prompts is not None
    common, lines, requests = _common(options, settings), [], []
    for index, (where, line) in enumerate(_lines(options.prompts)):
        fields = {**common, "seed": common["seed"] + index, **line, "tag": index}
        try:
            requests.append(Request(**fields))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        lines.append(line)
    generator, requests = _generator(model, options, requests)
    texts = [""] * len(requests)
    tokens = failed = 0
    with ExitStack() as stack:
        stack.enter_context(closing(generator))
        out: TextIO = sys.stdout
        if options.out is not None:
            with naming(options.out):
                out = stack.enter_context(options.out.open("w", encoding="utf-8"))

        def answer(index: int, **more: object) -> None:
            line = lines[index]
            head = {"index": index, "tag": line.get("tag"), "prompt": line["prompt"]}
            out.write(json_line({**head, "seed": requests[index].seed, **more}) + "\n")
            out.flush()

        for index, request in enumerate(requests):
            try:
                generator.submit(request)
            except Exl2FlowError as error:
                failed += 1
                answer(index, text="", reason="error", error=str(error))
        while not generator.is_idle:
            for event in generator.step():
                assert isinstance(event.tag, int)
                texts[event.tag] += event.text
                if event.reason is None:
                    continue
                assert event.statistics is not None
                tokens += event.statistics.new_tokens
                failed += event.error is not None
                more = {} if event.error is None else {"error": str(event.error)}
                answer(event.tag, text=texts[event.tag], reason=event.reason, **more)
    say(
        f"{len(requests)} prompts, {tokens} tokens, {failed} failed, seed {common['seed']}",
        style="dim",
    )
    if generator.failure is not None:
        raise generator.failure
