"""A Hub for each test, and this process as its client."""

from hub_fixtures import converted, hub, models, tiny, tiny_source

__all__ = ["converted", "hub", "models", "tiny", "tiny_source"]
