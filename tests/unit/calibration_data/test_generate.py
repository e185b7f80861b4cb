"""The generated documents: reproducible, varied, well formed and right."""

import csv
import json
import random
import re
from xml.etree import ElementTree

import pytest
import yaml

from exl2flow.calibration_data import arithmetic, records
from exl2flow.calibration_data.generate import MAKERS, generated

SEEDS = range(20)


def test_same_seed_gives_the_same_documents() -> None:
    assert generated(3, 20_000) == generated(3, 20_000)
    assert generated(3, 20_000) != generated(4, 20_000)


def test_a_longer_set_begins_with_the_shorter_one() -> None:
    short, long = generated(3, 10_000), generated(3, 30_000)

    assert long[: len(short)] == short


@pytest.mark.parametrize("size", [1, 5_000, 80_000])
def test_size_is_met_by_whole_documents(size: int) -> None:
    sizes = [len(document.text.encode()) for document in generated(0, size)]

    assert sum(sizes) >= size > sum(sizes[:-1])


def test_every_maker_appears_and_no_document_twice() -> None:
    documents = generated(0, 120_000)

    assert {document.name[:-3] for document in documents} == {
        make.__name__.replace("_", "-") for make in MAKERS
    }
    assert len({document.text for document in documents}) == len(documents)
    assert {document.kind for document in documents} == {"technical", "web"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (21, "twenty-one"),
        (105, "one hundred and five"),
        (1_900, "one thousand nine hundred"),
        (40_007, "forty thousand and seven"),
        (712_040, "seven hundred and twelve thousand and forty"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert arithmetic.in_words(number) == words


def test_roman_numerals() -> None:
    assert [arithmetic.roman(number) for number in (4, 1949, 3888)] == [
        "IV",
        "MCMXLIX",
        "MMMDCCCLXXXVIII",
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_solutions_of_linear_equations_satisfy_them(seed: int) -> None:
    text = "\n".join(arithmetic.linear_equations(random.Random(seed)))

    equations = re.findall(r"^ {4}(\d+)x \+ (\d+)y = (-?\d+)$", text, re.MULTILINE)
    xs = [int(x) for x in re.findall(r"so x = (-?\d+)\.", text)]
    ys = [int(y) for y in re.findall(r"so y = (-?\d+)\.", text)]
    assert len(equations) == 2 * len(xs) == 2 * len(ys) > 0
    for index, (a, b, c) in enumerate(equations):
        assert int(a) * xs[index // 2] + int(b) * ys[index // 2] == int(c)


@pytest.mark.parametrize("seed", SEEDS)
def test_division_steps_lead_to_the_answer(seed: int) -> None:
    text = "\n".join(arithmetic.long_division(random.Random(seed)))

    for dividend, divisor, steps, quotient, rest in re.findall(
        r"Divide (\d+) by (\d+)\.\n((?: +bring.*\n)+) +Answer: (\d+) remainder (\d+)", text
    ):
        digits = re.findall(r"= (\d+), remainder", steps)
        assert divmod(int(dividend), int(divisor)) == (int(quotient), int(rest))
        assert int("".join(digits)) == int(quotient)


@pytest.mark.parametrize("seed", SEEDS)
def test_structured_documents_parse(seed: int) -> None:
    rows = list(csv.reader(records.csv_measurements(random.Random(seed))))
    stock = ElementTree.fromstring("\n".join(records.xml_records(random.Random(seed))).encode())
    deployment = yaml.safe_load("\n".join(records.yaml_service(random.Random(seed))))
    text = "\n".join(records.json_records(random.Random(seed)))

    assert {len(row) for row in rows} == {7}
    assert all(item.findtext("count") for item in stock)
    assert len(deployment["services"]) >= 3
    for part in [text] if text.startswith('{\n  "total"') else text.splitlines():
        assert json.loads(part)


@pytest.mark.parametrize("seed", SEEDS)
def test_invoices_add_up(seed: int) -> None:
    text = "\n".join(records.invoice(random.Random(seed)))

    amounts = re.findall(r"^ *\d+  .* (\d+\.\d\d)$", text, re.MULTILINE)
    net = re.search(r"net +(\d+\.\d\d)", text)
    assert net is not None
    assert sum(round(100 * float(amount)) for amount in amounts) == round(100 * float(net[1]))
