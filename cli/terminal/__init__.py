"""The terminal of `exl2flow chat`: input, streamed Markdown, commands."""
