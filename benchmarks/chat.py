"""Time conversations: decoding with the screen of `exl2flow chat`, and turns behind a long past.

    python benchmarks/chat.py [--model DIR | --shape 7b] [--cache fp16] [--device cuda]
        [--tokens 500] [--context 8000] [--runs 5]

A chat writes to a pseudo terminal that another process reads. It shows what the model says, then
Markdown and a long block of code in place of that, as many characters per token. `generate` gets
the same request without a session or a screen. Answers end by their number of tokens only. Unless
a model is given, one of random codes is written to a temporary folder.
"""

import argparse
import json
import os
import pty
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median

import tokenizers
import torch
from decode import add_model, model_of
from generation_jobs import settle
from rich.console import Console

from exl2flow.cli.options.chat import DEFAULTS
from exl2flow.cli.terminal.commands import obey
from exl2flow.cli.terminal.loop import Chat
from exl2flow.cli.terminal.screen import Screen
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.conversation import Answer, Turn
from exl2flow.core.requests.request import Request
from exl2flow.engine.chat import Piece, Session, choose_format
from exl2flow.inference import Generator, LoadedModel, load_model
from exl2flow.model import Tokenizer

ROOT = Path(__file__).parent.parent
MARKDOWN = (ROOT / "docs" / "tutorials" / "chat.md").read_text()
CODE = "```python\n" + (ROOT / "benchmarks" / "generation.py").read_text()
CHARACTERS = 4  # per token
TURN = 200  # tokens of a turn of the past, half of them the answer's
MESSAGE = "Tell me a story about a lighthouse, a storm, and the cat that lived there."
ROWS, COLUMNS = 40, 100
SETTINGS = SamplingSettings(**DEFAULTS)


def endless(model: LoadedModel) -> LoadedModel:
    """Return the model with a tokenizer without EOS that spells all ids; random ones do not."""
    content = json.loads(model.tokenizer.backend.to_str())
    known, first = content["model"]["vocab"], model.tokenizer.vocab_size
    words = [word for word in known if word.isalpha() and word.isascii()]
    pairs = (f"Ġ{a}{b}" for a, b in product(words, words))
    unused = (pair for pair in pairs if pair not in known)
    known |= {next(unused): i for i in range(first, model.spec.vocab_size)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    bos = model.tokenizer.bos_token_id
    return replace(model, tokenizer=Tokenizer(backend, bos_token_id=bos, eos_token_ids=()))


@contextmanager
def terminal() -> Iterator[Console]:
    """Yield a console on a pseudo terminal that another process reads."""
    ours, theirs = pty.openpty()
    quiet = subprocess.DEVNULL
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=quiet, stderr=quiet)
    os.close(ours)
    with os.fdopen(theirs, "w") as file:
        yield Console(
            file=file,
            force_terminal=True,
            width=COLUMNS,
            height=ROWS,
            highlight=False,
            color_system="truecolor",
            emoji=False,
            legacy_windows=False,
        )
    reader.wait()


def chat_with(generator: Generator, console: Console, folder: Path) -> Chat:
    """Return a chat that writes to the console and, after each turn, to a file."""
    fmt, _ = choose_format(generator.model.spec.source_dir, generator.model.tokenizer)
    fmt = replace(fmt, stop_tokens=(), stop_strings=())
    return Chat(
        session=Session(generator, fmt, settings=SETTINGS, seed=1),
        screen=Screen(console),
        model=folder,
        file=folder / "kept.json",
        restart=lambda: generator,
        obey=obey,
    )


def spoken(session: Session, pieces: Iterator[Piece], text: str) -> Iterator[Piece]:
    """Yield a text as fast as the model says another one."""
    shown = 0
    for _ in pieces:
        said = CHARACTERS * len(session.turns[-1].ids)
        yield Piece(text[shown:said])
        shown = said


