"""Filters: constrain generated texts to prefixes, choices and grammars, behind thoughts or not."""

from exl2flow.core.requests.request import Filter
from exl2flow.engine.filters.choice import PrefixFilter, SelectFilter
from exl2flow.engine.filters.constraint import Allowed, Combined, Constraint
from exl2flow.engine.filters.foreign import ForeignFilter
from exl2flow.engine.filters.grammar import (
    Alternatives,
    GrammarFilter,
    bounded,
    lark_of,
    marks_of,
    prepare,
)
from exl2flow.engine.filters.kept import forget
from exl2flow.engine.filters.phases import Phases

__all__ = [
    "Allowed",
    "Alternatives",
    "Combined",
    "Constraint",
    "Filter",
    "ForeignFilter",
    "GrammarFilter",
    "Phases",
    "PrefixFilter",
    "SelectFilter",
    "bounded",
    "forget",
    "lark_of",
    "marks_of",
    "prepare",
]
