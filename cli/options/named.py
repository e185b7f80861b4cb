"""Models on the command line: a folder, or the name of an EXL2 model on the Hub."""

from pathlib import Path

from exl2flow.cli.output.console import say
from exl2flow.core.errors import SourceModelError
from exl2flow.core.model_name import HubName, on_hub


def local(model: Path, *, plain: bool = False) -> Path:
    """Return the folder of a model; one on the Hub is fetched into the Hub's cache first.

    Args:
        model: a folder, or `org/name`, `org/name@revision`, `org/name:4.0`.
        plain: whether progress is lines even on a terminal.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the name means none or several, or is a mistyped path.
    """
    name = named(model)
    if name is None:
        return model
    from exl2flow.cli.work.names import fetched  # imports torch

    return fetched(name, plain=plain)


def named(model: Path) -> HubName | None:
    """Return the name by which the Hub has a model; None for a folder, which goes first.

    Raises:
        SourceModelError: it is a mistyped path.
    """
    name = on_hub(model)
    if name is None:
        if HubName.of(model) is not None:
            say(f"`{model}` is a folder here and is used, not a model on the Hub", style="dim")
        return None
    if name.is_plain and model.parent.is_dir():
        raise SourceModelError(
            f"no folder `{model}`, but `{model.parent}` is one; correct the path, or write "
            f"`{model}@main` or `{model}:4.0` for a model on the Hub"
        )
    return name
