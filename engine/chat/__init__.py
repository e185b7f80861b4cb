"""Conversations with a model, without a terminal: formats, context, answers, files, calls."""

from exl2flow.core.requests.conversation import Answer, PromptFormat, Thinking, Turn
from exl2flow.engine.chat.answering import ChatStatistics, Piece
from exl2flow.engine.chat.formats import all_formats, choose_format
from exl2flow.engine.chat.session import Session
from exl2flow.engine.chat.tool_events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Parsed,
    ToolText,
)
from exl2flow.engine.chat.tool_grammar import ToolGrammar, tool_grammar
from exl2flow.engine.chat.tool_parser import ToolParser, parse_calls
from exl2flow.engine.chat.tools import (
    ToolFormat,
    all_tool_formats,
    named_tool_format,
    tool_format,
)

__all__ = [
    "Answer",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatStatistics",
    "Parsed",
    "Piece",
    "PromptFormat",
    "Session",
    "Thinking",
    "ToolFormat",
    "ToolGrammar",
    "ToolParser",
    "ToolText",
    "Turn",
    "all_formats",
    "all_tool_formats",
    "choose_format",
    "named_tool_format",
    "parse_calls",
    "tool_format",
    "tool_grammar",
]
