"""Help of commands in words: typer's own shows types of Python, and brackets within brackets."""

from textwrap import shorten
from typing import Any

from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup

BRIEF = 70  # columns of a completion's help
DEFAULT = " [dim]"  # in the help of an option, before its default


class HelpCommand(TyperCommand):
    """A command with readable help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options, `--help` included."""
        return [_readable(parameter) for parameter in super().get_params(ctx)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name: FOLDER, in brackets if it may be left out."""
        arguments = [each for each in self.params if isinstance(each, TyperArgument)]
        names = [str(each.display_name_raw) for each in arguments]
        given = zip(arguments, names, strict=True)
        return ["[OPTIONS]", *(name if each.required else f"[{name}]" for each, name in given)]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what completes a word in a shell, also options that only `--help-all` lists."""
        for parameter in self.params:
            parameter.hidden = False  # type: ignore[attr-defined]  # arguments and options have it
        return [*map(_brief, super().shell_complete(ctx, incomplete))]


class HelpGroup(TyperGroup):
    """Commands with readable help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return options, `--help` included."""
        return [_readable(parameter) for parameter in super().get_params(ctx)]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what completes a word in a shell."""
        return [*map(_brief, super().shell_complete(ctx, incomplete))]


def _brief(item: Any) -> Any:
    """Shorten a completion's help to a line; fish takes further lines for further completions."""
    text = (item.help or "").partition(DEFAULT)[0].replace("'", "’")  # zsh would drop it
    item.help = shorten(text, BRIEF, placeholder="…") or None
    return item


def _readable(parameter: Any) -> Any:
    """Show a default as `[default: 115]`, no type of an argument, no value of a switch."""
    if isinstance(shown := parameter.show_default, str):  # typer's own adds parentheses
        parameter.help = f"{parameter.help}{DEFAULT}{escape(f'[default: {shown}]')}[/dim]"
        parameter.show_default = False
    if isinstance(parameter, TyperArgument):
        parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # of one
    elif parameter.is_flag:
        parameter.metavar = ""
    elif parameter.metavar is None:
        parameter.metavar = parameter.name.upper()
    return parameter
