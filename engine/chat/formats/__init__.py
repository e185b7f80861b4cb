"""Prompt formats: a Jinja file each, and a row in `rows.toml`."""

from exl2flow.engine.chat.formats.choose import all_formats, choose_format

__all__ = ["all_formats", "choose_format"]
