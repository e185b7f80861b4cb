"""Python's garbage collection, kept from where it would harm."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection in this process, unless it is off already."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def only_new_are_collected() -> None:
    """Collect all garbage, and let later collections pass over what is left.

    A collection of all objects stops every thread: half a second in a server with its libraries.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
