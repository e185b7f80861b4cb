"""The flow `publish`: converted models go to the Hub, verified, with a card."""

from prefect import flow

from exl2flow.core.publication import PublishConfig
from exl2flow.flows.runs import cancelled_if_interrupted
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publish import Published
from exl2flow.tasks.publishing import publish_models


@flow(
    name="publish",
    flow_run_name="{config.repo}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def publish(config: PublishConfig) -> Published:
    """Check, upload, download again, try and release; a repeated run goes on where it stopped.

    Raises:
        PublicationRefused: quality, licence or missing facts speak against it.
        PublicationDamaged: what arrived is not what was sent; the repository stays private.
        HubError: the Hub refuses or cannot be reached.
    """
    with logged():
        return publish_models(config)
