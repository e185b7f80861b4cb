"""The body of `exl2flow fits`: what fits a GPU, and what to type; its imports take seconds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

import torch

from exl2flow.cli.output.console import emit_json, say, show, tell
from exl2flow.cli.output.tables import plan_table, table_of
from exl2flow.core import words
from exl2flow.core.errors import (
    BudgetUnreachable,
    ConfigError,
    SourceModelError,
    TensorShapeError,
)
from exl2flow.core.model_name import HubName
from exl2flow.core.options.groups import FitOptions
from exl2flow.core.reports import Json
from exl2flow.core.runtime.memory import total_memory
from exl2flow.model.memory.on_card import OnCard
from exl2flow.pipeline.fits import Candidate, Found, found_in, found_on_hub, on_card
from exl2flow.pipeline.hub.client import Hub

SMALLEST_CACHE = "q4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A bitrate beside a GPU. size: bytes of all files; command: what to type for it."""

    name: str
    label: str
    bits: float | None
    size: int
    card: OnCard
    command: str

    def in_words(self) -> Mapping[str, str]:
        """Return column → cell."""
        card, plan, needs = self.card, self.card.plan, self.card.plan.needs
        return {
            "model": self.label,
            "bits": words.fixed(self.bits, 2),
            "files": words.size(self.size),
            "weights": words.size(plan.weights - plan.host),
            "cache": words.size(needs.cache),
            "all else": words.size(needs.total - needs.cache),
            "sum": words.size(plan.total),
            "fits": "yes" if card.fits else "no",
            "most tokens": f"{card.most_tokens:,}" if card.most_tokens else words.UNKNOWN,
        }

    def to_json(self) -> Json:
        """Return the row with sizes in bytes."""
        card, plan, needs = self.card, self.card.plan, asdict(self.card.plan.needs)
        return {
            "name": self.name,
            "bits": self.bits,
            "size": self.size,
            "weights": plan.weights,
            "host": plan.host,
            **{part: needs[part] for part in ("cache", "layout", "work", "device")},
            "total": plan.total,
            "fits": card.fits,
            "most_tokens": card.most_tokens,
            "command": self.command,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What `--fit` makes of a model to convert."""

    bpw: float
    size: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAnswer:
    """What of a model fits. problem: why nothing does, and what would help; empty: something fits.

    largest: only of a model to convert.
    """

    model: str
    rows: Sequence[Row]
    problem: str = ""
    largest: Largest | None = None


def memory_here() -> int:
    """Return the bytes of this machine's first GPU.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("no GPU here to take the memory of; give that of a card: `--memory 24GB`")
    return int(total_memory(torch.device("cuda:0")))


def show_fits(model: HubName | Path, wanted: FitOptions, *, as_json: bool) -> None:
    """Print what of a model fits a GPU.

    Raises:
        BudgetUnreachable: nothing fits, which is printed all the same.
        HubError, SourceModelError: the model does not exist, or is not supported.
        ConfigError: the context exceeds the model's positions.
    """
    with _found(model) as found:
        answer = _answer(str(model), found, wanted)
    if as_json:
        emit_json(_to_json(answer, wanted))
    else:
        _print(answer)
    if answer.problem:
        raise BudgetUnreachable(answer.problem)


def _found(model: HubName | Path) -> AbstractContextManager[Found]:
    if isinstance(model, HubName):
        return found_on_hub(model, Hub.open(), say=lambda line: say(line, style="dim"))
    return nullcontext(found_in(model))


def _answer(model: str, found: Found, wanted: FitOptions) -> CardAnswer:
    if found.source is not None:
        return _of_conversions(model, found.source, wanted)
    rows = [_existing(one, wanted) for one in found.exl2]
    if any(row.card.fits for row in rows):
        return CardAnswer(model=model, rows=rows)
    small = [on_card(one, _with_small_cache(wanted)) for one in found.exl2]
    return CardAnswer(model=model, rows=rows, problem=_nothing_fits(rows, small))


def _with_small_cache(wanted: FitOptions) -> FitOptions:
    return wanted.model_copy(update={"cache": SMALLEST_CACHE})


def _existing(model: Candidate, wanted: FitOptions) -> Row:
    card = on_card(model, wanted)
    return Row(
        name=model.typed,
        label=model.label,
        bits=model.bits,
        size=model.size,
        card=card,
        command=f"exl2flow chat {quote(model.typed)} --cache {wanted.cache} "
        f"--max-tokens {card.plan.needs.context}",
    )


def _of_conversions(model: str, source: Candidate, wanted: FitOptions) -> CardAnswer:
    """Return what conversions would make; this needs the extra `convert`."""
    from exl2flow.quant.forecast.outputs import largest_output, outputs

    typed, own = quote(source.typed), Path(source.typed.partition("@")[0]).resolve().name

    def convert(end: str, target: str) -> str:
        return f"exl2flow convert {typed} --out {quote(f'./{own}-{end}')} {target}"

    try:
        made = [*outputs(source.folder, wanted)]
    except TensorShapeError:  # a list of lines, each of which says what is wrong
        raise
    except SourceModelError as error:
        error.args = (f"`{source.typed}` is no EXL2 model and cannot be converted: {error}",)
        raise
    rows = [
        Row(
            name=source.typed,
            label=f"{one.bpw} bpw",
            bits=one.bpw,
            size=one.size,
            card=one.card,
            command=convert(f"{one.bpw}bpw", f"--bpw {one.bpw}"),
        )
        for one in made
    ]
    try:
        fit = largest_output(source.folder, wanted)
    except BudgetUnreachable:
        small = [one.card for one in outputs(source.folder, _with_small_cache(wanted))]
        return CardAnswer(model=model, rows=rows, problem=_nothing_fits(rows, small))
    memory = _typed_size(int(wanted.memory))
    target = f"--fit {memory} --context {fit.needs.context} --cache {wanted.cache}"
    command = convert(memory, target)
    largest = Largest(bpw=fit.bpw, size=fit.weights, command=command)
    return CardAnswer(model=model, rows=rows, largest=largest)


def _nothing_fits(rows: Sequence[Row], small: Sequence[OnCard]) -> str:
    """Return what the smallest model takes, and what would suffice for it.

    Args:
        rows: at least one.
        small: the same models with the smallest cache.
    """
    least = min(rows, key=lambda row: row.card.plan.total)
    card, needs = least.card, least.card.plan.needs
    ways = [f"`--memory {words.size_to_ask_for(card.plan.total)}`"]
    if card.most_tokens:
        ways.append(f"`--context {card.most_tokens}`")
    if any(one.fits for one in small):
        ways.append(f"`--cache {SMALLEST_CACHE}`")
    is_made = len(rows) > 1 and len({row.name for row in rows}) == 1  # all of one source
    what = f"`{least.name}`" + f" at {least.label}" * is_made
    return (
        f"nothing fits {words.size(card.memory)}: the smallest model, {what}, takes "
        f"{words.size(card.plan.total)}, of which the {needs.cache_format} cache of "
        f"{needs.context:,} tokens {words.size(needs.cache)}; use {' or '.join(ways)}"
    )


def _typed_size(count: int) -> str:
    """Return a size as an option takes it, rounded down to a tenth of its unit: `24GB`."""
    name, width = words.unit(count)
    return f"{math.floor(10 * count / width) / 10:g}{name}"


def _print(answer: CardAnswer) -> None:
    show(table_of([row.in_words() for row in answer.rows]))
    show(plan_table([*_notes(answer.rows[0].card)]))
    fitting = [row.command for row in answer.rows if row.card.fits]
    if answer.largest is not None:
        fitting.append(answer.largest.command)
    if fitting:
        tell("\nwhat to type", style="bold")
    for command in fitting:
        tell(f"  {command}")
    if answer.largest is not None:
        size = words.size(answer.largest.size)
        tell(f"the last makes the largest that fits: {size}, about {answer.largest.bpw:.2f} bpw")


def _notes(card: OnCard) -> Iterator[tuple[str, str]]:
    """Yield what the columns are made of."""
    needs = card.plan.needs
    yield "memory", words.size(card.memory)
    if card.plan.host:
        yield "embedding", f"{words.size(card.plan.host)} of the files, in host memory"
    yield "cache", f"{needs.cache_format}, {needs.context:,} tokens"
    parts = ((needs.layout, "laid out"), (needs.work, "work"), (needs.device, "device"))
    yield "all else", ", ".join(f"{words.size(count)} {what}" for count, what in parts)
    yield "most tokens", "of cache that fit beside the weights, in pages of 256"


def _to_json(answer: CardAnswer, wanted: FitOptions) -> Json:
    largest = answer.largest
    return {
        "model": answer.model,
        "memory": int(wanted.memory),
        "context": answer.rows[0].card.plan.needs.context,
        "cache": wanted.cache,
        "fits": not answer.problem,
        "models": [row.to_json() for row in answer.rows],
        "largest": None if largest is None else asdict(largest),
    }
