"""`exl2flow generate`: complete a prompt, printing the text as it comes, or a file of prompts."""

import json
import secrets
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from exl2flow.core.errors import ConfigError, Exl2FlowError
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.images import refuse_images
from exl2flow.core.requests.request import Request
from exl2flow.flows.cli.console import emit_json, json_line, printable, say
from exl2flow.flows.cli.loading import filters_of, load, load_draft, read_adapters, read_text
from exl2flow.flows.cli.options import ModelFolder, with_options

if TYPE_CHECKING:  # these import torch
    from exl2flow.inference import Event, Generator
    from exl2flow.inference.generate import Statistics

EXAMPLES = (
    "Examples:",
    "exl2flow generate ./Llama-3.2-1B-4.0bpw --prompt 'Once upon a time'",
    "exl2flow generate ./model --prompt 'The capital of France is' --greedy --max-new-tokens 8",
    "exl2flow generate ./model --prompt 'Dear Sir' --seed 1 --temperature 1 --min-p 0.1 --json",
    "exl2flow generate ./model --prompt 'A person: ' --json-schema person.json",
    "exl2flow generate ./model --prompt 'Once upon a time' --draft ./smaller-model",
    "exl2flow generate ./model --prompts prompts.jsonl --out answers.jsonl --slots 32 --cache q6",
)
# what a line of a file of prompts may hold besides `prompt`
OF_A_LINE = ("max_new_tokens", "min_new_tokens", "seed", "stops", "banned_strings", "heal")


@with_options()
def generate(
    model: ModelFolder,
    *,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object at the end, with the exact text; otherwise control "
            "characters are replaced.",
        ),
    ] = False,
    options: GenerationOptions,
    settings: SamplingSettings,
) -> None:
    """Generate text from a model. The prompt is plain text unless --special is given."""
    if (prompt is None) == (options.prompts is None):
        raise ConfigError("give either `--prompt` or `--prompts`")
    if options.prompts is None and options.out is not None:
        raise ConfigError("`--out` goes with `--prompts`")
    if prompt is None and (as_json or options.negative_prompt is not None):
        raise ConfigError("`--json` and `--negative-prompt` go with `--prompt`")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    common = _common(options, SamplingSettings.greedy() if options.greedy else settings)
    if prompt is not None:
        pair = prompt if options.negative_prompt is None else (prompt, options.negative_prompt)
        request = Request(pair, seed=seed, **common)
        _complete(model, options, request, as_json=as_json)
    else:
        assert options.prompts is not None
        _complete_all(model, options, [*_lines(options.prompts)], common, seed)


def _common(options: GenerationOptions, settings: SamplingSettings) -> dict[str, Any]:
    """Return what all requests share."""
    return {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens,
        "settings": settings,
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
) -> "tuple[Generator, list[Request]]":
    """Load the model, which says where texts end; a cache for one prompt is as small as it can."""
    from exl2flow.inference import Generator
    from exl2flow.inference.generate.prompt import encoded
    from exl2flow.kernels import PAGE_TOKENS

    filters = filters_of(
        json_schema=options.json_schema, regex=options.regex, grammar=options.grammar
    )
    loaded = load(model, options, slots=options.slots if options.prompts else 1)
    draft = load_draft(options, loaded)
    ends = () if options.ignore_eos else loaded.tokenizer.eos_token_ids
    stops: tuple[int | str, ...] = (*ends, *options.stop)
    common: dict[str, Any] = {
        "filters": filters,
        "adapters": read_adapters(loaded, options.lora),
    }
    requests = [replace(r, stops=stops if r.stops is None else r.stops, **common) for r in requests]
    tokens, slots = options.tokens, options.slots
    if options.prompts is None:
        slots, longest = len(requests[0].prompts), loaded.max_tokens
        needed = encoded(requests[0], loaded.tokenizer).pages(min(options.max_new_tokens, longest))
        tokens = tokens or needed * PAGE_TOKENS
    generator = Generator(loaded, cache=options.cache, tokens=tokens, slots=slots, draft=draft)
    return generator, requests


