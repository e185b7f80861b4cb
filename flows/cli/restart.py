"""Forgetting the checkpoints of one configuration."""

import shutil

from exl2flow.core.stage import Pipeline


def forget(pipeline: Pipeline) -> None:
    """Delete the folders of this configuration's stages; those of other options stay.

    Raises:
        WorkDirBusy: another process uses them.
    """
    with pipeline.work.lock():
        for name in pipeline.refs:
            shutil.rmtree(pipeline.path(name), ignore_errors=True)
