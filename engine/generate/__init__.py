"""Text generation: `Generator`, its requests and its events."""

from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.asynchronous import AsyncGenerator
from exl2flow.engine.generate.event import Event, PromptScores, Statistics
from exl2flow.engine.generate.generator import Generator
from exl2flow.engine.generate.job import Job
from exl2flow.engine.generate.prompt_cache import PromptCache

__all__ = [
    "AsyncGenerator",
    "Event",
    "Generator",
    "Job",
    "PromptCache",
    "PromptScores",
    "Request",
    "Statistics",
]
