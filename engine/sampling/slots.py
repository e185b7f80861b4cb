"""Sampler state per slot on the device: settings, history, masks, Mirostat's bound."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.sampling.bits import words_of
from exl2flow.engine.sampling.kind import Kind, numbers_of
from exl2flow.kernels import STRONGEST, SamplerState, on_device


class SamplerSlots:
    """Sampler state of `slots` sequences, which `sample` advances on the device.

    Its tensors are those of `SamplerState`, for all slots.
    """

    @torch.inference_mode()
    def __init__(
        self,
        *,
        slots: int,
        max_tokens: int,
        vocab_size: int,
        width: int,
        device: torch.device | str,
    ) -> None:
        """Reserve memory; `vocab_size`: of the tokenizer, `width`: of the logits."""
        self.vocab_size, self.width, self.max_tokens = vocab_size, width, max_tokens
        self._defaults = {
            "allowed": torch.full((-(-width // 32),), -1, dtype=torch.int32),
            "bias": torch.zeros(width),
            "breakers": self._breakers(()),
            "ignored": words_of((), width),
        }
        self._late = dict[str, torch.Tensor]()
        self._pairs = dict[int, int]()  # slot of a first prompt → slot of its second one
        numbers = tuple(numbers_of(SamplingSettings.greedy()).values())
        self.table = torch.tensor([numbers] * slots, dtype=torch.float64, device=device)
        shape = (slots, max_tokens + 1)
        self.history = torch.full(shape, vocab_size, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self.active = torch.zeros(slots, dtype=torch.int32, device=device)
        self.mu = torch.full((slots,), math.inf, dtype=torch.float64, device=device)
        self.partner, self.lead = torch.arange(slots, device=device).repeat(2, 1)

    def state(self, batch: int, kind: Kind) -> SamplerState:
        """Return the state of the first slots that a call of this kind uses."""
        return SamplerState(
            vocab_size=self.vocab_size,
            table=self.table[:batch],
            history=self.history[:batch],
            counts=self.counts[:batch],
            active=self.active[:batch],
            mu=self.mu[:batch],
            partner=self.partner[:batch],
            lead=self.lead[:batch],
            **{name: self.late(name)[:batch] for name in _late_names(kind)},
        )

    @torch.inference_mode()
    def late(self, name: str) -> torch.Tensor:
        """Return a tensor that takes memory from its first use on, (slots, width or words)."""
        if name not in self._late:
            default = self._defaults[name].to(self.table.device)
            self._late[name] = default.expand(len(self.table), -1).clone()
        return self._late[name]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors with a row per slot."""
        state = (self.table, self.history, self.counts, self.active, self.mu)
        return (*state, self.partner, self.lead, *self._late.values())

    @torch.inference_mode()
    def enter(
        self,
        slot: int,
        settings: SamplingSettings,
        ids: Sequence[int],
        *,
        mu: float | None = None,
    ) -> None:
        """Give a slot, whose former state is dropped, to a sequence.

        ids: its prompt, and its text so far. mu: Mirostat's bound, where a sequence continues; None
        begins at twice tau.

        Raises:
            InferenceError: there are more ids than the history holds, or a bias for unknown ids.
        """
        if len(ids) > self.max_tokens:
            raise InferenceError(f"{len(ids)} ids exceed a history of {self.max_tokens}")
        self.check(settings)
        for name in _late_names(Kind.of([settings])):
            self.late(name)  # here, where a text that finds no memory for it can end alone
        bias = self._biases(settings.token_bias)
        device = self.table.device
        numbers = torch.tensor([*numbers_of(settings).values()], dtype=torch.float64)
        self.table[slot] = on_device(numbers, device)
        history = torch.tensor(ids, dtype=torch.int64)
        history[(history < 0) | (history >= self.vocab_size)] = self.vocab_size
        self.history[slot, : len(ids)] = on_device(history.int(), device)
        self.cut(slot, len(ids))
        self.active[slot].fill_(1)  # an assignment would wait for the device
        start = 2 * settings.mirostat_tau if mu is None else mu
        self.mu[slot].fill_(start if settings.mirostat else math.inf)
        self._unpair(slot)
        self._set("allowed", slot, None)
        self._set("bias", slot, bias)
        breakers, ignored = settings.dry_breakers, settings.xtc_ignored
        self._set("breakers", slot, None if breakers is None else self._breakers(breakers))
        self._set("ignored", slot, None if ignored is None else words_of(ignored, self.width))

    def check(self, settings: SamplingSettings) -> None:
        """Raise `InferenceError` if there is a bias for an id outside the vocabulary."""
        for token, _ in settings.token_bias:
            if token >= self.vocab_size:
                raise InferenceError(
                    f"`token_bias` has id {token} of a vocabulary of {self.vocab_size}"
                )

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Free a slot."""
        self.active[slot].fill_(0)
        self._unpair(slot)

    @torch.inference_mode()
    def cut(self, slot: int, count: int) -> None:
        """Cut a history to its first `count` ids."""
        self.history[slot, count:] = self.vocab_size
        self.counts[slot].fill_(count)

    @torch.inference_mode()
    def allow(self, masks: Mapping[int, torch.Tensor | None]) -> None:
        """Restrict the next samples of slots to masks int32 (ceil(width / 32),); None lifts one."""
        if "allowed" not in self._late and not any(words is not None for words in masks.values()):
            return
        default, late = self._defaults["allowed"], self.late("allowed")
        rows = torch.stack([default if words is None else words for words in masks.values()])
        slots = torch.tensor([*masks])
        late.index_copy_(0, on_device(slots, late.device), on_device(rows, late.device))

    @torch.inference_mode()
    def pair(self, slot: int, negative: int) -> None:
        """Mix the logits of `negative` into those of `slot`; both get the id sampled there.

        From now on both are among the rows that are sampled together, or neither.
        """
        self._unpair(slot)
        self._pairs[slot] = negative
        self.partner[slot].fill_(negative)
        self.lead[negative].fill_(slot)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Move all state of a slot to a free one; a paired slot stays paired."""
        pairs = {
            target if lead == source else lead: target if negative == source else negative
            for lead, negative in self._pairs.items()
            if target not in (lead, negative)
        }
        for tensor in self.tensors():
            tensor[target] = tensor[source]
        self.leave(source)
        self._unpair(target)
        for lead, negative in pairs.items():
            self.pair(lead, negative)

    def _unpair(self, slot: int) -> None:
        for lead, negative in [*self._pairs.items()]:
            if slot in (lead, negative):
                del self._pairs[lead]
                self.partner[lead].fill_(lead)
                self.lead[negative].fill_(negative)
        self.partner[slot].fill_(slot)
        self.lead[slot].fill_(slot)

    def _set(self, name: str, slot: int, value: torch.Tensor | None) -> None:
        """Set a row of a late tensor, which need not exist to hold its default."""
        if value is not None or name in self._late:
            row = self._defaults[name] if value is None else value
            self.late(name)[slot] = on_device(row, self.table.device)

    def _breakers(self, ids: Iterable[int]) -> torch.Tensor:
        return words_of((*ids, self.vocab_size), self.width + 1)

    def _biases(self, pairs: tuple[tuple[int, float], ...]) -> torch.Tensor | None:
        bias = torch.zeros(self.width)
        for token, value in pairs:
            bias[token] += max(-STRONGEST, min(value, STRONGEST)) if value > -math.inf else value
        return bias if pairs else None


def _late_names(kind: Kind) -> list[str]:
    """Return the names of the late tensors that a call of this kind reads."""
    needed = {
        "bias": kind.bias,
        "allowed": kind.masked,
        "breakers": kind.dry > 0,
        "ignored": kind.sorts,
    }
    return [name for name, is_needed in needed.items() if is_needed]
