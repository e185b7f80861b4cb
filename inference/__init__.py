"""Made with the engine: scores, reports, a model's text for calibration, timings.

The names with which programs load and run models are `exl2flow.engine`'s.
"""

import sys
from importlib import import_module

from exl2flow.engine import (
    Adapter,
    AsyncGenerator,
    Draft,
    Event,
    Generator,
    HybridDraft,
    Job,
    LoadedModel,
    Mtp,
    NgramDraft,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)

__all__ = [
    "Adapter",
    "AsyncGenerator",
    "Draft",
    "Event",
    "Generator",
    "HybridDraft",
    "Job",
    "LoadedModel",
    "Mtp",
    "NgramDraft",
    "PromptCache",
    "Request",
    "SamplingSettings",
    "load_model",
]

# programs import these rooms of the engine by the names that they had here
for _room in ("adapters", "chat", "drafts", "filters", "generate", "sampling"):
    sys.modules[f"{__name__}.{_room}"] = import_module(f"exl2flow.engine.{_room}")
