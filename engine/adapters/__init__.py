"""Adapters: low-rank changes to a model (LoRA), chosen by each text."""

from exl2flow.engine.adapters.adapter import Adapter, adapters_of, salt_of
from exl2flow.engine.adapters.slots import AdapterSlots, Used

__all__ = ["Adapter", "AdapterSlots", "Used", "adapters_of", "salt_of"]
