"""Time what a server keeps: prompts in its cache and on disk, and models that replace each other.

    python benchmarks/serving_cache.py MODE … [--shape 7b | --model DIR] [--cache q6]

Modes: cached, disk, writing, swaps. The application runs in this process as in `serving.py`.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from decode import add_model, model_of
from generation_jobs import settle
from serving import Bench, clients, fill_vocabulary, served

from exl2flow.core.options.serving import ServeOptions
from exl2flow.inference import Generator, PromptCache, Request, load_model
from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models

TRIALS = 3  # of what takes little time


class CacheBench(Bench):
    """A model, how often it is replaced, and trials of what takes long."""

    swaps, trials = 50, 3


def cached(bench: CacheBench, folder: Path) -> None:
    """Time the first token behind 8,000 cached tokens, over HTTP."""
    host = bench.host(4, 32_000)
    text = bench.text(min(8_000, bench.model.max_tokens - 256))

    prompts = [bench.complete(16, 2) for _ in range(2 * TRIALS)]
    for asked in prompts:
        asked["body"]["prompt"] = f"{text} {asked['body']['prompt']}"
    [found] = served(host, lambda port: clients(port, [prompts]))
    times = [1e3 * answer["times"][0] for answer in found]
    tokens, rest = found[-1]["prompt"], " ".join(f"{t:.1f}" for t in times[1:])
    print("| prompt | first ms | cached: median ms | all |\n|---|---|---|---|")
    print(f"| {tokens} | {times[0]:.1f} | {median(times[2:]):.1f} | {rest} |", flush=True)


def _generator(bench: CacheBench, folder: Path | None, tokens: int) -> Generator:
    keep = None if folder is None else PromptCache(disk=folder, disk_size=100 * 10**9)
    generator = Generator(bench.model, cache=bench.form, tokens=tokens, slots=4, keep=keep)
    generator.warmup()  # as a server does when it starts
    return generator


def _first_token(generator: Generator, ids: list[int]) -> float:
    """Return the seconds to the first token of a prompt."""
    settle()
    begun = time.perf_counter()
    job = generator.submit(Request(ids, max_new_tokens=2, stops=()))
    while not any(event.ids for event in generator.step()):
        pass
    taken = time.perf_counter() - begun
    job.cancel()
    while not generator.is_idle:
        generator.step()
    return taken


def disk(bench: CacheBench, folder: Path) -> None:
    """Time the first token of a prompt of 32,000 tokens that is read, and one from disk."""
    count = min(32_000, bench.model.max_tokens - 64)
    ids = bench.model.tokenizer.encode(bench.text(count))[:count]
    read, kept = list[float](), list[float]()
    _first_token(_generator(bench, None, count + 1024), ids)  # compiles
    for trial in range(bench.trials):
        pages = folder / f"disk{trial}"
        writer = _generator(bench, pages, count + 1024)
        read.append(_first_token(writer, ids))
        writer.close()
        del writer
        torch.cuda.empty_cache()
        reader = _generator(bench, pages, count + 1024)
        kept.append(_first_token(reader, ids))
        size = sum(file.stat().st_size for file in pages.rglob("*.page"))
        del reader
        torch.cuda.empty_cache()
        shutil.rmtree(pages)
    print("| tokens | GB of pages | read ms | from disk ms | sooner |\n|---|---|---|---|---|")
    a, b = (1e3 * median(times) for times in (read, kept))
    print(f"| {len(ids)} | {size / 1e9:.2f} | {a:.0f} | {b:.0f} | {a / b:.1f} x |", flush=True)


def _rate(generator: Generator, bench: CacheBench) -> float:
    """Return the tokens per second of 3 texts while prompts of others push pages out."""
    new = min(bench.new, 60)  # each step reads a prompt, too
    texts = [generator.submit(_request(bench, 32, new)) for _ in range(3)]
    settle()
    begun, count, others = time.perf_counter(), 0, 0
    while any(not job.is_done for job in texts):
        if others == 0:
            generator.submit(_request(bench, 2000, 2, "other"))
            others = 1
        for event in generator.step():
            if event.tag == "other":
                others -= event.reason is not None
            else:
                count += len(event.ids)
    settle()
    rate = count / (time.perf_counter() - begun)
    while not generator.is_idle:
        generator.step()
    return rate


def _request(bench: CacheBench, prompt: int, new: int, tag: object = None) -> Request:
    prompt = min(prompt, bench.model.max_tokens // 2)
    ids = bench.model.tokenizer.encode(bench.text(prompt))[:prompt]
    return Request(ids, max_new_tokens=new, stops=(), tag=tag, end_loops=False)


def writing(bench: CacheBench, folder: Path) -> None:
    """Compare running texts while pages leave for the disk with the same without a disk."""
    rates: dict[str, list[float]] = {"none": [], "disk": []}
    generators = {
        name: _generator(bench, folder / "pages" if name == "disk" else None, 8192)
        for name in rates
    }
    for trial in range(bench.trials + 1):
        for name, generator in generators.items():
            rate = _rate(generator, bench)
            rates[name] += [rate] if trial else []  # the first one warms up
    plain, kept = (median(rates[name]) for name in ("none", "disk"))
    size = sum(file.stat().st_size for file in (folder / "pages").rglob("*.page")) / 1e9
    print("| tokens/s | with disk | ratio | GB written |\n|---|---|---|---|")
    print(f"| {plain:.0f} | {kept:.0f} | {kept / plain:.3f} | {size:.2f} |", flush=True)


def swaps(bench: CacheBench, folder: Path) -> None:
    """Let two models replace each other under load, and compare the device memory."""
    first = bench.model.spec.source_dir
    others = folder / "both"
    for name in ("one", "two"):
        shutil.copytree(first, others / name)
    options = ServeOptions(models=others, swap=True, slots=4, tool_grammar="off", swap_wait=5.0)
    device, limit = str(bench.model.decoder.placement.head), bench.model.max_tokens
    bench.model = None  # type: ignore[assignment]  # frees its memory

    def make(folder: Path) -> ModelHost:
        model = load_model(folder, device=device, max_tokens=limit)

        def generator() -> Generator:
            return Generator(model, cache=bench.form, tokens=8192, slots=4)

        host = ModelHost(model, generator, options, fmt=None, defaults={})
        host.start()
        return host

    async def text(models: Models, name: str) -> None:
        async with models.using(name) as host:
            request = Request([5, 6, 7], max_new_tokens=64, stops=(), tag=0, end_loops=False)
            plan = AnswerPlan(requests=(request,), prompts=(request.prompts[0],))
            answer = await host.begin(lambda: plan)
            try:
                async for _ in answer.updates():
                    pass
            finally:
                host.end(answer)

    async def run() -> tuple[list[int], float]:
        models, used = Models(make(others / "one"), make), list[int]()
        begun = time.perf_counter()
        for turn in range(bench.swaps):
            name = ("two", "one")[turn % 2]
            asked = [asyncio.create_task(text(models, name)) for _ in range(4)]
            await asyncio.sleep(0)
            asked[0].cancel()  # a client leaves while the model loads
            await asyncio.gather(*asked, return_exceptions=True)
            assert models.name == name
            used.append(_used(device))
        taken = (time.perf_counter() - begun) / bench.swaps
        await models.close()
        return used, taken

    used, taken = asyncio.run(run())
    difference = (used[-1] - used[0]) / 1e6
    print("| swaps | s each | device memory behind the first GB | behind the last, MB more |")
    print("|---|---|---|---|")
    print(f"| {bench.swaps} | {taken:.2f} | {used[0] / 1e9:.2f} | {difference:+.1f} |", flush=True)


def _used(device: str) -> int:
    """Return the bytes of the device that are taken, by anybody."""
    if not device.startswith("cuda"):
        return 0
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return whole - free


MODES: dict[str, Callable[[CacheBench, Path], None]] = {
    f.__name__: f for f in (cached, disk, writing, swaps)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], metavar="MODE")
    add_model(parser)
    parser.add_argument("--cache", default="q6")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--swaps", type=int, default=50, help="of mode `swaps`")
    parser.add_argument("--trials", type=int, default=3, help="of `disk` and `writing`")
    parser.add_argument("--max-tokens", type=int, default=33_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = model_of(arguments, folder)
        if arguments.model is None:
            fill_vocabulary(source)
        model = load_model(source, device=arguments.device, max_tokens=arguments.max_tokens)
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}, {arguments.cache} cache")
        bench = CacheBench(model, arguments.cache, 16_000)
        bench.swaps, bench.trials = arguments.swaps, arguments.trials
        del model
        for mode in arguments.modes:  # `swaps` comes last: it frees the model
            print(f"\n{mode}\n", flush=True)
            MODES[mode](bench, folder)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
