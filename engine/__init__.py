"""The engine that runs models: load them, generate text, converse."""

from exl2flow.engine.adapters import Adapter
from exl2flow.engine.drafts import Draft, HybridDraft, NgramDraft
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
    "NgramDraft",
    "PromptCache",
    "Request",
    "SamplingSettings",
    "load_model",
]
