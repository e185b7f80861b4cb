"""Fetches models that the command line names; its imports take seconds."""

from pathlib import Path

from exl2flow.cli.output.console import say
from exl2flow.cli.output.progress import shown
from exl2flow.core.model_name import HubName
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.named import folder_of


def fetched(name: HubName, *, plain: bool) -> Path:
    """Return the folder of a model in the Hub's cache, with progress while it is fetched."""
    with shown(plain=plain):
        return folder_of(name, Hub.open(), say=lambda line: say(line, style="dim"))
