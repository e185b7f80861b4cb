"""Bounds of length, number and size in a request: types of fields, and a body.

Every bound is far above what clients send; within it, no request holds the event loop or the
interpreter for long. `docs/reference/serving.md` lists them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema, to_json

from exl2flow.serve.errors import ApiError

MOST_STOPS, MOST_PROMPTS, MOST_CHOICES, MOST_TOOLS = 64, 64, 8, 128
MOST_FIELDS = 256  # of a body, unknown ones included
MOST_MESSAGES, MOST_DOCUMENTS, MOST_ADAPTERS = 1 << 14, 1 << 10, 16
MOST_BREAKERS, MOST_BANS = 64, 1 << 10
MOST_CHOICE_TEXTS = 1 << 12  # of a constraint
MOST_IDS = 1 << 20  # of a prompt
MOST_KNOWN_IDS, MOST_BIASES = 1 << 18, 1 << 16  # of a vocabulary
LONGEST_TEXT = 4 << 20  # characters of a prompt
LONGEST_NAME, LONGEST_STOP, LONGEST_BREAKER, LONGEST_PATH = 1 << 10, 1 << 10, 1 << 8, 1 << 12
LONGEST_BANS = 1 << 16  # bytes of all banned strings
LONGEST_SCHEMA = 256 << 10  # characters of a grammar or a schema
LONGEST_PATTERN = 64 << 10  # of an expression, whose compilation holds other texts up
LONGEST_ID_LIST = 2 << 20  # characters of ids in a text
LARGEST_NUMBER = 1e30  # fp32 holds it
LARGEST_COUNT, LARGEST_SEED, LARGEST_ID = 2**53, 2**64, 2**31
LARGEST_BODY = 8 << 20  # bytes
DEPTH = 64  # of lists and objects within each other
# of a whole body, counted before it is parsed
MOST_VALUES, MOST_TEXTS, MOST_CONTAINERS = 1_200_000, 1 << 18, 1 << 16


@dataclass(frozen=True, slots=True)
class Size:
    """Bound of what may have any form: bytes of its JSON."""

    most: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """See pydantic."""
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, given: Any) -> Any:
        if len(to_json(given)) > self.most:
            raise ValueError(f"it has more than {self.most} bytes")
        return given


def most(count: int) -> Any:
    """Return the bound of a list or a mapping, of which no more than the first error is kept."""
    return Field(max_length=count, fail_fast=True)


def _one_or_list(read: Callable[[str], list[Any]], kind: Any = str) -> BeforeValidator:
    """Take a text as well as a list; read: makes a list of the text."""

    def listed(given: Any) -> Any:
        return read(given) if isinstance(given, str) else given

    return BeforeValidator(listed, json_schema_input_type=str | list[kind])


def _breakers(given: str) -> list[str]:
    """Return the texts of a list that is spelled as JSON, as SillyTavern sends it, or the text."""
    if not given.startswith("[") or len(given) > LONGEST_SCHEMA:
        return [given]
    try:
        return [str(text) for text in json.loads(given)]
    except (ValueError, RecursionError):
        return [given]


def _ids(given: str) -> list[int]:
    """Return ids in a text, as TabbyAPI takes them."""
    if len(given) > LONGEST_ID_LIST:
        raise ValueError(f"it has more than {LONGEST_ID_LIST} characters")
    return [int(t) for t in given.replace(",", " ").split() if t.isdecimal()]


Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Schema = Annotated[str, Field(max_length=LONGEST_SCHEMA)]
Pattern = Annotated[str, Field(max_length=LONGEST_PATTERN)]
Place = Annotated[str, Field(max_length=LONGEST_PATH)]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Whole = Annotated[int, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)]
Id = Annotated[int, Field(ge=-LARGEST_ID, le=LARGEST_ID)]
Ids = Annotated[list[Id], most(MOST_IDS)]
Prompt = Text | Ids | Annotated[list[Text | Ids], most(MOST_PROMPTS)]
KnownIds = Annotated[list[Id], most(MOST_KNOWN_IDS)]
IdsOrText = Annotated[KnownIds, _one_or_list(_ids, int)]
Biases = Annotated[dict[Annotated[str, Field(max_length=20)], Number], most(MOST_BIASES)]
Stops = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_STOP)]],
    most(MOST_STOPS),
    _one_or_list(lambda text: [text]),
]
Bans = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_STOP)]],
    most(MOST_BANS),
    Size(LONGEST_BANS),
    _one_or_list(lambda text: [text]),
]
Breakers = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_BREAKER)]],
    most(MOST_BREAKERS),
    _one_or_list(_breakers),
]
ChoiceTexts = Annotated[list[Schema], most(MOST_CHOICE_TEXTS), Size(LONGEST_SCHEMA)]
Wishes = Annotated[dict[str, Any], Size(1 << 16)]  # small objects
Variables = Annotated[dict[str, Any], Size(1 << 20)]
Constraint = Annotated[dict[str, Any], Size(LONGEST_SCHEMA)]
Messages = Annotated[list[dict[str, Any]], most(MOST_MESSAGES), Size(LARGEST_BODY)]
Tools = Annotated[list[dict[str, Any]], most(MOST_TOOLS), Size(1 << 20)]
Documents = Annotated[list[dict[str, Any]], most(MOST_DOCUMENTS), Size(LONGEST_TEXT)]


def check_body(data: bytes) -> bytes:
    """Return the bytes of JSON that is small enough to be parsed; raises `ApiError`.

    What bytes alone say is an upper bound, which is nearly always enough.
    """
    marks = sum(map(data.count, (b",", b"[", b"{")))
    if marks < MOST_CONTAINERS and data.count(b'"') < MOST_TEXTS:
        return data
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
    except UnicodeDecodeError:
        return data  # no JSON, which the parser says
    plain = text.replace("\\\\", "").replace('\\"', "")
    texts, outside = plain.count('"') // 2, ""
    if texts <= MOST_TEXTS:
        outside = "".join(plain.split('"')[::2])
    containers = outside.count("[") + outside.count("{")
    rows = (
        (texts, MOST_TEXTS, "texts and names"),
        (containers, MOST_CONTAINERS, "lists and objects"),
        (containers + outside.count(","), MOST_VALUES, "values"),
    )
    for count, most, what in rows:
        if count > most:
            raise ApiError(400, f"the body has {count} {what}; it may have {most}")
    return data
