"""The flow `publish`: upload converted models to the Hub, verify them, add a card."""

from prefect import flow

from exl2flow.core.options.publication import PublishConfig
from exl2flow.flows.runs.in_flow import cancelled_if_interrupted
from exl2flow.tasks.hub_tasks import publish_models
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publish import Published


@flow(flow_run_name="{config.repo}", on_failure=[cancelled_if_interrupted], persist_result=False)
def publish(config: PublishConfig) -> Published:
    """Check, upload, download again, try and release; a repeated run continues where it stopped.

    Raises:
        PublicationRefused: because of quality, licence or missing facts.
        PublicationDamaged: the Hub has other bytes than were sent; the repository stays private.
        HubError: the Hub refuses or cannot be reached.
    """
    with logged():
        return publish_models(config)
