"""Calibration documents that a program writes better than a person: numbers, logs, records.

Every document comes from its own seeded generator, so the same seed and size give the same
documents everywhere. The makers are in `arithmetic.py` (worked examples) and `records.py`
(logs, configuration, tables); these three files are self-contained.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from exl2flow.calibration_data import arithmetic, records

Maker = Callable[[random.Random], Iterator[str]]

MAKERS: tuple[Maker, ...] = (
    arithmetic.long_multiplication,
    records.access_log,
    records.json_records,
    arithmetic.linear_equations,
    records.timetable,
    records.yaml_service,
    arithmetic.number_systems,
    records.service_log,
    records.csv_measurements,
    records.price_list,
    arithmetic.fractions,
    records.configuration,
    arithmetic.dates,
    records.sql_session,
    arithmetic.long_division,
    records.results_table,
    records.test_run,
    arithmetic.unit_conversions,
    records.hex_dump,
    arithmetic.statistics,
    records.xml_records,
    records.invoice,
    arithmetic.matrices,
    records.boot_log,
    arithmetic.compound_interest,
    arithmetic.truth_table,
    records.shell_session,
    arithmetic.factorizations,
    records.weather_report,
    arithmetic.quadratics,
    records.instrument_table,
    arithmetic.word_problems,
)

WEB = {
    records.timetable,
    records.price_list,
    records.results_table,
    records.invoice,
    records.weather_report,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of the calibration set; `text` has no leading or trailing blank lines."""

    kind: str
    name: str
    language: str
    text: str


def generated(seed: int, size: int) -> list[Document]:
    """Return whole documents with `size` UTF-8 bytes in total, or slightly more."""
    documents: list[Document] = []
    total = 0
    while total < size:
        index = len(documents)
        make = MAKERS[index % len(MAKERS)]
        kind = "web" if make in WEB else "technical"
        # A string seed is hashed the same way on every platform and Python version.
        text = "\n".join(make(random.Random(f"{seed}/{index}"))).strip("\n")
        label = f"{make.__name__.replace('_', '-')}-{index // len(MAKERS) + 1:02d}"
        documents.append(Document(kind=kind, name=label, language="en", text=text))
        total += len(text.encode())
    return documents
