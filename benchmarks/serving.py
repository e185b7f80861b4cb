"""Time the server against the generator that it runs, and count what it loses.

    python benchmarks/serving.py MODE … [--model DIR | --shape 7b] [--cache fp16] [--device cuda]

Modes: streams, first, gap, tools, silent, requests; all run on a CPU as well. The application runs
in this process without Prefect, its clients in another one. Both sides get the same requests.
Unless a model is given, one of random codes is written to a temporary folder. Texts end by their
number of tokens only. `tools` needs llguidance.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar
from urllib.request import urlopen

import torch
from decode import add_model, model_of
from generation_jobs import settle

from exl2flow.core.options.serving import ServeOptions
from exl2flow.engine.chat import choose_format
from exl2flow.engine.filters import GrammarFilter
from exl2flow.inference import AsyncGenerator, Generator, LoadedModel, Request, load_model
from exl2flow.serve.answers.fields import ChatBody, CompletionBody
from exl2flow.serve.apis import chats, completions
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.http.app import create_app
from exl2flow.serve.http.running import run as run_app

T = TypeVar("T")
CLIENTS = Path(__file__).with_name("serving_clients.py")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TRIALS = 3
NUMBERS: Any = {  # a call that never ends by itself
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 10_000}
            },
            "required": ["numbers"],
            "additionalProperties": False,
        },
    },
}


def fill_vocabulary(folder: Path) -> None:
    """Give a text to all ids of a model of random codes, whose tokenizer has fewer."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    vocabulary = found["model"]["vocab"]
    for token in {*range(size)} - {*vocabulary.values()} - {t["id"] for t in found["added_tokens"]}:
        vocabulary[f"w{token}"] = token
    path.write_text(json.dumps(found), encoding="utf-8")


