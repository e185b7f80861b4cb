"""The flow `sweep`: one model at several bits per weight, from one measurement."""

from prefect import flow

from exl2flow.core.interrupt import listening
from exl2flow.core.sweep import SweepConfig
from exl2flow.flows.bitrates import Sweep, conclude_sweep, preflight_sweep, raise_failures
from exl2flow.flows.conversion import open_pipeline
from exl2flow.flows.runners import make_all
from exl2flow.flows.runs import cancelled_if_interrupted
from exl2flow.tasks.compare import publish_comparison
from exl2flow.tasks.fetch import with_local_source
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import MEASURE_STAGES
from exl2flow.tasks.tags import tag_run


@flow(
    name="sweep",
    flow_run_name="{config.run_name}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def sweep(config: SweepConfig) -> Sweep:
    """Measure once, make every bitrate, compare all; finished stages are cached.

    Raises:
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates could not be made; the others are.
    """
    with logged(), listening() as stop:
        tag_run(config.source, config.runner, *(c.target for c in config.conversions().values()))
        config = with_local_source(config)
        preflight_sweep(config)
        run_stages(open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES))
        failures = make_all(config, stop)
        made = conclude_sweep(config, failures)
        publish_comparison(config.source, config.run_name, made.scores, made.samples)
        raise_failures(config, failures)
        return made
