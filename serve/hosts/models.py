"""The models of a server: one is loaded at a time, and another replaces it when asked for."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.serve.errors import ApiError, shown
from exl2flow.serve.hosts.model_host import SOUND_SECONDS, ModelHost, collect

log = logging.getLogger("exl2flow.serve")
REFUSED_SECONDS = 60.0  # before a model that failed to load is tried again
Make = Callable[[Path], ModelHost]


class Models:
    """Names → hosts.

    host: what is loaded. name: of the model that is loaded, or was at last. load_seconds: what
    loading it has taken. created: when the server began.
    """

    def __init__(self, host: ModelHost, make: Make, also: Mapping[str, Path] = {}) -> None:
        """Begin with a host that runs.

        Args:
            host: of the first model.
            make: loads another folder, in a thread.
            also: name → folder of further models, besides those in the folder `models`.
        """
        self.host: ModelHost | None = host
        self.options, self.name, self._make = host.options, host.name, make
        self.load_seconds, self.created = host.load_seconds, host.created
        self._named = {host.name: host.model.spec.source_dir, **also}
        self._users, self._used_at, self._is_free = 0, time.monotonic(), asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        self._failed, self._lost_at = dict[str, tuple[float, str]](), -math.inf
        self.is_draining = self._is_parked = False

    @property
    def state(self) -> str:
        """What the server does; requests are answered if it is `ready` or `idle`."""
        if self.is_draining:
            return "draining"
        if self._change is not None:
            return "loading"
        if self.host is None:
            return "unloaded" if self._is_parked else "idle"
        self.host.look()
        return self.host.state

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that can be loaded, by name; links do not lead out of `--models`."""
        found, inside = {**self._named}, self.options.models
        if inside is not None:
            for config in sorted(inside.glob("*/config.json")):
                folder = config.parent.resolve()
                if folder.is_relative_to(inside.resolve()):
                    found.setdefault(folder.name, folder)
        return found

    @property
    def names(self) -> list[str]:
        """The names that requests may give: the model, alone and with each adapter, and others."""
        ours = [self.name] if self.host is None else self.host.names
        others = self.folders if self.options.swap else []
        return [*dict.fromkeys([*ours, *others, *self.options.aliases])]

    @property
    def progress(self) -> int | None:
        """See `ModelHost`."""
        return None if self.host is None else self.host.progress

    @property
    def count(self) -> int:
        """Requests that are prepared, wait or run."""
        return 0 if self.host is None else self.host.count

    @asynccontextmanager
    async def using(self, name: str = "") -> AsyncIterator[ModelHost]:
        """Keep the host that answers for a name, which may have to be loaded first.

        Raises:
            ApiError: no such model, it cannot be loaded, or the server stops.
        """
        host = await self._host_for(name)
        self._users += 1
        try:
            yield host
        finally:
            self._users, self._used_at = self._users - 1, time.monotonic()
            if not self._users:
                self._is_free.set()

    async def load(self, name: str) -> None:
        """Load a model instead of the one that is loaded.

        Raises:
            ApiError: no such model, or it cannot be loaded.
        """
        if name not in self.folders:
            raise _unknown(name, self.folders)
        self._failed.pop(name, None)
        while self.host is None or self.host.name != name or self.host.state == "failed":
            self._check(name)
            await self._changed(name)
        self._is_parked = False

    async def unload(self) -> None:
        """Free the model; requests are refused until `load`."""
        self._is_parked = True
        while self.host is not None:
            await self._changed(None)

    def renew(self, options: ServeOptions) -> None:
        """Use options that have changed."""
        self.options = options
        if self.host is not None:
            self.host.options = options

    def tick(self) -> None:
        """Look for failures, and free a model that nobody has used for long; called often.

        A model that has lost a process is loaded again, unless it was within the hour.
        """
        if self.host is not None:
            self.host.look()
            is_lost = self.host.is_lost and self.host.state == "failed"
            if is_lost and time.monotonic() - self._lost_at > SOUND_SECONDS:
                self._lost_at = time.monotonic()
                self._begin(self.name)
        limit = self.options.unload_after
        is_old = limit is not None and time.monotonic() - self._used_at > 60 * limit
        if is_old and self.host is not None and not self._users and self._change is None:
            self._begin(None)

    def drain(self) -> None:
        """Take no more requests."""
        self.is_draining = True
        if self.host is not None:
            self.host.state = "draining"

    def cancel(self) -> None:
        """End all texts, within a step."""
        if self.host is not None:
            self.host.cancel()

    async def close(self) -> None:
        """End all texts and threads."""
        if self._change is not None:
            await asyncio.wait({self._change})
        host, self.host = self.host, None
        if host is not None:
            await _close(host)

    def _check(self, name: str) -> None:
        """Raise `ApiError` if a model cannot be had now."""
        if self.is_draining:
            raise ApiError(503, "the server is draining; try again later", code="draining")
        failed_at, why = self._failed.get(name, (-REFUSED_SECONDS, ""))
        if time.monotonic() - failed_at < REFUSED_SECONDS:
            raise ApiError(503, f"{name!r:.80} cannot be loaded: {why}", code="model_not_loaded")

    async def _host_for(self, name: str) -> ModelHost:
        while True:
            wanted = self._answering(name)
            self._check(wanted)
            if self._change is not None:
                await asyncio.wait({self._change})
                continue
            if self.host is not None and self.host.name == wanted:
                return self.host
            if self.host is None and self._is_parked:
                why = "no model is loaded; an admin loads one with POST /v1/model/load"
                raise ApiError(503, why, code="model_not_loaded")
            await asyncio.sleep(0)  # those whom the loaded model answers go first
            await self._changed(wanted)

    def _answering(self, name: str) -> str:
        """Return the model that answers for a name."""
        name = self.options.aliases.get(name, name)
        known = [] if self.host is None else self.host.names
        if name in ("", self.name, *known, *(one.removeprefix(f"{self.name}:") for one in known)):
            return self.name
        if self.options.swap:
            alone = name.rpartition(":")[0]  # with an adapter, which shows once it is loaded
            for one in (name, alone):
                if one in self.folders and one != self.name:
                    return one
        if self.options.strict_names:
            raise _unknown(name, self.names)
        return self.name

    def _begin(self, name: str | None) -> asyncio.Task[None]:
        """Begin to load a model, None: only to free the one that is loaded."""
        self._change = asyncio.get_running_loop().create_task(self._replace(name))
        return self._change

    async def _changed(self, name: str | None) -> None:
        """Wait for the change that is under way or a new one; it goes on if a client leaves."""
        await asyncio.wait({self._change or self._begin(name)})

    async def _replace(self, name: str | None) -> None:
        try:
            before = self.name
            await self._free()
            if name is None or self.is_draining:
                return
            if not await self._load(name) and name != before:
                await self._load(before)
        except Exception:
            log.exception("the loaded model cannot be changed")
        finally:
            self._change = None

    async def _free(self) -> None:
        """Let running texts end, for some time, and free the model."""
        if self.host is None:
            return
        for seconds in (self.options.swap_wait, None):
            self._is_free.clear()
            if self._users:
                try:
                    async with asyncio.timeout(seconds):
                        await self._is_free.wait()
                except TimeoutError:
                    self.host.state = "draining"
                    self.host.cancel()
        host, self.host = self.host, None
        await _close(host)
        del host
        await asyncio.to_thread(collect)
        log.info("unloaded %s", self.name)

    async def _load(self, name: str) -> bool:
        """Load a model; return whether it runs."""
        began = time.monotonic()
        try:
            folder = self.folders.get(name)
            if folder is None:
                raise Exl2FlowError("its folder is gone")
            self.host = await asyncio.to_thread(self._make, folder)
        except Exception as error:
            self._refuse(name, error)
        if self.host is None:  # and the error is gone, whose frames held what was loaded
            await asyncio.to_thread(collect)
            return False
        self.name, self._used_at = name, time.monotonic()
        self.load_seconds = time.monotonic() - began
        log.info("loaded %s in %.1f s", name, self.load_seconds)
        return True

    def _refuse(self, name: str, error: Exception) -> None:
        """Write why a model cannot be loaded, and tell it to clients for some time."""
        why, public = str(error), shown(error)
        if isinstance(error, torch.OutOfMemoryError):
            why = "the GPU has too little memory; load a smaller one, or give fewer `--tokens`"
            public = why
        elif not isinstance(error, Exl2FlowError):
            log.error("loading %s failed", name, exc_info=error)
            why = public = "see the server's log"
        log.error("%s cannot be loaded: %s", name, why)
        self._failed[name] = time.monotonic(), public


def _unknown(name: str, known: Iterable[str]) -> ApiError:
    why = f"no model {name!r:.80}; there is {', '.join(known)}"
    return ApiError(404, why, code="model_not_found", param="model")


async def _close(host: ModelHost) -> None:
    """Close a host; what fails goes to the log, for nobody can do anything about it."""
    try:
        await host.close()
    except Exception:
        log.exception("%s was not closed cleanly", host.name)