class Bench:
    """A model, and what its servers are made of. prompt_tokens: of the long prompts of `gap`."""

    def __init__(self, model: LoadedModel, form: str, prompt_tokens: int) -> None:
        self.model, self.form = model, form
        self.prompt_tokens = min(prompt_tokens, model.max_tokens - 128)
        self.new = min(400, model.max_tokens // 4)
        self._seeds = iter(range(10**9))

    def host(self, slots: int, tokens: int | None = None) -> ModelHost:
        """Return a host that does not run yet, so its generator can be stepped here."""
        tokens = tokens or slots * 1024

        def make() -> Generator:
            return Generator(self.model, cache=self.form, tokens=tokens, slots=slots)

        options = ServeOptions(slots=slots, waiting=1024)
        folder = self.model.spec.source_dir
        fmt, _ = choose_format(folder, self.model.tokenizer, "chatml")
        host = ModelHost(self.model, make, options, fmt=fmt, defaults={})
        generator_of(host).warmup()
        return host

    def text(self, tokens: int) -> str:
        """Return random words that no cache has, about `tokens` tokens of them."""
        tokenizer, source = self.model.tokenizer, random.Random(next(self._seeds))
        ids = [source.randrange(5, self.model.spec.vocab_size) for _ in range(tokens)]
        text = tokenizer.decode(ids).replace("\ufffd", "")
        return tokenizer.decode(tokenizer.encode(text)[:tokens]).replace("\ufffd", "")

    def chat(self, tokens: int, new: int, **more: Any) -> dict[str, Any]:
        """Return a chat completion as a request for the clients, streamed."""
        messages = [{"role": "user", "content": self.text(tokens)}]
        return {"path": CHAT, "body": {"messages": messages, **_streamed(new), **more}}

    def complete(self, tokens: int, new: int, **more: Any) -> dict[str, Any]:
        """Return a completion as a request for the clients, streamed."""
        return {
            "path": COMPLETIONS,
            "body": {"prompt": self.text(tokens), **_streamed(new), **more},
        }


def generator_of(host: ModelHost) -> Generator:
    """Return the generator of a host, which has not failed."""
    assert host.generator is not None
    return host.generator


def _streamed(new: int) -> dict[str, Any]:
    usage = {"include_usage": True}
    options = {"ignore_eos": True, "end_loops": False, "temperature": 0.0, "seed": 1}
    return {"max_tokens": new, "stream": True, "stream_options": usage, **options}


def request_of(asked: dict[str, Any], host: ModelHost, tag: object = None) -> Request:
    """Return what the server gives to the generator for a body, with another tag."""
    if asked["path"] == CHAT:
        plan = chats.plan_of(ChatBody.model_validate(asked["body"]), host)
    else:
        plan = completions.plan_of(CompletionBody.model_validate(asked["body"]), host)
    [request] = plan.requests
    return Request(**{f: getattr(request, f) for f in request.__slots__} | {"tag": tag})


def served(host: ModelHost, work: Callable[[int], T]) -> T:
    """Serve until some work, which gets the port, is done; return its result."""
    host.start()
    models = Models(host, lambda _: host)
    app = create_app(models)
    server = threading.main_thread().ident
    assert server is not None
    # without the protocol's number asyncio leaves Nagle's algorithm on: 40 ms an answer
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        port = listener.getsockname()[1]

        def worked() -> T:
            urlopen(f"http://127.0.0.1:{port}/health").close()
            try:
                return work(port)
            finally:
                signal.pthread_kill(server, signal.SIGTERM)

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(worked)
            run_app(app, models, listener)
            return result.result()


def clients(
    port: int, groups: Sequence[Any], *, ends_with_last: bool = False, silent: int = 0
) -> list[list[dict[str, Any]]]:
    """Return what groups of requests got; those of a group follow each other."""
    job = {"port": port, "groups": groups, "ends_with_last": ends_with_last, "silent": silent}
    done = subprocess.run(
        [sys.executable, CLIENTS],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    wrong = [a["status"] for group in found for a in group if a["ended"] and a["status"] != 200]
    assert not wrong, wrong
    return found


def rate_of(found: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return tokens per second, from the first request to the last text."""
    answers = [answer for group in found for answer in group]
    begun = min(answer["sent"] for answer in answers)
    ended = max(answer["sent"] + answer["times"][-1] for answer in answers)
    return float(sum(answer["tokens"] for answer in answers) / (ended - begun))


def alone(host: ModelHost, asked: Sequence[dict[str, Any]]) -> float:
    """Return the tokens per second of the generator, requests prepared by then."""
    generator = generator_of(host)
    requests = [request_of(each, host) for each in asked]
    settle()
    begun, count = time.perf_counter(), 0
    for request in requests:
        generator.submit(request)
    while not generator.is_idle:
        count += sum(len(event.ids) for event in generator.step())
    settle()
    return count / (time.perf_counter() - begun)


def streams(bench: Bench) -> None:
    """Compare tokens per second through HTTP with those of the generator."""
    print("| streams | generator tokens/s | HTTP tokens/s | ratio |\n|---|---|---|---|")
    for rows in (1, 16, 64):
        host = bench.host(rows)

        def asked(rows: int = rows) -> list[dict[str, Any]]:
            return [bench.chat(32, bench.new) for _ in range(rows)]

        expected = max(alone(host, asked()) for _ in range(TRIALS + 1))
        found = served(
            host,
            lambda port, asked=asked: max(
                rate_of(clients(port, [[each] for each in asked()])) for _ in range(TRIALS + 1)
            ),
        )
        print(f"| {rows} | {expected:.0f} | {found:.0f} | {found / expected:.3f} |", flush=True)


async def _first_times(host: ModelHost, long: Sequence[Any], probes: Sequence[Any]) -> list[float]:
    """Return the seconds to the first token of probes beside other texts, of the generator."""
    times = list[float]()
    async with AsyncGenerator(generator_of(host)) as running:

        async def consume(asked: Any) -> None:
            while True:  # until all probes are done
                async for _ in running.stream(request_of(asked, host)):
                    pass

        tasks = [asyncio.create_task(consume(asked)) for asked in long]
        await asyncio.sleep(1.0)
        for asked in probes:
            request, begun, first = request_of(asked, host), time.perf_counter(), 0.0
            async for event in running.stream(request):
                first = first or (time.perf_counter() - begun if event.ids else 0.0)
            times.append(first)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return times


def first(bench: Bench) -> None:
    """Compare the time to the first token of a request beside 15 streams."""
    host, count = bench.host(16), 200
    # texts of other lengths, so that they do not begin again at once
    long = [bench.chat(32, bench.new - bench.new * row // 30) for row in range(15)]

    def probes() -> list[dict[str, Any]]:
        return [{**bench.chat(32, 2), "pause": 0.013} for _ in range(count)]

    expected = asyncio.run(_first_times(host, long, probes()))
    groups = [[each] * 1000 for each in long]
    result = served(
        host,
        lambda port: clients(
            port, [*groups, [{**bench.chat(32, 1), "pause": 1.0}, *probes()]], ends_with_last=True
        ),
    )
    found = [answer["times"][0] for answer in result[-1][1:]]
    print("| | generator ms | HTTP ms | over ms |\n|---|---|---|---|")
    for name, at in (("p50", 49), ("p99", 98)):
        a, b = (1e3 * quantiles(times, n=100)[at] for times in (expected, found))
        print(f"| {name} | {a:.1f} | {b:.1f} | {b - a:.1f} |", flush=True)


def _longest_pass(bench: Bench, host: ModelHost, long: Sequence[Any]) -> float:
    """Return the longest step of the generator while a long prompt is read beside texts."""
    generator = generator_of(host)
    jobs = [generator.submit(request_of(each, host)) for each in long]
    for _ in range(40):
        generator.step()
    asked = bench.complete(bench.prompt_tokens, 4)
    jobs.append(generator.submit(request_of(asked, host, "long")))
    waits, is_read = list[float](), False
    while not is_read:
        begun = time.perf_counter()
        events = generator.step()
        waits.append(time.perf_counter() - begun)
        is_read = any(event.tag == "long" and event.ids for event in events)
    for job in jobs:
        job.cancel()
    generator.step()
    return max(waits)


def gap(bench: Bench) -> None:
    """Compare the longest pause of 15 streams, while long prompts arrive, with the longest step."""
    room = bench.model.max_tokens
    host = bench.host(16, 15 * min(4096, room) + 2 * bench.prompt_tokens + 1024)
    new = min(4000, room - 64)
    long = [bench.complete(32, new) for _ in range(15)]
    expected = min(_longest_pass(bench, host, long) for _ in range(2))
    prompts = [{**bench.complete(bench.prompt_tokens, 4), "pause": 1.0} for _ in range(3)]
    groups = [[each] * 1000 for each in long]
    result = served(host, lambda port: clients(port, [*groups, prompts], ends_with_last=True))
    windows = [(a["sent"], a["sent"] + a["times"][0]) for a in result[-1]]
    longest = [max(_pauses(result[:-1], window)) for window in windows]
    tokens = result[-1][0]["prompt"]
    print("| prompt | longest step of the generator ms | longest pause over HTTP ms | ratio |")
    print("|---|---|---|---|")
    found = median(longest)
    shown = " ".join(f"{1e3 * each:.0f}" for each in longest)
    print(
        f"| {tokens} | {1e3 * expected:.1f} | {1e3 * found:.1f} ({shown}) "
        f"| {found / expected:.2f} |",
        flush=True,
    )


def _pauses(groups: Sequence[Any], window: tuple[float, float]) -> list[float]:
    """Return the pauses of streams that overlap a window of time."""
    found = [0.0]
    for answer in (answer for group in groups for answer in group):
        times = [answer["sent"] + when for when in answer["times"]]
        pairs = pairwise(times)
        found += [b - a for a, b in pairs if a < window[1] and b > window[0]]
    return found


def tools(bench: Bench) -> None:
    """Compare 16 streams whose calls are held to a schema with 16 texts after as long a prompt."""
    host = bench.host(16)
    forced: dict[str, dict[str, Any]] = {
        "auto": {"tools": [NUMBERS], "temperature": 1.0},
        "required": {"tools": [NUMBERS], "tool_choice": "required"},
    }

    def asked(tokens: int, more: dict[str, Any]) -> list[dict[str, Any]]:
        return [bench.chat(tokens, bench.new, **more) for _ in range(16)]

    def sides(name: str) -> dict[str, tuple[int, dict[str, Any]]]:
        """Return the words of a prompt and the fields of both sides."""
        lengths = [
            len(request_of(bench.chat(32, 1, **more), host).prompts[0])
            for more in (forced[name], {})
        ]
        free = {key: forced[name][key] for key in ("temperature",) if key in forced[name]}
        return {"forced": (32, forced[name]), "free": (32 + lengths[0] - lengths[1], free)}

    GrammarFilter(regex="a").start(host.tokenizer, host.width)
    host.has_grammars = True
    both = {name: sides(name) for name in forced}
    rates = {(name, side): [0.0, 0.0] for name in forced for side in both[name]}

    def measure(index: int, rate: Callable[[list[dict[str, Any]]], float]) -> None:
        for _ in range(TRIALS + 1):
            for name, side in rates:
                found = rate(asked(*both[name][side]))
                rates[name, side][index] = max(rates[name, side][index], found)

    measure(0, lambda given: alone(host, given))
    served(
        host,
        lambda port: measure(1, lambda given: rate_of(clients(port, [[one] for one in given]))),
    )
    print("| tools | | free tokens/s | forced tokens/s | ratio |\n|---|---|---|---|---|")
    for index, where in enumerate(("generator", "HTTP")):
        for name in forced:
            free, held = (rates[name, side][index] for side in ("free", "forced"))
            print(f"| {name} | {where} | {free:.0f} | {held:.0f} | {held / free:.3f} |", flush=True)


def silent(bench: Bench) -> None:
    """Compare the first token of an honest client beside 1,000 silent connections with none."""
    host = bench.host(16)

    def measured(port: int) -> dict[int, float]:
        times: dict[int, list[float]] = {0: [], 1000: []}
        for _ in range(TRIALS + 1):
            for count in times:
                probes = [bench.chat(32, 2) for _ in range(50)]
                [found] = clients(port, [probes], silent=count)
                times[count].append(median(answer["times"][0] for answer in found))
        return {count: min(found) for count, found in times.items()}

    times = served(host, measured)
    print("| silent connections | first token ms | ratio |\n|---|---|---|")
    for count, found in times.items():
        print(f"| {count} | {1e3 * found:.2f} | {found / times[0]:.2f} |", flush=True)


def requests(bench: Bench) -> None:
    """Send 10,000 short requests, of which a fifth leaves, and count what got lost."""
    host, source = bench.host(16), random.Random(0)

    def asked() -> dict[str, Any]:
        new = source.randint(1, 8)
        one = bench.chat(8, new) if source.random() < 0.5 else bench.complete(8, new)
        one["body"]["stream"] = source.random() < 0.5
        return one | ({"leave": source.uniform(0, 0.05)} if source.random() < 0.2 else {})

    def measured(port: int) -> tuple[list[Any], int, float]:
        clients(port, [[asked() for _ in range(10)] for _ in range(32)])
        before = _descriptors(host)
        groups = [[asked() for _ in range(10_000 // 40)] for _ in range(40)]
        begun = time.perf_counter()
        found = clients(port, groups)
        taken = time.perf_counter() - begun
        pairs = [
            pair
            for asked, got in zip(groups, found, strict=True)
            for pair in zip(asked, got, strict=True)
        ]
        return pairs, _descriptors(host) - before, taken

    pairs, opened, taken = served(host, measured)
    stayed = [(asked, got) for asked, got in pairs if got["ended"]]
    wrong = [
        got
        for asked, got in stayed
        if got["ends"] != 1 or got["tokens"] != asked["body"]["max_tokens"]
    ]
    print("| sent | left | lost or twice | pages in use | descriptors | s |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {len(pairs)} | {len(pairs) - len(stayed)} | {len(wrong)} "
        f"| {host.pages - host.cache_use.free_pages} | {opened:+d} | {taken:.1f} |",
        flush=True,
    )


def _descriptors(host: ModelHost) -> int:
    """Return how many descriptors are open once all requests have ended."""
    while host.count:
        time.sleep(0.05)
    time.sleep(0.5)
    return len(os.listdir("/proc/self/fd"))


MODES = {f.__name__: f for f in (streams, first, gap, tools, silent, requests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], metavar="MODE")
    add_model(parser)
    parser.add_argument("--cache", default="fp16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-tokens", type=int, default=20480)
    parser.add_argument("--prompt-tokens", type=int, default=16_000, help="of prompts of `gap`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = model_of(arguments, Path(folder))
        if arguments.model is None:
            fill_vocabulary(source)
        model = load_model(source, device=arguments.device, max_tokens=arguments.max_tokens)
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}, {arguments.cache} cache")
        bench = Bench(model, arguments.cache, arguments.prompt_tokens)
        for mode in arguments.modes:
            print(f"\n{mode}\n", flush=True)
            MODES[mode](bench)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
