"""Calibration documents that a program writes better than a person: numbers, logs, records.

Every document comes from its own seeded generator, so the same seed and size give the same
documents everywhere. The makers are in `arithmetic.py` (worked examples) and `records.py`
(logs, configuration, tables); these three files are self-contained.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from exl2flow.calibration_data import arithmetic, records

Maker = Callable[[random.Random], str]

MAKERS: tuple[tuple[str, str, Maker], ...] = (
    ("technical", "long-multiplication", arithmetic.long_multiplication),
    ("technical", "access-log", records.access_log),
    ("technical", "json-records", records.json_records),
    ("technical", "linear-equations", arithmetic.linear_equations),
    ("web", "timetable", records.timetable),
    ("technical", "yaml-service", records.yaml_service),
    ("technical", "number-systems", arithmetic.number_systems),
    ("technical", "service-log", records.service_log),
    ("technical", "csv-measurements", records.csv_measurements),
    ("web", "price-list", records.price_list),
    ("technical", "fractions", arithmetic.fractions),
    ("technical", "configuration", records.configuration),
    ("technical", "dates", arithmetic.dates),
    ("technical", "sql-session", records.sql_session),
    ("technical", "long-division", arithmetic.long_division),
    ("web", "results-table", records.results_table),
    ("technical", "test-run", records.test_run),
    ("technical", "unit-conversions", arithmetic.unit_conversions),
    ("technical", "hex-dump", records.hex_dump),
    ("technical", "statistics", arithmetic.statistics),
    ("technical", "xml-records", records.xml_records),
    ("web", "invoice", records.invoice),
    ("technical", "matrices", arithmetic.matrices),
    ("technical", "boot-log", records.boot_log),
    ("technical", "compound-interest", arithmetic.compound_interest),
    ("technical", "truth-table", arithmetic.truth_table),
    ("technical", "shell-session", records.shell_session),
    ("technical", "factorizations", arithmetic.factorizations),
    ("web", "weather-report", records.weather_report),
    ("technical", "quadratics", arithmetic.quadratics),
    ("technical", "instrument-table", records.instrument_table),
    ("technical", "word-problems", arithmetic.word_problems),
)


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
        kind, name, make = MAKERS[index % len(MAKERS)]
        # A string seed is hashed the same way on every platform and Python version.
        text = make(random.Random(f"{seed}/{index}")).strip("\n")
        label = f"{name}-{index // len(MAKERS) + 1:02d}"
        documents.append(Document(kind=kind, name=label, language="en", text=text))
        total += len(text.encode())
    return documents
