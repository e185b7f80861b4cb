"""What speculative decoding brings with models of published shapes and random weights.

    python benchmarks/drafts.py [--shape qwen3.6-27b | --model DIR] [--modes replay round never]
        [--tokens 320] [--long 4096] [--cache fp16] [--bpw 4] [--layers N] [--device cuda]

replay: tokens per second with drafts of the model's own block (MTP) over those without. The block
does all its work; then its tokens are exchanged for ones that are right as often as published.
round: where the time of a step with drafts goes: block, model, sampling, and the rest of the wall.
copy: the same as `replay` while n-grams copy a prompt of 2,000 tokens, all of which is right.
never: what drafts cost where none is ever right.

By default all modes that the model allows, with few tokens on a CPU. Texts are greedy and end by
their number of tokens. Matrices are random codes of one width, also those of the block.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import torch
from allocations import Allocation, allocation_of, expert_of
from decode import add_model, model_of, random_matrix
from drafts_known import FIRST, Copying, Known, Replay, Text
from generation_jobs import GREEDY, prompt
from shapes import linears_of_block, plain_of_block

from exl2flow.core.store.files import write_tensors
from exl2flow.engine.cache.paged import cache_format, pages_of, reserve
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.drafts import Drafter
from exl2flow.engine.drafts.costs import StepCosts, step_tokens
from exl2flow.engine.drafts.mtp import MtpProposer, has_block
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.draft_positions import restored
from exl2flow.engine.generate.event import Statistics
from exl2flow.engine.sampling import Kind
from exl2flow.inference import (
    Generator,
    LoadedModel,
    Mtp,
    Request,
    load_model,
)
from exl2flow.inference.bench import seconds
from exl2flow.kernels import STEP_TOKENS, elapsed
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.model import resolve
from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.memory.footprint import exact_format

# probability that at least the first 1, 2, 3 and 4 draft tokens are right, of Qwen3.6-27B
RIGHT = {
    "without thinking": (0.91, 0.75, 0.61, 0.51),
    "with thinking": (0.73, 0.48, 0.30, 0.21),
}
SHORT, COPY = 64, 2000  # tokens of prompts
WARM_UP = 96  # tokens of a text that does not count
REPEATS = 4
SHARP = 30  # times as large logits of routers
NEED_BLOCK = "replay", "round"  # modes
COMPARED = """\
| shape | drafts | prompt | drafted a step | tokens a step | tokens/s | plain | ratio | same ids |
|---|---|---|---|---|---|---|---|---|"""


class Run(NamedTuple):
    """New ids of texts, tokens per second while all ran, and tokens and drafts of a step."""

    ids: list[list[int]]
    speed: float
    per_step: float
    drafted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the sizes of texts."""

    shape: str
    model: LoadedModel
    form: str | None
    tokens: int
    long: int
    drafts: list[int]

    @property
    def vocabulary(self) -> int:
        """Ids that are sampled: those of the tokenizer."""
        return min(self.model.spec.vocab_size, self.model.tokenizer.vocab_size)

    def prompts(self, count: int, tokens: int) -> list[Text]:
        """Return prompts, each with a first id of its own."""
        return [(FIRST + i, *prompt(tokens - 1, self.vocabulary, i)) for i in range(count)]

    def generator(self, slots: int, context: int, draft: Drafter | None = None) -> Generator:
        """Return a generator for `slots` texts of `context` tokens each."""
        pages = slots * pages_of(context + STEP_TOKENS)
        tokens = pages * Generator.page_tokens
        return Generator(self.model, cache=self.form, tokens=tokens, slots=slots, draft=draft)


def timed(generator: Generator, prompts: Sequence[Text], tokens: int) -> Run:
    """Generate texts, and time them from when all have begun until one ends."""
    texts: dict[object, list[int]] = {i: [] for i in range(len(prompts))}
    counts = list[Statistics]()
    marks = list[tuple[float, int]]()
    for i, ids in enumerate(prompts):
        generator.submit(Request(ids, max_new_tokens=tokens, stops=(), settings=GREEDY, tag=i))
    while not generator.is_idle:
        for event in generator.step():
            texts[event.tag] += event.ids
            counts += [] if event.statistics is None else [event.statistics]
        if all(texts.values()) and not counts:
            marks.append((time.perf_counter(), sum(map(len, texts.values()))))
    (begun, before), (ended, after) = marks[0], marks[-1]
    steps = sum(one.steps for one in counts)
    return Run(
        [*texts.values()],
        (after - before) / (ended - begun),
        sum(one.new_tokens for one in counts) / steps,
        sum(one.drafted_tokens for one in counts) / steps,
    )


def steady(
    generator: Generator,
    prompts: Sequence[Text],
    tokens: int,
    begin: Callable[[], None] = lambda: None,
) -> Run:
    """Time texts again until no step of them had to be recorded, after some to warm up."""
    graphs = generator._device_slots.graphs
    begin()
    timed(generator, prompts, min(WARM_UP, tokens))
    for _ in range(4):
        recorded = graphs.recorded
        begin()
        run = timed(generator, prompts, tokens)
        if graphs.recorded == recorded:
            break
    return run


