"""`exl2flow refine`: better codes and scales for an EXL2 model, at the same size."""

from exl2flow.cli.options import FlowSwitches, with_options
from exl2flow.cli.work.running import run_command
from exl2flow.core.options.refine import RefinementConfig

EXAMPLES = (
    "exl2flow refine ./Llama-3.2-1B-4.0bpw --reference ./Llama-3.2-1B --out ./refined",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --quality best",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --dry-run   (only checks)",
    "To resume an interrupted run, repeat the command.",
)


@with_options()
def refine(*, config: RefinementConfig, switches: FlowSwitches) -> None:
    """Refit the codes and scales of an EXL2 model to its source.

    Bit widths, groups and permutations stay, so the size is the same to the byte. Held-out rows of
    text judge the result: if they do not get closer to the source, the old matrices stay.
    """
    run_command("refine", config, switches)
