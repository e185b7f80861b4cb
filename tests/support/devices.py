"""Named stand-ins for several GPUs: tensors in main memory that know on which device they would be.

Torch accepts `cpu:1` and forgets the number: `torch.empty(2, device="cpu:1").device` is `cpu`. Here
every call of torch passes `Devices`, which keeps it. As on GPUs, tensors of two devices meet only
in a copy, which is counted; anything else fails. What is made without a device is in main memory
and goes with all of them, unlike there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from exl2flow.kernels.streams import Threads

HOST = torch.device("cpu")
COPIES = ("copy_", "__setitem__")  # these may read what is on another device
MOVES = ("to", "cpu")


class Devices(TorchFunctionMode):
    """Keeps the devices of tensors while it is active, in this thread and in those of `Threads`.

    moves: (source, target, shape) of every copy from one device to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[torch.device, torch.device, tuple[int, ...]]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return device_of(args[0])
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {device_of(x) for x in tensors} - {HOST}
        wanted = self._wanted(name, args, kwargs)
        plain = tree_map_only(torch.device, lambda _: HOST, (args, kwargs))
        found = func(*plain[0], **plain[1])
        if name in COPIES:
            self._copied(args[0], args[-1])
            return found
        if len(there) > 1 and name not in MOVES:
            raise RuntimeError(f"{name}: tensors are on {sorted(map(str, there))}")
        if name in MOVES:
            own = device_of(args[0])
            target = HOST if name == "cpu" else wanted or own
            if target != own:
                found = found.clone() if found is args[0] else found
                self._note(args[0], target)
            return tagged(found, target)
        return tagged(found, wanted or next(iter(there), HOST))

    def _wanted(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device that a call names, if it does."""
        given = kwargs.get("device")
        if name == "to" and given is None:
            given = next((x for x in args[1:] if isinstance(x, torch.device | str)), None)
            other = next((x for x in args[1:] if isinstance(x, torch.Tensor)), None)
            given = device_of(other) if other is not None else given
        return None if given is None else torch.device(given)

    def _copied(self, target: torch.Tensor, source: object) -> None:
        if isinstance(source, torch.Tensor) and device_of(source) != device_of(target):
            self._note(source, device_of(target))

    def _note(self, source: torch.Tensor, target: torch.device) -> None:
        if HOST not in (device_of(source), target):
            self.moves.append((device_of(source), target, tuple(source.shape)))


def device_of(x: torch.Tensor) -> torch.device:
    """Return where a tensor is."""
    return x.__dict__.get("stands_on", HOST)


def tagged(found: Any, device: torch.device) -> Any:
    """Say where the tensors of a result are."""
    for x in tree_iter(found):
        if isinstance(x, torch.Tensor):
            x.__dict__["stands_on"] = device
    return found


@contextmanager
def devices() -> Iterator[Devices]:
    """Make `cpu:0`, `cpu:1` and so on different devices inside the block."""
    mode, do = Devices(), Threads._do

    def with_mode(self: Threads, work: Callable[[], Any]) -> Any:
        with mode:
            return do(self, work)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(Threads, "_do", with_mode)
        yield mode
