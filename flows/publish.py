"""The flow `publish`: converted models go to the Hub, verified, with a card."""

from prefect import flow

from exl2flow.core.publication import PublishConfig
from exl2flow.flows.runs import cancelled_if_interrupted
from exl2flow.tasks.artifacts import Artifacts
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publish import Published
from exl2flow.tasks.publishing import publication_page, publish_models


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
        published = publish_models(config)
        artifacts = Artifacts(config.repo.replace("/", "-"))
        artifacts.markdown("published", publication_page(config.repo, published), config.repo)
        return published
