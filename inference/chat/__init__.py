"""Conversations with a model, without a terminal: formats, context, answers, files."""

from exl2flow.core.requests.conversation import Answer, PromptFormat, Thinking, Turn
from exl2flow.inference.chat.answering import ChatStatistics, Piece
from exl2flow.inference.chat.formats import all_formats, choose_format
from exl2flow.inference.chat.session import Session

__all__ = [
    "Answer",
    "ChatStatistics",
    "Piece",
    "PromptFormat",
    "Session",
    "Thinking",
    "Turn",
    "all_formats",
    "choose_format",
]
