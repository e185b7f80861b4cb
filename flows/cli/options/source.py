"""The options about the form in which a source is stored."""

from exl2flow.flows.cli.options.setting import Panel, Setting

LOSSY_SOURCE = Setting(
    flag="--lossy-source",
    is_rare=True,
    field="lossy_source",
    metavar="",  # a switch, which typer would show as `<bool>`
    default="refuse",
    help="Accept a source in GPTQ form: its decoded values are rounded once more, errors add up.",
)
FORM_OF_SOURCE: Panel = ("Source", (LOSSY_SOURCE,))
