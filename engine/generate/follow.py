"""A follower of a team: `python -m exl2flow.engine.generate.follow RANK FD PID`.

It runs what rank 0, the process PID, tells it over a socket: it loads the same model, makes the
device side of the same generators, and calls the same methods of their runners.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.runtime.memory import free_memory
from exl2flow.engine.cache.paged import reserve
from exl2flow.engine.drafts import NgramDraft
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.engine.loading.team import BEAT, failure_of
from exl2flow.kernels import CacheFormat
from exl2flow.model.tensor_parallel.ranks import Ranks

PR_SET_PDEATHSIG = 1  # Linux's prctl(2)


class Follower:
    """A follower's objects: its rank's model, and runners by their keys."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.objects: dict[int, Any] = {0: self}
        self._ranks: Ranks | None = None
        self._model: LoadedModel | None = None

    def use(self, devices: Sequence[str]) -> None:
        """Take this rank's device."""
        self.device = torch.device(devices[self.rank])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))

    def join(self, method: str, count: int) -> None:
        """Meet the others."""
        device = self.device if self.device.type == "cuda" else None
        self._ranks = Ranks.join(method, rank=self.rank, count=count, device=device, is_led=True)

    def leave(self) -> None:
        """Leave the others."""
        assert self._ranks is not None
        self._ranks.__exit__()

    def load(self, folder: str, options: dict[str, Any]) -> None:
        """Load this rank's part of a model."""
        self._model = load_model(folder, device=str(self.device), ranks=self._ranks, **options)

    def free(self) -> int:
        """Return the free bytes of this rank's GPU."""
        return free_memory(self.device)

    def make(
        self,
        key: int,
        form: CacheFormat,
        pages: int,
        page_tokens: int,
        slots: int,
        max_tokens: int,
        drafts: int,
    ) -> None:
        """Make the device side of a generator; its runner has a key."""
        assert self._model is not None
        placement, spec = self._model.decoder.placement, self._model.spec
        cache = reserve(
            spec,
            pages=pages,
            form=form,
            placement=placement,
            slots=slots,
            page_tokens=page_tokens,
        )
        draft = NgramDraft(tokens=drafts) if drafts else None
        made = DeviceSlots(self._model, cache, slots=slots, max_tokens=max_tokens, draft=draft)
        self.objects[key] = made.runner


class Channel:
    """The socket to rank 0; a thread says that this process lives, and ends it with rank 0.

    beats: whether it says so; libraries may hold the thread up while they are set up.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self.beats = pipe, threading.Lock(), False
        threading.Thread(target=self._beat, name="exl2flow-beat", daemon=True).start()

    def receive(self) -> Any:
        """Return the next command; end with rank 0."""
        try:
            return self._pipe.recv()
        except EOFError:
            os._exit(0)

    def send(self, kind: str, content: Any = None) -> None:
        """Tell rank 0 something."""
        with self._lock:
            self._pipe.send((kind, content))

    def _beat(self) -> None:
        watched = select.poll()
        watched.register(self._pipe, 0)  # whether the other end is closed
        while not watched.poll(1000 * BEAT):
            if self.beats:
                self.send("alive")
        os._exit(0)  # the main thread may wait for rank 0


@torch.inference_mode()
def follow(follower: Follower, channel: Channel) -> None:
    """Obey until rank 0 ends; an error ends this process, and so all of them."""
    while True:
        dropped, key, name, args, kwargs, wants_answer = channel.receive()
        for old in dropped:
            follower.objects.pop(old, None)
        method: Callable[..., Any] = getattr(follower.objects[key], name)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exl2FlowError | torch.OutOfMemoryError):
                traceback.print_exc()
            told = failure_of(error, follower.rank, follower.device)
            if not wants_answer:
                channel.send("failure", told)
                os._exit(1)  # without a word to the others, who wait for this rank
            channel.send("answer", (False, told))
        else:
            if wants_answer:
                channel.send("answer", (True, result))
                channel.beats = True


def main(rank: int, descriptor: int, parent: int) -> None:
    """Follow rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        return
    follow(Follower(rank), Channel(Connection(descriptor)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
