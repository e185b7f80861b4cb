"""Sample on the device: for the slots of a generator, or once for given logits."""

from collections.abc import Sequence

import torch

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.sampling.bits import completed
from exl2flow.engine.sampling.kind import Kind
from exl2flow.engine.sampling.slots import SamplerSlots
from exl2flow.kernels import SampledTokens, get_ops
from exl2flow.model import Tokenizer


@torch.inference_mode()
def sample(
    logits: torch.Tensor, slots: SamplerSlots, draws: torch.Tensor, kind: Kind
) -> SampledTokens:
    """Sample an id for each of the first n slots, and append it to its history; see `Ops.sample`.

    `kind` serves the settings of all active slots among them.
    """
    state = slots.state(len(logits), kind)
    return get_ops(logits.device).sample(logits, state, draws, kind)


@torch.inference_mode()
def choose(
    logits: torch.Tensor,
    settings: SamplingSettings,
    texts: Sequence[Sequence[int]],
    draws: Sequence[float],
    tokenizer: Tokenizer,
    *,
    allowed: torch.Tensor | None = None,
    mu: float | None = None,
    top: int = 0,
) -> tuple[SampledTokens, float]:
    """Sample a token for each of several texts, as a generator does; also return Mirostat's bound.

    Args:
        logits: fp32 (n, width); two rows for guidance, of which the first gets the token.
        settings: for all texts.
        texts: their ids, each with its prompt.
        draws: a number in [0, 1) for each.
        tokenizer: the model's.
        allowed: mask of the ids that may be chosen, as in `bits.py`; None: all.
        mu: Mirostat's bound, which the last call for this text returned.
        top: likeliest tokens wanted.
    """
    slots = SamplerSlots(
        slots=len(logits),
        max_tokens=max(map(len, texts)),
        width=logits.shape[1],
        vocab_size=min(tokenizer.vocab_size, logits.shape[1]),
        device=logits.device,
    )
    for slot, ids in enumerate(texts):
        slots.enter(slot, completed(settings, tokenizer), ids, mu=mu)
        slots.allow({slot: allowed})
    if settings.cfg_scale is not None:
        slots.pair(0, 1)
    kind = Kind.of([settings], masked=allowed is not None, top=top, probabilities=True)
    numbers = torch.tensor(draws, dtype=torch.float64, device=logits.device)
    return sample(logits, slots, numbers, kind), float(slots.mu[0])
