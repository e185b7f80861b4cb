"""Time the generator against recorded steps of the same rows and context.

    python benchmarks/generation.py MODE … [--model DIR | --shape 7b] [--cache fp16] [--device cuda]

Modes: overhead, mixed, admit, gap, prefix, sampler, fit, scattered, grammar, adapters, draft,
ngram, ties, jobs, batch, prepare; grammar, adapters, ngram, jobs, batch and prepare also run on a
CPU. Unless a model is given, one of random codes is written to a temporary folder. Texts end by
their number of tokens only.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from decode import add_model, model_of, seconds
from generation_drafts import draft, guessed, ngram
from generation_features import adapters, grammar
from generation_jobs import DEFAULT, GREEDY, prompt, request, stepped
from generation_prepare import prepare
from psutil import Process

from exl2flow.engine.cache.paged import PagedCache, cache_format, pages_of
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.sampling import Kind, SamplerSlots, sample
from exl2flow.inference import Draft, Generator, LoadedModel, Request, SamplingSettings, load_model
from exl2flow.kernels.cuda.graphs import CudaGraph
from exl2flow.model.memory.footprint import Footprint

MIXED = (GREEDY, DEFAULT, SamplingSettings(top_k=0, min_p=0.05), SamplingSettings(top_p=0.95))
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "top_a": 0.01,
    "min_p": 0.001,
    "tfs": 0.99,
    "typical": 0.99,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "skew": 0.1,
    "mirostat": True,
    "min_temp": 0.5,
    "max_temp": 1.5,
    "smoothing_factor": 0.2,
    "token_bias": ((5, 1.0),),
}


@torch.inference_mode()
def static(
    model: LoadedModel, rows: int, context: int, form: str, kind: Kind, *, shuffled: bool = False
) -> float:
    """Return the median seconds of a recorded step, nothing but replays on a full device."""
    device = torch.device("cuda")
    per_row = pages_of(context + 64)
    cache = PagedCache(
        model.spec, pages=rows * per_row, form=cache_format(form, device), device=device
    )
    steps = DeviceSlots(model, cache, slots=rows, max_tokens=context + 64)
    ids = prompt(context, model.spec.vocab_size, 0)
    pages = [*range(rows * per_row)]
    if shuffled:
        random.Random(0).shuffle(pages)
    for row in range(rows):
        steps.enter(row, pages[row * per_row : (row + 1) * per_row], ids, GREEDY, None)
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        steps.forward(rows)
        steps.positions.prepare([[0.5] * rows])
        steps.sample(rows, kind)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times[5:])


def overhead(model: LoadedModel, form: str) -> None:
    """Compare steps of 1, 16 and 64 jobs with their replays."""
    for jobs in (1, 16, 64):
        generator = Generator(model, cache=form, tokens=jobs * 512, slots=jobs)
        for seed in range(jobs):
            generator.submit(request(model, 32, 400, seed, settings=GREEDY))
        for _ in range(100):
            generator.step()
        found = stepped(generator, 100)
        del generator
        expected = static(model, jobs, 182, form, Kind.of([GREEDY]))
        print(
            f"| {jobs} jobs | {1e3 * found:.3f} ms | {1e3 * expected:.3f} ms "
            f"| {found / expected:.3f} |",
            flush=True,
        )


def mixed(model: LoadedModel, form: str) -> None:
    """Generate many texts of all lengths; count tokens while all slots are in use."""
    for jobs, slots in ((64, 16), (256, 64)):
        source = random.Random(1)
        generator = Generator(model, cache=form, tokens=slots * 1600, slots=slots)
        generator.warmup()
        for seed in range(jobs):
            tokens, new = source.randint(16, 1024), source.randint(64, 512)
            generator.submit(request(model, tokens, new, seed, settings=MIXED[seed % 4]))
        counts, decoding, whole, ended = 0, [], 0.0, 0
        waiting = jobs - slots
        context, reads = [], False
        while ended < waiting:  # later, slots stay empty
            begun = time.perf_counter()
            events = generator.step()
            taken = time.perf_counter() - begun
            new = sum(len(event.ids) for event in events)
            ended += sum(event.reason is not None for event in events)
            counts, whole = counts + new, whole + taken
            has_read, reads = reads, any(event.stage == "prompt" for event in events)
            if not reads and not has_read:  # the step after a pass waits for it
                decoding.append((taken, new))
            context.append(
                sum(
                    len(s.ids)
                    for s in (s for job in generator._scheduler.running for s in job.sequences)
                )
                / slots
            )
        del generator
        rate = sum(n for _, n in decoding) / sum(t for t, _ in decoding)
        step = static(model, slots, int(median(context)), form, Kind.of(MIXED))
        print(
            f"| {jobs} jobs in {slots} slots | {rate:.0f} tokens/s between prompts "
            f"| {slots / step:.0f} static | {rate * step / slots:.3f} "
            f"| {counts / whole:.0f} tokens/s with prompts |",
            flush=True,
        )


def admit(model: LoadedModel, form: str) -> None:
    """Submit 64 short prompts at once."""
    generator = Generator(model, cache=form, tokens=64 * 512, slots=64)
    times = []
    for trial in range(4):
        first = set[object]()
        begun = time.perf_counter()
        jobs = [
            generator.submit(request(model, 32, 8, 64 * trial + i, settings=GREEDY, tag=i))
            for i in range(64)
        ]
        while len(first) < 64:
            first |= {event.tag for event in generator.step() if event.ids}
        times.append(time.perf_counter() - begun)
        for job in jobs:
            job.cancel()
        generator.step()
    print(
        f"| 64 prompts of 32 tokens | all have a token in {median(times[1:]):.3f} s |", flush=True
    )


def gap(model: LoadedModel, form: str) -> None:
    """Read a long prompt while 15 jobs are decoded."""
    generator = Generator(model, cache=form, tokens=16 * 2048 + 16384, slots=16)
    for trial in range(2):
        jobs = [
            generator.submit(request(model, 32, 900, trial * 16 + i, settings=GREEDY))
            for i in range(15)
        ]
        for _ in range(40):
            generator.step()
        step = stepped(generator, 20)
        jobs.append(generator.submit(request(model, 16384 - 64, 32, 1000 + trial, tag="long")))
        waits, read = [], 0
        while read < 16384 - 66:
            begun = time.perf_counter()
            events = generator.step()
            waits.append(time.perf_counter() - begun)
            read = max([read, *(e.read for e in events if e.tag == "long")])
        for job in jobs:
            job.cancel()
        generator.step()
    print(
        f"| longest wait of 15 jobs | {1e3 * max(waits):.1f} ms | median with a pass "
        f"{1e3 * median(waits):.1f} ms | step {1e3 * step:.1f} ms | {len(waits)} passes |",
        flush=True,
    )


def prefix(model: LoadedModel, form: str) -> None:
    """Repeat a long prompt; read a common beginning once."""
    generator = Generator(model, cache=form, tokens=64 * 1536 + 16384, slots=64)
    for _ in range(2):
        steps, first = 0, False
        generator.submit(request(model, 8192, 4, 7, settings=GREEDY))
        begun = time.perf_counter()
        while not first:
            steps += 1
            first = any(event.ids for event in generator.step())
        taken = time.perf_counter() - begun
        while not generator.is_idle:
            generator.step()
    print(f"| 8,192 tokens seen before | first token in {steps} steps, {1e3 * taken:.1f} ms |")
    common = prompt(1000, model.spec.vocab_size, 11)
    last = []
    for i in range(64):
        ids = (*common, *prompt(20, model.spec.vocab_size, 100 + i))
        generator.submit(Request(ids, max_new_tokens=4, stops=(), settings=GREEDY))
    while not generator.is_idle:
        last += [e.statistics for e in generator.step() if e.statistics]
    read = sum(s.prompt_tokens - 1 - s.cached_tokens for s in last if s)
    print(
        f"| 64 prompts of 1,020, 1,000 in common | {read} tokens read (1,000 + 64 · 19 = 2,216) |"
    )


@torch.inference_mode()
def sampler(model: LoadedModel, form: str) -> None:
    """Time sampling alone, 16 rows of a vocabulary of 152k, as a recording."""
    width, rows = 152_064, 16
    logits = 3 * torch.randn(rows, width, device="cuda")
    draws = torch.rand(rows, dtype=torch.float64, device="cuda")
    plain = 0.0
    for name, settings in (
        ("greedy", GREEDY),
        ("default", DEFAULT),
        ("all steps, top-k 50", SamplingSettings(**EVERYTHING)),
        ("all steps, all candidates", SamplingSettings(top_k=0, **EVERYTHING)),
    ):
        slots = SamplerSlots(
            slots=rows, max_tokens=2048, vocab_size=width, width=width, device="cuda"
        )
        for row in range(rows):
            slots.enter(row, settings, prompt(1000, width, row))
        kind = Kind.of([settings])
        work = CudaGraph(partial(sample, logits, slots, draws, kind))
        taken = seconds(work.replay)
        plain = plain or taken
        print(f"| {name} | {1e3 * taken:.3f} ms | + {1e3 * (taken - plain):.3f} ms |", flush=True)


def fit(model: LoadedModel, form: str) -> None:
    """Fill 64 slots of 2,048 tokens; compare tensors with the forecast."""
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    generator = Generator(model, cache="q6", tokens=64 * 2048, slots=64)
    for seed in range(64):
        generator.submit(request(model, 1984, 64, seed, settings=DEFAULT))
    while not generator.is_idle:
        generator.step()
    found = torch.cuda.max_memory_allocated() - held
    needs = Footprint.of(model.spec, context=2048, cache_format="q6", sequences=64)
    expected = needs.cache + needs.work
    print(f"| 64 of 2,048, q6 | tensors {found / 1e9:.2f} GB | forecast {expected / 1e9:.2f} |")


def scattered(model: LoadedModel, form: str) -> None:
    """Compare steps on pages in random order with steps on adjacent ones."""
    for rows, context in ((1, 16_000), (16, 4_000)):
        kind = Kind.of([GREEDY])
        adjacent, shuffled = (
            min(static(model, rows, context, form, kind, shuffled=mixed) for _ in range(3))
            for mixed in (False, True)
        )
        print(
            f"| {rows} rows at {context} | {1e3 * adjacent:.3f} ms adjacent "
            f"| {1e3 * shuffled:.3f} ms scattered | {shuffled / adjacent:.3f} |",
            flush=True,
        )


def ties(model: LoadedModel, form: str) -> None:
    """Count tokens until a text alone and the same text among 63 others differ."""
    alone = Generator(model, cache=form, tokens=512, slots=1)
    among = Generator(model, cache=form, tokens=64 * 512, slots=64)
    for name, settings in (("greedy", GREEDY), ("default", DEFAULT)):
        wanted = [
            request(model, 8 + seed, 256, seed, settings=settings, tag=seed) for seed in range(64)
        ]
        ids: list[dict[object, list[int]]] = []
        for generator, groups in ((alone, [[r] for r in wanted]), (among, [wanted])):
            ids.append({r.tag: [] for r in wanted})
            for group in groups:
                for event in generator.stream(*group):
                    ids[-1][event.tag] += event.ids
        pairs = [(ids[0][r.tag], ids[1][r.tag]) for r in wanted]
        equal = [next((i for i, x in enumerate(a) if x != b[i]), len(a)) for a, b in pairs]
        differ = sum(a != b for a, b in pairs)
        print(f"| {name} | {differ} of 64 texts differ | {sum(equal)} tokens until there |")


def jobs(model: LoadedModel, form: str) -> None:
    """Run 10,000 jobs, a third cancelled, some failing; compare memory before and after."""

    def fail(_: object) -> None:
        raise ValueError("of a test")

    generator = Generator(model, cache=form, tokens=64 * 256, slots=32)
    generator.warmup()
    source = random.Random(0)
    held = []
    for _ in range(12):  # the first two thousand, of warming up, do not count
        made = []
        for seed in range(1000):
            tokens, new = source.randint(1, 40), source.randint(1, 12)
            hooks = [fail] if seed % 20 == 7 else []
            made.append(generator.submit(request(model, tokens, new, seed, hooks=hooks)))
        doomed = made[::3]
        while not generator.is_idle:
            generator.step()
            while doomed and source.random() < 0.6:
                doomed.pop(0).cancel()
        taken = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        held.append((Process().memory_info().rss, taken))
        assert generator.free_pages == generator.pages
    (host, device), (last_host, last_device) = held[1], held[-1]
    print(
        f"| 10,000 jobs | host + {(last_host - host) / 1e6:.1f} MB "
        f"| device + {(last_device - device) / 1e6:.1f} MB |"
    )


def batch(model: LoadedModel, form: str) -> None:
    """Compare eight texts at once with one."""
    rates = {}
    for rows in (1, 8, 1, 8):
        generator = Generator(model, tokens=rows * 512, slots=rows)
        for seed in range(rows):
            generator.submit(request(model, 32, 120, seed, settings=GREEDY))
        while any(event.stage != "text" for event in generator.step()):
            pass
        begun, count = time.perf_counter(), 0
        while not generator.is_idle:
            count += sum(len(event.ids) for event in generator.step())
        rate = count / (time.perf_counter() - begun)
        rates[rows] = max(rate, rates.get(rows, 0.0))
    print(f"| {rates[1]:.0f} tokens/s alone | {rates[8]:.0f} eight | {rates[8] / rates[1]:.2f} |")


MODES = {
    f.__name__: f
    for f in (
        overhead,
        mixed,
        admit,
        gap,
        prefix,
        sampler,
        fit,
        scattered,
        grammar,
        adapters,
        draft,
        ngram,
        ties,
        jobs,
        batch,
        prepare,
    )
}


def run(modes: Iterable[str], model: LoadedModel, form: str) -> None:
    """Print the rows of some modes."""
    for mode in modes:
        print(f"\n{mode}\n", flush=True)
        MODES[mode](model, form)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], metavar="MODE")
    add_model(parser)
    parser.add_argument("--draft", type=Path, help="compare texts with those that it drafts")
    parser.add_argument("--cache", default="fp16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-tokens", type=int, default=20480)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = model_of(arguments, Path(folder))
        model = load_model(source, device=arguments.device, max_tokens=arguments.max_tokens)
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}, {arguments.cache} cache")
        run(arguments.modes, model, arguments.cache)
        if arguments.draft is not None:
            other = load_model(arguments.draft, device=arguments.device)
            guessed(model, arguments.cache, Draft(model=other))


if __name__ == "__main__":
    main()
