"""Publishing at the end of a conversion or a sweep, with or without Prefect.

Check everything that could refuse the release first; publish only complete results.
"""

from importlib import import_module

from exl2flow.core.options.base import MEASUREMENT_FILE
from exl2flow.core.options.config import RunOptions, SharedOptions
from exl2flow.core.options.publication import PublishConfig, PublishOptions
from exl2flow.pipeline.conversion import conversions_of, open_pipeline
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.origin import check_target
from exl2flow.pipeline.stages import MEASURE_STAGES


def hub_of(token_block: str | None) -> Hub:
    """Return a client with the token of a Secret block, or that of the environment.

    Raises:
        ConfigError: no such block.
    """
    if token_block is None:
        return Hub.open()
    read_token = import_module("exl2flow.tasks.hub_tasks").read_token  # Prefect is above us
    return Hub.open(read_token(token_block))


def target_of(config: RunOptions) -> PublishOptions | None:
    """Return where to publish the result, with the token block to use; None: nowhere."""
    if not isinstance(config, SharedOptions) or config.publish is None:
        return None
    block = config.publish.token_block or config.token_block
    return config.publish.model_copy(update={"token_block": block})


def check_release(config: RunOptions) -> None:
    """Check before any work whether the result could be published, if it is to be.

    Raises:
        ConfigError, HubError, PublicationRefused, SourceModelError: see `check_target`.
    """
    target = target_of(config)
    if target is not None:
        writer, reader = hub_of(target.token_block), hub_of(config.token_block)
        root = config.work_dir_root
        check_target(target, config.source, root, writer=writer, reader=reader)


def release_of(config: RunOptions) -> PublishConfig | None:
    """Return how to publish the finished models of a run, or None.

    Their own measurement is published unless the options name another one.
    """
    target = target_of(config)
    if target is None:
        return None
    models = list(conversions_of(config).values())
    measurement = getattr(config, "measurement", None)
    if measurement is None:
        measured = open_pipeline(models[0], MEASURE_STAGES)
        measurement = measured.path("measure") / MEASUREMENT_FILE
    return PublishConfig(
        **dict(target),
        models=tuple(model.out.resolve() for model in models),
        measurement=measurement,
        device=config.device,
        work_root=config.work_dir_root,
    )
