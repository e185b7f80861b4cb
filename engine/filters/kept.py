"""Tables that filters keep of a tokenizer, which would outlive its model."""

from exl2flow.engine.filters import choice, grammar, phases
from exl2flow.model.text.spelling import spelling_of


def forget() -> None:
    """Forget all tokenizers: vocabularies, compiled grammars, spellings; they can be made again."""
    for kept in (grammar.KEPT, choice.KEPT, phases.KEPT, (spelling_of,)):
        for one in kept:
            one.cache_clear()
