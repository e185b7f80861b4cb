"""`exl2flow measure`: one measurement for any number of bitrates."""

from exl2flow.cli.options import RunSwitches, with_options
from exl2flow.cli.work.running import run_command
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.measure import MeasureConfig

EXAMPLES = (
    "exl2flow measure ./Llama-3.2-1B --out ./measurement.json",
    "exl2flow convert ./Llama-3.2-1B --out ./3bpw --bpw 3 --measurement ./measurement.json",
)


@with_options()
def measure(*, config: MeasureConfig, switches: RunSwitches) -> None:
    """Measure the size and the error of every bit-width candidate.

    The measurement depends on the model and the calibration, not on the bitrate. exllamav2 reads
    the file, too, if it was made with `--sensitivity error` and the model has no experts.
    """
    target = config.file
    if target.suffix != ".json":
        raise ConfigError(f"`--out {target}` is neither a folder nor a name that ends in `.json`")
    config = config.model_copy(update={"out": target})
    if config.runner is not None:  # whose workers take tasks of a flow
        switches = switches.model_copy(update={"no_prefect": False})
    run_command("measure", config, switches)
