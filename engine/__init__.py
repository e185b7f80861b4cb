"""The engine that runs models: load them, generate text, converse."""

from exl2flow.engine.adapters import Adapter
from exl2flow.engine.drafts import Draft, HybridDraft, Mtp, NgramDraft
from exl2flow.engine.generate import (
    AsyncGenerator,
    Event,
    Generator,
    Job,
    PromptCache,
    Request,
)
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.engine.sampling import SamplingSettings

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