@contextmanager
def fixed(most: int) -> Iterator[None]:
    """Let steps draft as much as may be; 0: as much as the engine finds worthwhile."""
    always = patch.object(StepCosts, "best", lambda _self, _slots, _kind, _rate, most: most)
    with always if most else nullcontext():
        yield


def replay(case: Case) -> None:
    """Compare drafts by the block with none, by acceptance and number."""
    print(
        "| shape | texts | prompt | accepted as | drafts | drafted a step | tokens a step ", end=""
    )
    print("| tokens/s | plain | ratio | same ids |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for texts, context in ((1, SHORT), (4, SHORT), (1, case.long)):
        prompts = case.prompts(texts, context)
        plain = steady(case.generator(texts, context + case.tokens), prompts, case.tokens)
        known = known_of(case, prompts, plain)
        for most in case.drafts if context == SHORT else [0]:
            for name, run in replayed(case, prompts, known, most):
                print(
                    f"| {case.shape} | {texts} | {context} | {name} | {most or 'chosen'} "
                    f"| {run.drafted:.2f} | {run.per_step:.2f} | {run.speed:.1f} "
                    f"| {plain.speed:.1f} | {run.speed / plain.speed:.2f} "
                    f"| {same(run.ids, plain.ids)} |",
                    flush=True,
                )


def known_of(case: Case, prompts: Sequence[Text], plain: Run) -> Known:
    """Return texts as they are without drafts."""
    texts = [(*ids, *new) for ids, new in zip(prompts, plain.ids, strict=True)]
    return Known(texts, case.vocabulary, case.model.decoder.placement.head)


def replayed(
    case: Case, prompts: Sequence[Text], known: Known, most: int
) -> Iterator[tuple[str, Run]]:
    """Yield runs by acceptance; most: draft tokens of each step, 0: the engine chooses."""
    draft = Replay(known=known, tokens=most) if most else Replay(known=known)
    with fixed(most):
        generator = case.generator(len(prompts), len(prompts[0]) + case.tokens, draft)
        for name, rates in RIGHT.items():
            yield name, steady(generator, prompts, case.tokens, partial(known.begin, rates))


def same(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Return whether texts are equal, or the first place where one differs."""
    pairs = zip(found, expected, strict=True)
    places = [i for a, b in pairs for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    return f"until {min(places)}" if places else "yes"


@torch.inference_mode()
def rounds(case: Case) -> None:
    """Compare parts of a step with all of it."""
    slots = step_slots(case, SHORT)
    print("| tokens of a step | model ms | of one token |\n|---|---|---|")
    counts = (1, 2, 3, 4, 5, 8, STEP_TOKENS)
    model = {count: device_ms(partial(forward, slots, count)) for count in counts}
    for count in counts:
        print(f"| {count} | {model[count]:.3f} | {model[count] / model[1]:.2f} |")
    prompts = case.prompts(1, SHORT)
    plain = steady(case.generator(1, SHORT + case.tokens), prompts, case.tokens)
    known = known_of(case, prompts, plain)
    print("\n| drafts | block ms | model ms | sampling ms | step ms | rest ms | block |")
    print("|---|---|---|---|---|---|---|")
    for drafts in range(5):
        run = plain if not drafts else next(replayed(case, prompts, known, drafts))[1]
        with restored(slots.sampler.active):
            parts = [
                device_ms(partial(chain, slots, drafts)) if drafts else 0.0,
                model[step_tokens(drafts, drafts)],
                device_ms(partial(sampled, slots, drafts, Kind.of([GREEDY]))),
            ]
        step = 1e3 * run.per_step / run.speed
        own = " | ".join(f"{part:.3f}" for part in parts)
        print(
            f"| {drafts} | {own} | {step:.3f} | {step - sum(parts):.3f} | {parts[0] / step:.1%} |",
            flush=True,
        )
    print(f"\n{device_ms(partial(chain, slots, 0)):.3f} ms of the block in steps without drafts")


def step_slots(case: Case, context: int) -> DeviceSlots:
    """Return a slot with a text."""
    model, device, room = case.model, case.model.decoder.placement.head, context + 1024
    cache = reserve(
        model.spec,
        pages=pages_of(room),
        form=cache_format(case.form or exact_format(device), device),
        placement=model.decoder.placement,
        slots=1,
    )
    draft = Mtp(tokens=STEP_TOKENS - 1)
    slots = DeviceSlots(model, cache, slots=1, max_tokens=room - STEP_TOKENS, draft=draft)
    ids, pages = case.prompts(1, context)[0], (*range(cache.pages),)
    slots.read(ids[:-1], [Segment(pages=pages, begin=0, end=context - 1, slot=0)])
    slots.enter(0, pages, ids, GREEDY, None)
    return slots


def forward(slots: DeviceSlots, count: int) -> None:
    """Run the model over a text's last tokens, after a step all of whose tokens were accepted."""
    slots.runner.forward(1, count)
    if slots.cache.states is not None:
        for states in slots.cache.states._all:
            states.behind.sub_(count)  # as many have to be applied to the states next


def chain(slots: DeviceSlots, drafts: int) -> None:
    """Draft behind a step all of whose draft tokens were right."""
    assert isinstance(slots.proposer, MtpProposer)
    key = 1, min(bucket(1 + drafts), STEP_TOKENS), drafts
    slots.graphs.replay(("mtp", *key), partial(slots.proposer._chain, *key))


def sampled(slots: DeviceSlots, drafts: int, kind: Kind) -> None:
    """Sample at all positions of a step."""
    for place in range(1 + drafts):
        slots.sample(1, kind, after_draft=place > 0)


def device_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds of work on the device, several times without a pause."""
    if not torch.cuda.is_available():
        return 1e3 * seconds(work, 3)
    seconds(work, 2)

    def repeated() -> None:
        for _ in range(10):
            work()

    return median(elapsed(repeated) for _ in range(5)) / 10


def copy(case: Case) -> None:
    """Compare n-grams that copy a long prompt with no drafts."""
    print(COMPARED)
    compared(case, "copies", COPY, 3 * case.tokens, lambda texts: Copying(texts=texts))


def never(case: Case) -> None:
    """Compare drafts that are never right with none."""
    print(COMPARED)
    wrong = partial(Copying, vocabulary=case.vocabulary, is_right=False)
    compared(case, "wrong n-grams", SHORT, 2 * case.tokens, lambda texts: wrong(texts=texts))
    if has_block(case.model):
        compared(case, "random block", SHORT, 2 * case.tokens, lambda _texts: Mtp())


def compared(
    case: Case,
    name: str,
    context: int,
    tokens: int,
    draft_of: Callable[[Mapping[int, Text]], Drafter],
) -> None:
    """Time a text with and without a draft in turn, whose acceptance begins anew each time."""
    prompts, room = case.prompts(1, context), context + tokens
    alone = case.generator(1, room)
    news = timed(alone, prompts, tokens).ids
    drafting = case.generator(1, room, draft_of({FIRST: (*prompts[0], *news[0])}))
    alone.warmup()
    drafting.warmup()
    steady(drafting, prompts, tokens // 2)
    pairs = [[timed(one, prompts, tokens) for one in (alone, drafting)] for _ in range(REPEATS)]
    plain, speed = (median(run.speed for run in runs) for runs in zip(*pairs, strict=True))
    last = pairs[-1][1]
    print(
        f"| {case.shape} | {name} | {context} | {last.drafted:.2f} | {last.per_step:.2f} "
        f"| {speed:.1f} | {plain:.1f} | {speed / plain:.3f} | {same(last.ids, news)} |",
        flush=True,
    )


def write_block(folder: Path, allocation: Allocation) -> None:
    """Write random codes of an MTP block beside a model's files, if models like it have one."""
    block = mtp_of(resolve(folder))
    if block is None:
        return
    tensors = plain_of_block(block)
    for p in linears_of_block(block):
        params = allocation.params(p.role, expert=expert_of(p))
        tensors |= random_matrix(p.out_features, p.in_features, params).to_tensors(p.key)
    write_tensors(folder / "block.safetensors", tensors)


def sharpen(model: LoadedModel) -> None:
    """Let each token have one expert that outweighs the others.

    Random routers tell the last experts that they choose from the next ones by less than noise, and
    texts would depend on how many tokens a step has; trained ones decide.
    """
    routers = [getattr(sublayer, "router", None) for sublayer in model.decoder.sublayers]
    weights = {one.weight.data_ptr(): one.weight for one in routers if one is not None}
    for weight in weights.values():
        weight.mul_(SHARP)


MODES = {"replay": replay, "round": rounds, "copy": copy, "never": never}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    parser.set_defaults(shape="tiny-mtp", uniform=True)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    on_gpu = torch.cuda.is_available()  # on a CPU this only shows that it runs
    parser.add_argument("--tokens", type=int, default=320 if on_gpu else 32, help="of a text")
    parser.add_argument("--long", type=int, default=4096 if on_gpu else 300, help="a prompt's")
    parser.add_argument("--drafts", type=int, nargs="+", default=range(5), help="0: as chosen")
    parser.add_argument("--cache")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = model_of(arguments, Path(folder))
        if arguments.model is None:
            write_block(source, allocation_of(arguments.bpw, arguments))
        most = max(arguments.long, COPY) + 3 * arguments.tokens + 512
        model = load_model(source, device=arguments.device, max_tokens=most)
        sharpen(model)
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}")
        case = Case(
            shape=source.name if arguments.model else arguments.shape,
            model=model,
            form=arguments.cache,
            tokens=arguments.tokens,
            long=arguments.long,
            drafts=arguments.drafts,
        )
        allowed = [mode for mode in MODES if mode not in NEED_BLOCK or has_block(model)]
        for mode in arguments.modes or allowed:
            begun = time.perf_counter()
            print(f"\n{mode}\n", flush=True)
            MODES[mode](case)
            print(f"\n{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
