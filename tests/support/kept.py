"""Programs that keep pages in a folder, to be killed: `python kept.py MODEL FOLDER SEED`.

It says `begun` when the first page may be written, and goes on until it is killed.
"""

import sys
from pathlib import Path

import checkout  # noqa: F401  # the package in a bare checkout
from small_pages import PAGE_TOKENS, small_generator

from exl2flow.inference import PromptCache, Request, SamplingSettings, load_model

TOKENS = 4 * PAGE_TOKENS  # of the cache, so that a prompt drives the one before it out
PROMPT = TOKENS - 8


def prompt(seed: int) -> tuple[int, ...]:
    """Return ids of the tiny model, of which hardly any page is equal for two seeds."""
    return tuple(3 + (seed * 7919 + i * i * (seed + 3)) % 290 for i in range(PROMPT))


def request(seed: int) -> Request:
    return Request(
        prompt(seed), max_new_tokens=4, settings=SamplingSettings.greedy(), stops=(), tag=seed
    )


def main(model: Path, folder: Path, seed: int) -> None:
    loaded = load_model(model, device="cpu", max_tokens=TOKENS)
    keep = PromptCache(disk=folder)
    print("begun", flush=True)
    while True:
        generator = small_generator(loaded, tokens=TOKENS, slots=1, keep=keep)
        for _ in range(3):
            for _ in generator.stream(request(seed)):
                pass
            seed += 1
        generator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
