"""Requests of random ids, and the time of a generator's steps."""

import random
import time
from typing import Any

import torch

from exl2flow.inference import Generator, LoadedModel, Request, SamplingSettings

GREEDY, DEFAULT = SamplingSettings.greedy(), SamplingSettings()


def prompt(tokens: int, vocab: int, seed: int) -> tuple[int, ...]:
    """Return random ids."""
    source = random.Random(seed)
    return tuple(source.randrange(5, vocab) for _ in range(tokens))


def request(model: LoadedModel, tokens: int, new: int, seed: int, **more: Any) -> Request:
    """Return a request with a prompt of random ids."""
    ids = prompt(tokens, model.spec.vocab_size, seed)
    return Request(ids, max_new_tokens=new, stops=(), seed=seed, **more)


def stepped(generator: Generator, steps: int) -> float:
    """Return the seconds per step of so many steps."""
    settle()
    begun = time.perf_counter()
    for _ in range(steps):
        generator.step()
    settle()
    return (time.perf_counter() - begun) / steps


def settle() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
