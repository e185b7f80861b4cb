"""A team whose followers repeat what this process does with a model that all of them share.

Commands go to each follower over a pipe, tensors through `Ranks`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import distributed

from exl2flow.core.errors import BackendUnavailable, ConfigError
from exl2flow.core.runtime.interrupt import uninterrupted
from exl2flow.core.runtime.team import Team
from exl2flow.kernels import resolve_device
from exl2flow.model.tensor_parallel.ranks import Ranks

FEWER = "give fewer `tokens` or `slots`"
P = ParamSpec("P")
T = TypeVar("T")


def places(tensor_parallel: int | str | Sequence[int], device: str) -> list[torch.device]:
    """Return the device of each rank.

    Args:
        tensor_parallel: how many ranks, `all` GPUs, or the GPUs' indexes.
        device: auto, cpu or cuda; on CPUs ranks are given by number.

    Raises:
        BackendUnavailable: torch cannot use the device, or has no NCCL.
        ConfigError: it is none of these, names a device twice or one that is not there.
    """
    kind, seen = resolve_device(device), torch.cuda.device_count()
    if kind.type == "cuda" and not distributed.is_nccl_available():
        raise BackendUnavailable(
            "this build of torch has no NCCL, through which GPUs exchange their parts; install "
            "one that has, or split layers: `--gpu-split auto`"
        )
    if kind.type == "cpu":
        if not isinstance(tensor_parallel, int) or tensor_parallel < 1:
            raise ConfigError("on CPUs `tensor_parallel` is a number of processes")
        return [kind] * tensor_parallel
    if tensor_parallel == "all":
        tensor_parallel = seen
    if isinstance(tensor_parallel, str) or tensor_parallel == 0:
        raise ConfigError(f"`tensor_parallel` is {tensor_parallel!r}; give a number of GPUs or all")
    chosen = range(tensor_parallel) if isinstance(tensor_parallel, int) else tensor_parallel
    if len({*chosen}) < len(chosen):
        raise ConfigError(f"`tensor_parallel` names a GPU twice: {', '.join(map(str, chosen))}")
    if absent := [index for index in chosen if not 0 <= index < seen]:
        there = ", ".join(map(str, range(seen)))
        raise ConfigError(f"tensor parallel needs GPU {absent[0]}, but torch sees {there}")
    return [torch.device("cuda", index) for index in chosen]


class Counterpart(NamedTuple):
    """The followers' copy of an object: their team, and the key that it has there."""

    team: "ModelTeam"
    key: int


class Mirrored(Protocol):
    """An object whose `mirrored` methods followers run, too; None: nobody follows."""

    counterpart: Counterpart | None


S = TypeVar("S", bound=Mirrored)


def mirrored(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let followers run a method with the same arguments, which can be pickled."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.counterpart is None or self.counterpart.team.is_leading:
            return method(self, *args, **kwargs)
        with self.counterpart.team.leading(self.counterpart.key, method.__name__, *args, **kwargs):
            return method(self, *args, **kwargs)

    return run


class ModelTeam(Team[Ranks]):
    """The followers of this process; they end with it, or when nothing refers to the team.

    devices: of the ranks. is_leading: whether followers run what this process runs now.
    """

    program, again = "exl2flow.engine.generate.follow", "load the model again"
    remedy = FEWER

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Start a process for each device but the first."""
        super().__init__(devices)
        self.is_leading, self._keys = False, count(1)

    def meet(self, method: str) -> Ranks:
        """See `Team` of `core.runtime.team`."""
        device = self.devices[0] if self.devices[0].type == "cuda" else None
        return Ranks.join(method, rank=0, count=len(self.devices), device=device, is_led=True)

    def join(self) -> Ranks:
        """Meet the followers; what they exchange is refused where they do not follow."""
        self.use()()
        return replace(super().join(), guard=self._check_leading)

    def free(self) -> list[int]:
        """Return the free bytes of each follower's GPU; on CPUs there is nothing to ask."""
        return self.begin("free")() if self.devices[0].type == "cuda" else []

    def mirror(self, *args: Any) -> Counterpart:
        """Let followers make what `follow.Follower.make` makes, and return where it is."""
        key = next(self._keys)
        self.begin("make", key, *args)()
        return Counterpart(self, key)

    @contextmanager
    def leading(self, key: int, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Let followers run a method of an object while this process runs the block.

        Raises:
            Exl2FlowError: a follower is lost, or the block failed; then all of them end.
        """
        with uninterrupted():  # others do not know of an interrupt, and go on
            self.tell(key, name, args, kwargs, wants_answer=False)
            self.is_leading = True
            try:
                yield
            except Exception as error:
                raise self.lost(error) from error
            finally:
                self.is_leading = False

    def _check_leading(self) -> None:
        if not self.is_leading:
            raise ConfigError(
                "this needs a whole model, not one that ranks share: load it without "
                "`tensor_parallel`"
            )
