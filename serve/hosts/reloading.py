"""The configuration of a running server, read again at SIGHUP and when its file changes."""

import logging
from collections.abc import Callable
from pathlib import Path

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.serving import ServeOptions

State = tuple[int, int, int] | None  # of a file
log = logging.getLogger("exl2flow.serve")
TABLES = {"defaults", "forced", "aliases"}
RELOADED = TABLES | {"drain", "max_answer", "strict", "strict_names", "waiting", "wait_seconds"}


class Configuration:
    """Options of which some change meanwhile; `on_reload` is called each time that they are read.

    What raises `ConfigError` there is named in the log, and keeps what it had.
    """

    def __init__(
        self, options: ServeOptions, read: Callable[[], ServeOptions], path: Path | None
    ) -> None:
        """read: returns the options as they are now. path: whose changes are noticed."""
        self.options, self._read, self.path = options, read, path
        self.on_reload: list[Callable[[], object]] = []
        self._seen = self._state(None)

    def look(self) -> None:
        """Read the options again if their file has changed."""
        if self._state(self._seen) != self._seen:
            self.reload()

    def reload(self) -> None:
        """Read the options again."""
        self._seen = self._state(self._seen)
        for step in (self._update, *self.on_reload):
            try:
                step()
            except ConfigError as error:
                log.error("kept as it was: %s", error)

    def _update(self) -> None:
        new, old = vars(self._read()), vars(self.options)
        changed = [name for name in new if new[name] != old[name]]
        update = {name: new[name] for name in changed if name in RELOADED}
        self.options = self.options.model_copy(update=update)
        log.info("configuration read; changed: %s", ", ".join(update) or "nothing")
        if rest := [name for name in changed if name not in RELOADED]:
            log.warning("changes that need a restart: %s", ", ".join(rest))

    def _state(self, missing: State) -> State:
        """Return what differs once the file is written, or `missing` if it is not there."""
        try:
            state = None if self.path is None else self.path.stat()
        except OSError:
            return missing
        return None if state is None else (state.st_mtime_ns, state.st_size, state.st_ino)
