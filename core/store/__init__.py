"""The on-disk store: atomic files, manifests, stages, sources, and what changed in them."""

from exl2flow.core.store.store import StageRef

__all__ = ["StageRef"]  # by this path, which results that Prefect keeps in work roots name