def _complete(model: Path, options: GenerationOptions, request: Request, *, as_json: bool) -> None:
    """Print a prompt that is not refused, and its continuation as it comes."""
    generator, [made] = _generator(model, options, [request])
    text, shown, is_begun = "", str(made.prompts[0]), False
    ids: list[int] = []
    try:
        for event in generator.stream(made):
            ids += event.ids
            text += event.text
            if not as_json:
                sys.stdout.write(printable(event.text if is_begun else shown + event.text))
                sys.stdout.flush()
                is_begun = True
    finally:  # what follows, an error or the last line, begins on a line of its own
        sys.stdout.write("\n" * is_begun)
    counts = event.statistics
    assert counts is not None
    seconds = counts.prompt_seconds + counts.text_seconds
    speed = counts.new_tokens / seconds if seconds else 0.0
    if as_json:
        emit_json(
            {
                "seed": made.seed,
                "prompt": shown,
                "text": text,
                "tokens": ids,
                "reason": event.reason,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(speed, 2),
                "drafted_tokens": counts.drafted_tokens,
                "accepted_tokens": counts.accepted_tokens,
            }
        )
        return
    say(
        f"{len(ids)} tokens in {seconds:.1f} s, {speed:.1f} tokens/s, "
        f"stopped by {event.reason}, seed {made.seed}{_guessed(counts)}",
        style="dim",
    )


def _guessed(counts: "Statistics") -> str:
    if not counts.drafted_tokens:
        return ""
    return f", {counts.accepted_tokens} of {counts.drafted_tokens} draft tokens accepted"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of prompts.

    Raises:
        ConfigError: naming the line that is none, or holds an image.
    """
    # only "\n" ends a line: strings of JSON may hold other separators, such as U+2028
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of `{path}` is no JSON: {error}") from error
        if isinstance(value, dict):
            refuse_images({**value, "tag": None}, f"line {number} of `{path}`")
        if not isinstance(value, dict) or "prompt" not in value:
            raise ConfigError(f"line {number} of `{path}` is no object with a `prompt`")
        if unknown := [key for key in value if key not in ("prompt", "tag", *OF_A_LINE)]:
            raise ConfigError(
                f"line {number} of `{path}` has `{unknown[0]}`; it may have `prompt`, `tag`, "
                + ", ".join(f"`{name}`" for name in OF_A_LINE)
            )
        prompt = value["prompt"]
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            value["prompt"] = tuple(prompt)  # JSON has no other form of a pair
        yield {**value, "line": f"line {number} of `{path}`"}


def _request(fields: dict[str, Any]) -> Request:
    """Build a request of a line.

    Raises:
        ConfigError: naming the line and the value.
    """
    where = fields.pop("line")
    try:
        return Request(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _complete_all(
    model: Path,
    options: GenerationOptions,
    lines: list[dict[str, Any]],
    common: dict[str, Any],
    seed: int,
) -> None:
    """Write the answers to all prompts, each as soon as it ends; one that fails stops no other.

    Raises:
        Exception: what ended the generator, and with it all prompts without an answer.
    """
    from exl2flow.core.store.files import naming  # imports torch

    requests = [
        _request({**common, "seed": seed + index, **line, "tag": index})
        for index, line in enumerate(lines)
    ]
    generator, made = _generator(model, options, requests)
    texts, events = [""] * len(made), deque["Event"]()
    tokens = failed = 0
    with ExitStack() as stack:
        out: TextIO = sys.stdout
        if options.out is not None:
            with naming(options.out):
                out = stack.enter_context(options.out.open("w", encoding="utf-8"))

        def answer(index: int, **more: object) -> None:
            line = lines[index]
            head = {"index": index, "tag": line.get("tag"), "prompt": line["prompt"]}
            out.write(json_line({**head, "seed": made[index].seed, **more}) + "\n")
            out.flush()

        for index, request in enumerate(made):
            try:
                generator.submit(request, deliver=events.append)
            except Exl2FlowError as error:
                failed += 1
                answer(index, text="", reason="error", error=str(error))
        while not generator.is_idle:
            generator.step()
            while events:
                event = events.popleft()
                assert isinstance(event.tag, int)
                texts[event.tag] += event.text
                if event.reason is None:
                    continue
                assert event.statistics is not None
                tokens += event.statistics.new_tokens
                failed += event.error is not None
                more = {} if event.error is None else {"error": str(event.error)}
                answer(event.tag, text=texts[event.tag], reason=event.reason, **more)
    say(f"{len(made)} prompts, {tokens} tokens, {failed} failed, seed {seed}", style="dim")
    if generator.failure is not None:
        raise generator.failure
