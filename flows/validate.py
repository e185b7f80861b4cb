"""The flow `validate`: compare finished models with their source."""

from prefect import flow

from exl2flow.core.options.comparison import Comparison as Comparison
from exl2flow.core.options.config import default_work_root
from exl2flow.core.reports import Score
from exl2flow.core.runtime.progress import Tick, report
from exl2flow.core.store.crew import places
from exl2flow.flows.runs.endings import ending
from exl2flow.inference.report.comparison import compared
from exl2flow.inference.validate.stage import judge
from exl2flow.pipeline.conversion import in_a_line
from exl2flow.pipeline.devices import checked_device
from exl2flow.tasks.artifacts import Artifacts, run_artifact
from exl2flow.tasks.compare import comparison_page, sample_text, score_models
from exl2flow.tasks.hub_tasks import fetched_in_flow
from exl2flow.tasks.logs import logged
from exl2flow.tasks.tags import tag_run


@flow(flow_run_name="{config.run_name}", persist_result=False)
@ending
def validate(config: Comparison) -> list[Score]:
    """Score all models, generate a sample from each, publish both as artifacts, and judge.

    Raises:
        ConfigError: a GPU of the split is not there.
        HubError: the reference cannot be fetched.
        ValidationFailed: a model is above a limit.
    """
    base = config.reference or config.models[0]
    models = ", ".join(f"`{model}`" for model in config.models)
    with logged(), run_artifact(base.resolve().name, f"scores of {models}") as watcher:
        tag_run(base)
        watcher.expect(("score", "sample"))
        device = str(checked_device(config))
        options = config.options
        reference = config.reference
        if reference is not None:
            root = default_work_root(config.models[0])
            reference = fetched_in_flow(reference, root, config.token_block)
        scores = score_models(config.models, reference, options, places=places(config.gpus, device))
        samples = []
        for done, model in enumerate(config.models):
            report(Tick(stage="sample", done=done, total=len(config.models), detail=model.name))
            samples.append(sample_text(model, options, device=device, split=config))
        artifacts = Artifacts((reference or base).resolve().name)
        page = comparison_page(scores, samples)
        artifacts.markdown("validation", page, f"Figures, plot and samples of `{config.run_name}`")
        judge(scores, options)
        watcher.finish("; ".join(in_a_line(m.label, m) for m in compared(scores)))
        return scores
