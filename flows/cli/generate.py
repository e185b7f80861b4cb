"""`exl2flow generate`: complete a prompt, printing the text as it is generated."""

import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from exl2flow.core.config import CacheName, Device
from exl2flow.core.sampling import SamplingSettings
from exl2flow.flows.cli.console import emit_json, printable, say
from exl2flow.flows.cli.options import Values, one_of, with_settings
from exl2flow.flows.cli.options.sampling import SAMPLING, build_sampling

EXAMPLES = (
    "Examples:",
    "exl2flow generate ./Llama-3.2-1B-4.0bpw --prompt 'Once upon a time'",
    "exl2flow generate ./model --prompt 'The capital of France is' --greedy --max-new-tokens 8",
    "exl2flow generate ./model --prompt 'Dear Sir' --seed 1 --temperature 1 --min-p 0.1 --json",
)


@with_settings(SAMPLING)
def generate(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Model folder, EXL2 or plain.", show_default=False),
    ],
    *,
    prompt: Annotated[
        str,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue.", show_default=False),
    ],
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Maximum number of tokens; an end-of-text token stops earlier.",
        ),
    ] = 128,
    no_bos: Annotated[
        bool,
        typer.Option("--no-bos", metavar="", help="Do not begin with the model's BOS token."),
    ] = False,
    cache: Annotated[
        CacheName | None,
        typer.Option(
            "--cache",
            metavar="FORMAT",
            parser=one_of(CacheName),
            help="Format of the key-value cache: fp16, fp8, q8, q6 or q4.",
            show_default="as computed",
        ),
    ] = None,
    device: Annotated[
        Device,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            parser=one_of(Device),
            help="Device to compute on; auto: CUDA if there is a usable GPU, else the CPU.",
        ),
    ] = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Print one JSON object at the end, with the exact text; otherwise control "
            "characters are replaced.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Seed for sampling: the same seed gives the same text.",
            show_default="a new one every time",
            rich_help_panel=SAMPLING[0],
        ),
    ] = None,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            metavar="",
            help="Always take the likeliest token, whatever the other options say.",
            rich_help_panel=SAMPLING[0],
        ),
    ] = False,
    values: Values,
) -> None:
    """Generate text from a model. The prompt is plain text: special tokens in it have no effect."""
    settings = build_sampling(values)
    from exl2flow.flows.conversion import choose_allocator  # these import torch
    from exl2flow.inference.generate import BaseGenerator
    from exl2flow.inference.load import load_model

    choose_allocator()
    used_seed = secrets.randbelow(2**31) if seed is None else seed
    generator = BaseGenerator(load_model(model, device=device), cache=cache)
    begun = time.monotonic()
    made = generator.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        settings=SamplingSettings.greedy() if greedy else settings,
        seed=used_seed,
        add_bos=not no_bos,
        show=None if as_json else _Printer(prompt),
    )
    seconds = time.monotonic() - begun
    speed = len(made.ids) / seconds  # the prompt's forward pass included
    if as_json:
        emit_json(
            {
                "seed": used_seed,
                "prompt": prompt,
                "text": made.text,
                "tokens": made.ids,
                "reason": made.reason,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(speed, 2),
            }
        )
        return
    sys.stdout.write("\n")
    say(
        f"{len(made.ids)} tokens in {seconds:.1f} s, {speed:.1f} tokens/s, "
        f"stopped by {made.reason}, seed {used_seed}",
        style="dim",
    )


class _Printer:
    """Prints the prompt with the first piece of text, then every piece as it comes."""

    def __init__(self, prompt: str) -> None:
        self._before = prompt

    def __call__(self, piece: str) -> None:
        sys.stdout.write(printable(self._before + piece))
        sys.stdout.flush()
        self._before = ""
