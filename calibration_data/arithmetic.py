"""Worked examples: arithmetic with its steps, equations, number systems, dates, units, statistics.

Each maker takes a seeded generator and yields the lines of one document; every figure is correct.
"""

import math
from collections.abc import Iterator
from datetime import date, timedelta
from fractions import Fraction
from itertools import product
from random import Random

from exl2flow.calibration_data.words import GOODS, ONES, PEOPLE, TENS

ROMAN = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50}
ROMAN |= {"XL": 40, "X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1}
UNITS = (
    ("miles", "kilometres", 1.609344),
    ("inches", "centimetres", 2.54),
    ("pounds", "kilograms", 0.45359237),
    ("ounces", "grams", 28.349523125),
    ("nautical miles", "kilometres", 1.852),
    ("acres", "hectares", 0.40468564224),
    ("horsepower", "kilowatts", 0.74569987158227),
    ("feet per second", "kilometres per hour", 1.09728),
    ("kilowatt-hours", "megajoules", 3.6),
    ("standard atmospheres", "kilopascals", 101.325),
)


def in_words(number: int) -> str:
    """Spell `number`, from 0 to 999,999, in English."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    unit, word, joint = (100, "hundred", " and ") if number < 1000 else (1000, "thousand", " ")
    head, rest = divmod(number, unit)
    if not rest:
        return f"{in_words(head)} {word}"
    if unit == 1000 and rest < 100:
        joint = " and "
    return f"{in_words(head)} {word}{joint}{in_words(rest)}"


def roman(number: int) -> str:
    """Write `number`, from 1 to 3999, in Roman numerals."""
    letters = ""
    for letter, value in ROMAN.items():
        letters += letter * (number // value)
        number %= value
    return letters


def long_multiplication(rng: Random) -> Iterator[str]:
    """Yield products worked out digit by digit of the second factor."""
    yield "Multiply in columns: one partial product for each digit, then add."
    for _ in range(rng.randint(4, 6)):
        left, right = rng.randint(120, 9900), rng.randint(21, 990)
        yield from ("", f"{left} × {right}")
        parts = []
        for place, digit in enumerate(reversed(str(right))):
            parts.append(left * int(digit) * 10**place)
            yield f"  {left} × {int(digit) * 10**place:<5} = {parts[-1]:>9}"
        assert sum(parts) == left * right
        yield f"  sum           = {left * right:>9,}".replace(",", " ")


def long_division(rng: Random) -> Iterator[str]:
    """Yield divisions worked out digit by digit, each with a check."""
    for number in range(1, rng.randint(4, 6)):
        dividend, divisor = rng.randint(2000, 99999), rng.randint(3, 48)
        quotient, rest = divmod(dividend, divisor)
        yield f"{number}. Divide {dividend} by {divisor}."
        carry = 0
        for digit in str(dividend):
            here = carry * 10 + int(digit)
            count, after = divmod(here, divisor)
            yield f"   bring down {digit}: {here} ÷ {divisor} = {count}, remainder {after}"
            carry = after
        yield f"   Answer: {quotient} remainder {rest}."
        yield f"   Check: {quotient} × {divisor} + {rest} = {dividend}.\n"


def linear_equations(rng: Random) -> Iterator[str]:
    """Yield pairs of equations in two unknowns, solved by elimination."""
    yield "Solve each pair by making the coefficients of y equal and subtracting."
    pairs = 0
    while pairs < 7:
        x, y = rng.randint(-12, 12), rng.randint(-12, 12)
        a, b, c, d = (rng.randint(1, 9) for _ in range(4))
        if a * d == b * c:
            continue
        pairs += 1
        e, f = a * x + b * y, c * x + d * y
        yield from (
            "",
            f"    {a}x + {b}y = {e}",
            f"    {c}x + {d}y = {f}",
            f"Times {d} and times {b}: {a * d}x + {b * d}y = {e * d} and "
            f"{b * c}x + {b * d}y = {b * f}.",
            f"Subtract: {a * d - b * c}x = {e * d - b * f}, so x = {x}.",
            f"Put x into the first: {b}y = {e} - ({a * x}) = {e - a * x}, so y = {y}.",
        )


def quadratics(rng: Random) -> Iterator[str]:
    """Yield quadratics with their discriminants and roots."""
    yield "equation                     discriminant   roots"
    for _ in range(rng.randint(14, 20)):
        a, b, c = rng.randint(2, 9), rng.randint(-14, 14), rng.randint(-20, 20)
        square = b * b - 4 * a * c
        if square < 0:
            # Adding 0.0 turns a negative zero into a zero.
            real, imaginary = -b / (2 * a) + 0.0, math.sqrt(-square) / (2 * a)
            roots = f"none real; complex: {real:.3f} ± {imaginary:.3f}i"
        else:
            low, high = sorted((-b + sign * math.sqrt(square)) / (2 * a) + 0.0 for sign in (-1, 1))
            roots = f"{low:.3f} (double)" if square == 0 else f"{low:.3f} and {high:.3f}"
        yield f"{f'{a}x² {b:+d}x {c:+d} = 0':<28} {square:>12}   {roots}"


def fractions(rng: Random) -> Iterator[str]:
    """Yield sums, differences, products and quotients of fractions in lowest terms."""
    yield from ("Work each out and reduce to lowest terms.", "")
    for number in range(1, rng.randint(18, 24)):
        a, c = rng.randint(1, 20), rng.randint(1, 20)
        b, d = rng.randint(2, 24), rng.randint(2, 24)
        left, right, sign = Fraction(a, b), Fraction(c, d), rng.choice("+-×÷")
        match sign:
            case "×":
                step, answer = f"{a * c}/{b * d}", left * right
            case "÷":
                step, answer = f"{a}/{b} × {d}/{c} = {a * d}/{b * c}", left / right
            case _:
                common = math.lcm(b, d)
                step = f"{a * common // b}/{common} {sign} {c * common // d}/{common}"
                answer = left + right if sign == "+" else left - right
        yield f"({number}) {a}/{b} {sign} {c}/{d} = {step} = {answer} ≈ {float(answer):.4f}"


def number_systems(rng: Random) -> Iterator[str]:
    """Yield one table of numbers in several notations and in words."""
    yield from (
        "| decimal | binary | octal | hex | Roman | in words |",
        "|---:|---:|---:|---:|:--|:--|",
    )
    for _ in range(rng.randint(16, 24)):
        value = rng.randint(1, 3999)
        yield (
            f"| {value} | {value:b} | {value:o} | {value:X} | {roman(value)} | {in_words(value)} |"
        )
    large = rng.randint(100_000, 999_999)
    yield f"\nA larger one: {large:,} is {in_words(large)}; in scientific form {large:.4e}."


def factorizations(rng: Random) -> Iterator[str]:
    """Yield prime factorizations, greatest common divisors and remainders."""
    for _ in range(rng.randint(14, 20)):
        value = rest = rng.randint(90, 6000)
        primes = []
        for divisor in range(2, value + 1):
            while rest % divisor == 0:
                primes.append(str(divisor))
                rest //= divisor
        yield f"{value} = {' · '.join(primes)}" + (" (prime)" if len(primes) == 1 else "")
    yield ""
    for _ in range(rng.randint(4, 7)):
        a, b = rng.randint(100, 3000), rng.randint(20, 900)
        steps = [f"gcd({a}, {b})"]
        while b:
            a, b = b, a % b
            steps.append(f"gcd({a}, {b})")
        yield " = ".join(steps) + f" = {a}"


def dates(rng: Random) -> Iterator[str]:
    """Yield spans between dates, weekdays and ISO weeks, in several notations."""
    yield "from, to, days, weeks and days, weekday of the second date"
    for _ in range(rng.randint(10, 14)):
        first = date(1890, 1, 1) + timedelta(days=rng.randint(0, 52000))
        span = rng.randint(3, 4000)
        second = first + timedelta(days=span)
        yield (
            f"{first.isoformat()}, {second.isoformat()}, {span}, {span // 7}w {span % 7}d, "
            f"{second:%A}"
        )
    yield ""
    for _ in range(rng.randint(5, 8)):
        day = date(2001, 1, 1) + timedelta(days=rng.randint(0, 11000))
        week = day.isocalendar()
        yield (
            f"{day.day} {day:%B} {day.year} = {day:%d.%m.%Y} = {day:%m/%d/%y} = day "
            f"{day.timetuple().tm_yday} of the year, ISO week {week.year}-W{week.week:02d}-"
            f"{week.weekday}"
        )


def unit_conversions(rng: Random) -> Iterator[str]:
    """Yield questions and answers about units."""
    for _ in range(rng.randint(8, 11)):
        source, target, factor = rng.choice(UNITS)
        amount = rng.choice((rng.randint(2, 900), round(rng.uniform(0.5, 60), 1)))
        yield from (
            f"Q: How many {target} are {amount} {source}?",
            f"A: Multiply by {factor:g}: {amount} × {factor:g} ≈ {amount * factor:,.3f} {target}.",
            f"   The other way round, {amount} {target} ≈ {amount / factor:,.3f} {source}.",
        )
    celsius = rng.randint(-30, 140)
    yield from (
        f"Q: What is {celsius} °C on the Fahrenheit scale?",
        f"A: {celsius} × 9/5 + 32 = {celsius * 1.8 + 32:.1f} °F, or {celsius + 273.15:.2f} K.",
    )


def statistics(rng: Random) -> Iterator[str]:
    """Yield small samples with their mean, median and deviation worked out."""
    for number in range(1, rng.randint(4, 6)):
        values = [rng.randint(4, 99) for _ in range(rng.choice((5, 7, 9)))]
        mean = Fraction(sum(values), len(values))
        squares = sum((value - mean) ** 2 for value in values)
        ordered = sorted(values)
        yield from (
            f"Sample {number}: {', '.join(map(str, values))}",
            f"  in order: {' '.join(map(str, ordered))}",
            f"  mean = ({' + '.join(map(str, values))}) / {len(values)} = {sum(values)} / "
            f"{len(values)} = {float(mean):.3f}",
            f"  median = {ordered[len(values) // 2]}, range = {ordered[-1] - ordered[0]}",
            f"  sum of squared deviations = {float(squares):.3f}; standard deviation (n - 1) = "
            f"{math.sqrt(squares / (len(values) - 1)):.3f}",
            "",
        )


def matrices(rng: Random) -> Iterator[str]:
    """Yield products of small matrices and determinants."""
    for name in "ABCD"[: rng.randint(2, 4)]:
        left, right = ([[rng.randint(-6, 9) for _ in range(3)] for _ in range(3)] for _ in range(2))
        result = [
            [sum(left[i][k] * right[k][j] for k in range(3)) for j in range(3)] for i in range(3)
        ]
        yield f"{name}1 · {name}2"
        for rows in zip(left, right, result, strict=True):
            cells = [" ".join(f"{value:>4}" for value in row) for row in rows]
            yield f"  [{cells[0]} ]   [{cells[1]} ]   [{cells[2]} ]"
        terms = " + ".join(f"({left[0][k]})({right[k][0]})" for k in range(3))
        yield f"top left entry: {terms} = {result[0][0]}"
        (a, b, _), (c, d, _), _ = left
        yield f"upper 2×2 minor of {name}1: ({a})({d}) - ({b})({c}) = {a * d - b * c}\n"


def compound_interest(rng: Random) -> Iterator[str]:
    """Yield a yearly table for a deposit that earns interest."""
    balance, rate = rng.randint(5, 400) * 100.0, rng.randint(4, 38) / 4
    years = rng.randint(10, 18)
    doubled = math.log(2) / math.log(1 + rate / 100)
    yield from (
        f"A deposit of {balance:,.2f} at {rate:.2f} % a year, interest added every 31 December.",
        f"It doubles after ln 2 / ln {1 + rate / 100:.4f} = {doubled:.1f} years.",
        "",
        "year    opening   interest    closing",
    )
    for year in range(1, years + 1):
        interest = round(balance * rate / 100, 2)
        closing = round(balance + interest, 2)
        yield f"{year:>4} {balance:>10.2f} {interest:>10.2f} {closing:>10.2f}"
        balance = closing


def truth_table(rng: Random) -> Iterator[str]:
    """Yield the truth tables of random formulas in three variables."""
    operate = {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b}
    for number in range(1, 4):
        literals = [rng.choice(("", "not ")) + name for name in "pqr"]
        first, second = (rng.choice(tuple(operate)) for _ in range(2))
        yield from (
            f"{number}. ({literals[0]} {first} {literals[1]}) {second} {literals[2]}",
            "   p      q      r      value",
        )
        for values in product((False, True), repeat=3):
            a, b, c = (
                value != literal.startswith("not")
                for value, literal in zip(values, literals, strict=True)
            )
            value = operate[second](operate[first](a, b), c)
            yield "   " + "  ".join(f"{item!s:<5}" for item in (*values, value)).rstrip()
        yield ""


def word_problems(rng: Random) -> Iterator[str]:
    """Yield short word problems with their solutions."""
    for _ in range(rng.randint(6, 9)):
        one, two = rng.sample(PEOPLE, 2)
        goods = rng.choice(GOODS)
        boxes, each, broken = rng.randint(3, 24), rng.randint(6, 48), rng.randint(1, 17)
        cents = rng.randint(12, 480)
        left = boxes * each - broken
        yield (
            f"{one} buys {boxes} boxes of {each} {goods}. {in_words(broken).capitalize()} "
            f"{'is' if broken == 1 else 'are'} broken, and {two} takes half of the rest, rounded "
            f"down. What does {one} get for the others at {cents / 100:.2f} apiece?\n"
            f"Bought: {boxes} × {each} = {boxes * each}. Whole: {boxes * each} - {broken} = {left}."
            f" {two} takes {left // 2}, so {left - left // 2} remain.\n"
            f"{left - left // 2} × {cents / 100:.2f} = {(left - left // 2) * cents / 100:,.2f}.\n"
        )
