"""`exl2flow convert`: from a Hugging Face folder to a validated EXL2 model."""

from exl2flow.cli.options import FlowSwitches, with_options
from exl2flow.cli.work.running import run_command
from exl2flow.core.options.config import ConversionConfig

EXAMPLES = (
    "exl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-4.0bpw --bpw 4.0",
    "exl2flow convert ./Llama-3.2-1B --out ./out --fit 24GB   (the best that fits a card)",
    "exl2flow convert org/name --out ./out --bpw 4   (fetches the model from the Hub)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --bpw 2.5 --dry-run   (only checks)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --calibration mine.parquet --rows 64",
    "exl2flow convert org/name --out ./out --bpw 4 --publish me/name-exl2",
    "To resume an interrupted conversion, repeat the command. Another `--bpw` with the same "
    "`--work-root` reuses the measurement.",
)


@with_options()
def convert(*, config: ConversionConfig, switches: FlowSwitches) -> None:
    """Convert a Hugging Face model into an EXL2 model.

    Stages: tokenize, sensitivity, measure, allocate, quantize, compile, validate; some options add
    compose before tokenize, tune after quantize; a block for drafts (MTP) adds mtp before compile.
    Each resumes where it stopped and is kept in the work root.
    """
    run_command("convert", config, switches)
