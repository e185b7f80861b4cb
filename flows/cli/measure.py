"""`exl2flow measure`: one measurement for any number of bitrates."""

import shutil

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.flows.cli.console import emit_json, tell
from exl2flow.flows.cli.options import AsJson, Restart, with_options
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.running import forget
from exl2flow.flows.cli.sources import with_local_source

FILE_NAME = "measurement.json"
EXAMPLES = (
    "Examples:",
    "exl2flow measure ./Llama-3.2-1B --out ./measurement.json",
    "exl2flow convert ./Llama-3.2-1B --out ./3bpw --bpw 3 --measurement ./measurement.json",
)


@with_options()
def measure(
    *,
    config: MeasureConfig,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Measure the size and the error of every bit-width candidate.

    The measurement depends on the model and the calibration, not on the bitrate. exllamav2 reads
    the file, too, if it was made with `--sensitivity error`.
    """
    target = config.out / FILE_NAME if config.out.is_dir() else config.out
    if target.suffix != ".json":
        raise ConfigError(f"`--out {target}` is neither a folder nor a name that ends in `.json`")
    config = config.model_copy(update={"out": target})
    conversion = with_local_source(config, plain=as_json, renew=restart).conversion()
    from exl2flow.core.store.files import replacing  # these import torch
    from exl2flow.flows.runs.conversion import open_pipeline
    from exl2flow.flows.runs.local import run_locally
    from exl2flow.tasks.stages import MEASURE_STAGES

    if restart:
        forget(open_pipeline(conversion, MEASURE_STAGES))
    with shown(plain=as_json):
        folder = run_locally(conversion, stages=MEASURE_STAGES).stages["measure"]
    with (folder / FILE_NAME).open("rb") as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy)
    if as_json:
        emit_json({"measurement": str(target.resolve()), "folder": str(folder)})
    else:
        tell(f"measurement  {target.resolve()}")
