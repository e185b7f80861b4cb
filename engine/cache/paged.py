"""Keys and values in pages, of 256 tokens as a rule, in any format of `CACHE_FORMATS`.

Sequences share one pool of pages; `page_pool.py` decides which page holds what. A pass of the model
reads and writes through a view (`views.py`): `StepView` for a few new tokens per sequence,
`PromptView` for many tokens of several prompts.
"""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.core.runtime.memory import available_memory, free_memory
from exl2flow.engine.cache.states import States
from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    CacheFormat,
    LayerStore,
    get_ops,
    on_device,
)
from exl2flow.model import ModelSpec, Placement
from exl2flow.model.config.spec import AttentionSpec
from exl2flow.model.memory.footprint import layer_bytes, state_bytes

SHARE = 0.7  # of the free memory, for a cache whose size is not given


class PagedCache:
    """Paged KV cache of all layers.

    pages: usable pages; one more, `spare`, receives the keys and values of idle slots. device: of
    the page tables that views take. stores: of layers with keys and values; states: of the others.
    page_tokens: of a page.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        pages: int,
        form: CacheFormat,
        device: torch.device | str,
        layers: Sequence[torch.device] | None = None,
        slots: int = 0,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        """Reserve pages on the device of each layer, by default on `device`.

        slots: texts at once, if layers have a state.
        """
        self.pages = self.spare = pages
        self.form, self.device, self.page_tokens = form, torch.device(device), page_tokens
        of_layer = layers or [self.device] * spec.num_layers
        attending = [
            (index, attention, of_layer[index])
            for index, attention in enumerate(spec.attentions)
            if isinstance(attention, AttentionSpec)
        ]
        self._devices = [device for _, _, device in attending]
        self._places = {index: place for place, (index, _, _) in enumerate(attending)}
        self.stores = [
            LayerStore.empty(
                form,
                pages=pages + 1,
                kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                device=device,
                page_tokens=page_tokens,
            )
            for _, attention, device in attending
        ]
        self.states = States(spec, slots, of_layer, page_tokens) if spec.deltas else None

    def layer(self, index: int) -> Any:
        """Return what is kept of a layer: a `LayerStore`, or the `DeltaSlots` of its states."""
        if index in self._places:
            return self.stores[self._places[index]]
        assert self.states is not None
        return self.states.layer(index)

    def at(self, device: torch.device) -> "PagedCache":
        """Return the same pages for views with tables on another device."""
        cache = copy(self)
        cache.device = device
        return cache

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers, and their scales, (tokens, bytes or runs)."""
        rows = (x for store in self.stores for x in (store.keys, store.values))
        return [x for row in rows for x in (row.data, row.scales) if x.numel()]

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and states occupy."""
        states = 0 if self.states is None else self.states.nbytes
        return states + sum(store.nbytes for store in self.stores)

    @property
    def here(self) -> list[LayerStore]:
        """The stores on `device`."""
        pairs = zip(self.stores, self._devices, strict=True)
        return [store for store, device in pairs if device == self.device]

    def copy(self, pages: torch.Tensor) -> None:
        """Copy pages, all rows of them: int64 (2, n), sources and targets."""
        for device in dict.fromkeys(self._devices):
            self.at(device).copy_here(on_device(pages, device))

    def copy_here(self, pages: torch.Tensor) -> None:
        """Copy pages, given as in `copy`, of the layers on `device`, where `pages` is."""
        for store in self.here:
            store.copy_pages(*pages)


def cache_format(name: str, device: torch.device) -> CacheFormat:
    """Return a format by its name.

    Raises:
        ConfigError: the device has no format of that name.
    """
    names = [n for n in CACHE_FORMATS if n != "fp32" or device.type == "cpu"]
    if name not in names:
        raise ConfigError(f"no cache format `{name}`; choose one of {', '.join(names)}")
    return CACHE_FORMATS[name]


def reserve(
    spec: ModelSpec,
    *,
    pages: int,
    form: CacheFormat,
    placement: Placement,
    slots: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> PagedCache:
    """Reserve a cache, its tables with the head.

    Raises:
        ConfigError: a device's kernels know no pages of this size.
        OutOfDeviceMemory: it does not fit.
    """
    for device in {placement.head, *placement.layers}:
        get_ops(device).check_pages(page_tokens)
    try:
        return PagedCache(
            spec,
            pages=pages,
            form=form,
            device=placement.head,
            layers=placement.layers,
            slots=slots,
            page_tokens=page_tokens,
        )
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(
            f"a cache of {pages * page_tokens} tokens does not fit in the memory of the GPU; give "
            "fewer `tokens`, or a format with fewer bits"
        ) from error


def pages_of(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return how many pages `tokens` tokens need."""
    return -(-tokens // page_tokens)


def whole_pages(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Return the tokens for which the pages of `tokens` tokens have room."""
    return pages_of(tokens, page_tokens) * page_tokens


def fitting(
    context: int,
    models: Sequence[tuple[ModelSpec, Placement]],
    name: str,
    slots: int,
    others: Sequence[int] = (),
    page_tokens: int = PAGE_TOKENS,
) -> int:
    """Return the tokens of one context, or as many as fit in the free memory of every device.

    slots: whose states need room, too; others: free bytes of devices of which each holds as much.
    """
    page_bytes, states, tokens = Counter[torch.device](), Counter[torch.device](), context
    for spec, placement in models:
        for layer, device in zip(spec.attentions, placement.layers, strict=True):
            page_bytes[device] += layer_bytes(layer, 1, name, page_tokens)
            states[device] += state_bytes(layer, slots)
    for device, nbytes in page_bytes.items():
        room = free_memory(device) if device.type == "cuda" else available_memory()
        if room is not None and nbytes:
            room = min([room, *others])
            pages = (int(SHARE * room) - states[device]) // nbytes
            tokens = min(tokens, pages * page_tokens)
    return max(page_tokens, tokens)
