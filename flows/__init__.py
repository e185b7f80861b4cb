"""The flows and the command line; names are imported on first use, as most need no Prefect.

A flow has the name of its module. The import system would bind the module here, instead of the
flow; `_Flows` leaves these names unbound, so that they always give the flow.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2flow.flows.convert import convert as convert
    from exl2flow.flows.measure import measure as measure
    from exl2flow.flows.publish import publish as publish
    from exl2flow.flows.refine import refine as refine
    from exl2flow.flows.sweep import sweep as sweep
    from exl2flow.flows.validate import validate as validate
    from exl2flow.flows.watch import watch as watch
    from exl2flow.pipeline.local import run_locally as run_locally
    from exl2flow.pipeline.local import sweep_locally as sweep_locally

FLOWS = ("convert", "measure", "publish", "refine", "sweep", "validate", "watch")
MODULES = {name: f"{__name__}.{name}" for name in FLOWS}
MODULES |= dict.fromkeys(("run_locally", "sweep_locally"), "exl2flow.pipeline.local")


class _Flows(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name not in MODULES:
            raise AttributeError(f"module `{__name__}` has no `{name}`")
        return getattr(import_module(MODULES[name]), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in MODULES:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Flows
