"""Publishing at the end of a conversion or a sweep, with or without Prefect.

Check everything that could refuse the release first; publish only complete results.
"""

from importlib import import_module
from typing import Any

from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.origin import check_target
from exl2flow.pipeline.run import Prepared


def hub_of(token_block: str | None) -> Hub:
    """Return a client with the token of a Secret block, or that of the environment.

    Raises:
        ConfigError: no such block.
    """
    if token_block is None:
        return Hub.open()
    read_token = import_module("exl2flow.tasks.hub_tasks").read_token  # Prefect is above us
    return Hub.open(read_token(token_block))


def check_release(config: RunOptions) -> None:
    """Check before any work whether the result could be published, if it is to be.

    Raises:
        ConfigError, HubError, PublicationRefused, SourceModelError: see `check_target`.
    """
    target = config.publication
    if target is not None:
        writer, reader = hub_of(target.token_block), hub_of(config.token_block)
        root = config.work_dir_root
        check_target(target, config.source, root, writer=writer, reader=reader)


def release_of(prepared: Prepared[RunOptions], result: Any) -> PublishConfig | None:
    """Return how to publish the finished models of a run, or None.

    Their own measurement is published unless the options name another one.
    """
    config, target = prepared.config, prepared.config.publication
    if target is None:
        return None
    return PublishConfig(
        **dict(target),
        models=tuple(model.out.resolve() for model in prepared.models.values()),
        measurement=config.measurement_file or result.measurement,
        device=config.device,
        work_root=config.work_dir_root,
    )