def answered(chat: Chat, tokens: int, text: str = "") -> float:
    """Return the tokens per second from the first one of an answer to the end of its last line."""
    session = chat.session
    session.clear()
    session.max_answer_tokens, session.asked = tokens, 0
    settle()
    begun = time.perf_counter()
    if text:
        chat.answer(spoken(session, session.reply(MESSAGE), text))
        chat.keep()
    else:
        chat.take(MESSAGE)
    whole = time.perf_counter() - begun
    made = len(session.turns[-1].ids)  # less the beginning of a character at the end
    assert made > tokens - 4
    return (made - 1) / (whole - session.statistics.first_token_seconds)


def generated(generator: Generator, ids: list[int], tokens: int) -> tuple[float, list[float]]:
    """Return the seconds until the first token, and those between tokens."""
    request = Request(ids, max_new_tokens=tokens, settings=SETTINGS, seed=1, stops=())
    settle()
    times = [time.perf_counter()]
    for event in generator.stream(request):
        times += [time.perf_counter()] * len(event.ids)
    steps = [after - before for before, after in pairwise(times)]
    return steps[0], steps[1:]


def decoding(chat: Chat, tokens: int, runs: int) -> None:
    """Compare the speed of answers on the screen with that of `generate`."""
    session = chat.session
    session.clear()
    ids = session.context_ids(MESSAGE)
    texts = {"the model's text": "", "Markdown": MARKDOWN, "a block of code": CODE}
    for name, text in texts.items():
        long = text * (-(-CHARACTERS * tokens // len(text)) if text else 0)
        pairs = [
            (answered(chat, tokens, long), 1 / mean(generated(session.generator, ids, tokens)[1]))
            for _ in range(runs + 1)
        ][1:]
        shown, alone = (median(rates) for rates in zip(*pairs, strict=True))
        ratio = median(shown / alone for shown, alone in pairs)
        print(
            f"| {name} | {shown:.1f} tokens/s in a chat | {alone:.1f} generated | {ratio:.3f} |",
            flush=True,
        )


def turns(chat: Chat, context: int, runs: int) -> None:
    """Time the first token of turns behind a long conversation that is in the cache."""
    session = chat.session
    tokenizer, source = session.generator.model.tokenizer, random.Random(0)
    words = [word for word in MARKDOWN.split() if word.isalpha()]
    session.clear()
    session.asked, session.max_answer_tokens = 0, 8
    while len(session.context_ids()) < context - TURN:
        said = " ".join(source.choices(words, k=TURN))
        question, answer = (tokenizer.encode(said)[: TURN // 2] for _ in range(2))
        text = tokenizer.decode(answer)
        session.turns.append(
            Turn(tokenizer.decode(question), current=Answer(answer, text, ended=True))
        )
    chat.take("Go on.")  # reads the past
    firsts, read = [], []
    for _ in range(runs):
        settle()
        begun = time.perf_counter()
        pieces = session.reply("Go on.")
        first = next(pieces)
        firsts.append(time.perf_counter() - begun)
        assert first.kind == "answer", first.text
        chat.answer(pieces)
        counts = session.statistics
        read.append(counts.context_tokens - counts.cached_tokens)
    ids = session.context_ids("Go on.")
    step = median(generated(session.generator, ids, 64)[1])
    print(
        f"| {len(session.turns)} turns, {len(ids)} tokens | first token after "
        f"{1e3 * median(firsts):.2f} ms, {max(read)} tokens read | step {1e3 * step:.2f} ms "
        f"| {median(firsts) / step:.1f} steps |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--cache", help="format of the cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=500, help="of an answer")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the long conversation")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, terminal() as console:
        folder = Path(name)
        source = model_of(arguments, folder)
        room = max(arguments.context, arguments.tokens) + 2048
        model = endless(load_model(source, device=arguments.device, max_tokens=room))
        generator = Generator(model, cache=arguments.cache, slots=1)
        generator.warmup()
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        print(
            f"{where}, torch {torch.__version__}, {source.name}, {arguments.cache or 'exact'} cache"
        )
        chat = chat_with(generator, console, folder)
        decoding(chat, arguments.tokens, arguments.runs)
        turns(chat, arguments.context, arguments.runs)


if __name__ == "__main__":
    main()
