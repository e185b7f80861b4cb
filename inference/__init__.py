"""Load, run, score and inspect models."""

from exl2flow.inference.adapters import Adapter
from exl2flow.inference.drafts import Draft, NgramDraft
from exl2flow.inference.generate import (
    AsyncGenerator,
    Event,
    Generator,
    Job,
    PromptCache,
    Request,
)
from exl2flow.inference.loading.load import LoadedModel, load_model
from exl2flow.inference.sampling import SamplingSettings

__all__ = [
    "Adapter",
    "AsyncGenerator",
    "Draft",
    "Event",
    "Generator",
    "Job",
    "LoadedModel",
    "NgramDraft",
    "PromptCache",
    "Request",
    "SamplingSettings",
    "load_model",
]
