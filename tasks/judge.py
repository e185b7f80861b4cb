"""The judgement of a refinement on the run's page."""

from exl2flow.core import words
from exl2flow.core.reports import JudgementReport
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.report.tables import markdown_table
from exl2flow.quant.judge.stage import JUDGEMENT_FILE, judgement_in_words
from exl2flow.tasks.artifacts import Artifacts


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish the KL divergence before and after on the rows that were held out to judge."""
    judgement = JudgementReport.from_json(read_json(pipeline.path("judge") / JUDGEMENT_FILE))
    table = markdown_table(
        [
            {"matrices": "old", "KL divergence (nats)": words.divergence(judgement.kl_before)},
            {"matrices": "new", "KL divergence (nats)": words.divergence(judgement.kl_after)},
        ]
    )
    text = judgement_in_words(judgement)
    artifacts.markdown("judgement", f"{text}\n\n{table}\n", text)
