"""`exl2flow generate`: complete a prompt, text appearing as it is made."""

import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core.config import CacheName, Device
from exl2flow.flows.cli.console import emit_json, printable, say
from exl2flow.flows.cli.setting import one_of

if TYPE_CHECKING:
    from exl2flow.inference.load import LoadedModel
    from exl2flow.inference.sampling import SamplingSettings

EXAMPLES = (
    "Examples:",
    "exl2flow generate ./Llama-3.2-1B-4.0bpw --prompt 'Once upon a time'",
    "exl2flow generate ./model --prompt 'The capital of France is' --greedy --max-new-tokens 8",
    "exl2flow generate ./model --prompt 'Dear Sir' --seed 1 --temperature 1 --min-p 0.1 --json",
)
SAMPLING = "Sampling"


def generate(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Model folder, EXL2 or plain.", show_default=False),
    ],
    *,
    prompt: Annotated[
        str,
        typer.Option("--prompt", metavar="TEXT", help="Text to go on from.", show_default=False),
    ],
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Tokens at most; the model's end-of-text token ends it before.",
        ),
    ] = 128,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Seed of the draws: the same seed gives the same text.",
            show_default="a new one every time",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0,
            help="Divide logits by this; below 0.01: always the likeliest token.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.8,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            metavar="K",
            min=0,
            help="Draw from the K likeliest tokens; 0: from all.",
            rich_help_panel=SAMPLING,
        ),
    ] = 50,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            metavar="P",
            min=0,
            max=1,
            help="Draw from the fewest tokens whose probabilities sum to P; 0 or 1: off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.8,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            metavar="P",
            min=0,
            max=1,
            help="Drop tokens less likely than P times the likeliest; 0: off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            help="Always take the likeliest token, whatever the other options say.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Do not begin with the model's BOS token.")
    ] = False,
    cache: Annotated[
        CacheName | None,
        typer.Option(
            "--cache",
            metavar="FORMAT",
            parser=one_of(CacheName),
            help="How keys and values are held: fp16, fp8, q8, q6 or q4.",
            show_default="as they are computed",
        ),
    ] = None,
    device: Annotated[
        Device,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            parser=one_of(Device),
            help="Where to compute; auto: CUDA if usable, else the CPU.",
        ),
    ] = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object when done; its text is exact, while "
            "control characters are replaced otherwise.",
        ),
    ] = False,
) -> None:
    """Generate text from a model; the prompt is plain text, special tokens in it are not read."""
    from exl2flow.flows.conversion import choose_allocator
    from exl2flow.inference.load import load_model
    from exl2flow.inference.sampling import SamplingSettings

    choose_allocator()
    settings = (
        SamplingSettings.greedy()
        if greedy
        else SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    used_seed = secrets.randbelow(2**31) if seed is None else seed
    loaded = load_model(model, device=device)
    run = _Run(loaded, prompt, add_bos=not no_bos, cache=cache)
    for piece in run.pieces(max_new_tokens, settings, used_seed):
        if not as_json:
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    if as_json:
        emit_json({"seed": used_seed, **run.to_json()})
        return
    sys.stdout.write("\n")
    say(
        f"{len(run.made)} tokens in {run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s, "
        f"stopped by {run.reason}, seed {used_seed}",
        style="dim",
    )


class _Run:
    """One generation: yields pieces of text, then knows how it went."""

    def __init__(
        self, model: "LoadedModel", prompt: str, *, add_bos: bool, cache: str | None
    ) -> None:
        from exl2flow.inference.generate import BaseGenerator

        self.model = model
        self.generator = BaseGenerator(model, cache=cache)
        self.prompt = prompt
        self.ids = model.tokenizer.encode(prompt, add_bos=add_bos)
        self.made: list[int] = []
        self.text = ""
        self.reason = "max_new_tokens"
        self.seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed, the prompt's forward pass included."""
        return len(self.made) / self.seconds if self.seconds else 0.0

    def pieces(self, count: int, settings: "SamplingSettings", seed: int) -> Iterator[str]:
        """Yield the prompt, then what is added to it as its characters become complete."""
        from exl2flow.model import TextStream

        tokenizer = self.model.tokenizer
        stream = TextStream(tokenizer, self.ids)
        begun = time.monotonic()
        tokens = self.generator.stream(self.ids, max_new_tokens=count, settings=settings, seed=seed)
        for token in tokens:
            self.seconds = time.monotonic() - begun
            if not self.made:
                yield self.prompt
            if token in tokenizer.eos_token_ids:
                self.reason = "end of text"
                break
            self.made.append(token)
            yield self._added(stream.push(token))
        yield self._added(stream.flush())

    def _added(self, piece: str) -> str:
        self.text += piece
        return piece

    def to_json(self) -> dict[str, object]:
        """Return the outcome."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.made,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
