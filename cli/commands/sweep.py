"""`exl2flow sweep`: one model at several bitrates, from one measurement."""

from exl2flow.cli.options import FlowSwitches, with_options
from exl2flow.cli.work.running import run_command
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sweep import SweepConfig

EXAMPLES = (
    "exl2flow sweep ./Llama-3.2-1B --out ./Llama-3.2-1B-exl2 --bpw 2.5,3,4,5,6",
    "exl2flow sweep ./Llama-3.2-1B --out ./exl2 --bpw 3,4,5,6 --runner processes   (a GPU each)",
    "exl2flow sweep org/name --out ./exl2 --bpw 3,4,5,6 --publish me/name-exl2",
    "A bitrate that fails does not stop the others. Repeat the command to make what is missing.",
)


@with_options()
def sweep(*, config: SweepConfig, switches: FlowSwitches) -> None:
    """Convert a model at several bitrates from one measurement, and compare the results.

    Calibration tokens, sensitivity and measurement are shared by all bitrates.
    """
    if switches.no_prefect and (config.runner != "threads" or (config.workers or 1) > 1):
        raise ConfigError(
            "`--no-prefect` makes one bitrate after the other; leave out `--runner` and `--workers`"
        )
    run_command("sweep", config, switches)
