"""The flows and the command line.

Flows are imported on first use, because most commands need no Prefect. A flow has the name of its
module, which the import system binds here; properties of the package give the flow in its place.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2flow.flows.convert import convert
    from exl2flow.flows.local import run_locally, sweep_locally
    from exl2flow.flows.measure import measure
    from exl2flow.flows.publish import publish
    from exl2flow.flows.sweep import sweep
    from exl2flow.flows.validate import validate
    from exl2flow.flows.watch import watch

__all__ = [
    "convert",
    "measure",
    "publish",
    "run_locally",
    "sweep",
    "sweep_locally",
    "validate",
    "watch",
]


def _member(module: str, name: str) -> property:
    def find(package: ModuleType) -> object:
        return getattr(import_module(f"{__name__}.{module}"), name)

    def keep(package: ModuleType, value: object) -> None:
        """Let the import system believe that it bound the submodule."""

    return property(find, keep)


class _Flows(ModuleType):
    convert = _member("convert", "convert")
    measure = _member("measure", "measure")
    publish = _member("publish", "publish")
    run_locally = _member("local", "run_locally")
    sweep = _member("sweep", "sweep")
    sweep_locally = _member("local", "sweep_locally")
    validate = _member("validate", "validate")
    watch = _member("watch", "watch")


sys.modules[__name__].__class__ = _Flows
