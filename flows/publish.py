"""The flow `publish`: upload converted models to the Hub, verify them, add a card."""

from prefect import flow

from exl2flow.core.options.publication import PublishConfig
from exl2flow.flows.runs.endings import ending
from exl2flow.pipeline.hub.publish import Published
from exl2flow.pipeline.local import PUBLISHING
from exl2flow.tasks.artifacts import run_artifact
from exl2flow.tasks.hub_tasks import publish_models
from exl2flow.tasks.logs import logged


@flow(flow_run_name="{config.repo}", persist_result=False)
@ending
def publish(config: PublishConfig) -> Published:
    """Check, upload, download again, try and release; a repeated run continues where it stopped.

    Raises:
        PublicationRefused: because of quality, licence or missing facts.
        PublicationDamaged: the Hub has other bytes than were sent; the repository stays private.
        HubError: the Hub refuses or cannot be reached.
    """
    with logged(), run_artifact(config.repo.replace("/", "-"), f"`{config.repo}`") as watcher:
        watcher.expect(PUBLISHING)
        published: Published = publish_models(config)
        watcher.finish(published.url)
        return published
