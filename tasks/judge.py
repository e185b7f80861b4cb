"""The judgement of a refinement on the run's page."""

from exl2flow.core.files import read_json
from exl2flow.core.stage import Pipeline
from exl2flow.quant.judge.stage import JUDGEMENT_FILE, judgement_in_words
from exl2flow.tasks.artifacts import Artifacts, markdown_table


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish the KL divergence before and after on the rows that were held out to judge."""
    judgement = read_json(pipeline.path("judge") / JUDGEMENT_FILE)
    table = markdown_table(
        [
            {"matrices": "old", "KL divergence (nats)": f"{judgement['kl_before']:.5f}"},
            {"matrices": "new", "KL divergence (nats)": f"{judgement['kl_after']:.5f}"},
        ]
    )
    text = judgement_in_words(judgement)
    artifacts.markdown("judgement", f"{text}\n\n{table}\n", text)
