"""Small English morphology for the demo corpus: plurals, past tenses, articles, number words."""

import re
from collections.abc import Mapping

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = [
    "zero",
    "ten",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_DOUBLING = {"rub", "stop", "skip", "pat", "nod", "plan", "beg", "hug", "step", "slip", "chat"}
_GERUND_DOUBLING = {"run", "dig", "shut", "let", "put", "cut", "swim", "sit", "win", "set"}
_VOWEL_SOUND = re.compile(r"\b([Aa]) (?=(?:[aeio]|u(?!ni|se|su)|hour|honest)[a-z])")
_SENTENCE = re.compile(r"(^|\n|[.?!]\s|\.\"\s|[.?!]\"? \")([a-z])")


def number(value: int) -> str:
    """Return a whole number below one million in words."""
    if value < 20:
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if value < 1000:
        hundreds, rest = divmod(value, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {number(rest)}" if rest else "")
    thousands, rest = divmod(value, 1000)
    return f"{number(thousands)} thousand" + (f" {number(rest)}" if rest else "")


def ordinal(value: int) -> str:
    """Return the ordinal of a number below one hundred in words."""
    head, dash, last = number(value).rpartition("-")
    last = last[:-1] + "ieth" if last.endswith("y") else _ORDINALS.get(last, last + "th")
    return head + dash + last


def plural(noun: str, irregular: Mapping[str, str]) -> str:
    """Return the plural of a noun; the last word of a compound is inflected."""
    head, space, last = noun.rpartition(" ")
    if last in irregular:
        return head + space + irregular[last]
    if last.endswith("y") and last[-2] not in "aeiou":
        last = last[:-1] + "ies"
    elif last.endswith(("s", "x", "ch", "sh")):
        last += "es"
    else:
        last += "s"
    return head + space + last


def past(verb: str, irregular: Mapping[str, str]) -> str:
    """Return the simple past of a verb; the first word of a phrase is inflected."""
    first, space, rest = verb.partition(" ")
    if first in irregular:
        first = irregular[first]
    elif first.endswith("e"):
        first += "d"
    elif first.endswith("y") and first[-2] not in "aeiou":
        first = first[:-1] + "ied"
    elif first in _DOUBLING:
        first += first[-1] + "ed"
    else:
        first += "ed"
    return first + space + rest


def gerund(verb: str, irregular: Mapping[str, str]) -> str:
    """Return the -ing form of a verb; the first word of a phrase is inflected."""
    first, space, rest = verb.partition(" ")
    doubled = irregular.get(first, "") == first + first[-1] + "ed"
    if first.endswith("e") and not first.endswith("ee"):
        first = first[:-1]
    elif doubled or first in _DOUBLING or first in _GERUND_DOUBLING:
        first += first[-1]
    return first + "ing" + space + rest


def tidy(text: str) -> str:
    """Correct articles before vowels and capitalise the beginnings of sentences."""
    text = _VOWEL_SOUND.sub(r"\1n ", text)
    text = text.replace('."." ', '." ')
    return _SENTENCE.sub(lambda match: match[1] + match[2].upper(), text)
