"""Help of commands in words: typer's own shows types of Python, and brackets within brackets."""

from typing import Any

from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup


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


class HelpGroup(TyperGroup):
    """Commands with readable help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return options, `--help` included."""
        return [_readable(parameter) for parameter in super().get_params(ctx)]


def _readable(parameter: Any) -> Any:
    """Show a default as `[default: 115]`, no type of an argument, no value of a switch."""
    if isinstance(shown := parameter.show_default, str):  # typer's own adds parentheses
        parameter.help = f"{parameter.help} [dim]{escape(f'[default: {shown}]')}[/dim]"
        parameter.show_default = False
    if isinstance(parameter, TyperArgument):
        parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # of one
    elif parameter.is_flag:
        parameter.metavar = ""
    elif parameter.metavar is None:
        parameter.metavar = parameter.name.upper()
    return parameter
