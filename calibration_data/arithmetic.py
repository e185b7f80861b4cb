"""Worked examples: arithmetic with its steps, equations, number systems, dates, units, statistics.

Each maker takes a seeded generator and returns one document; every figure in it is correct.
"""

import math
from datetime import date, timedelta
from fractions import Fraction
from itertools import product
from random import Random

from exl2flow.calibration_data.words import GOODS, ONES, PEOPLE, TENS

ROMAN = (
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
)
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
    for value, letter in ROMAN:
        letters += letter * (number // value)
        number %= value
    return letters


def long_multiplication(rng: Random) -> str:
    """Return products worked out digit by digit of the second factor."""
    lines = ["Multiply in columns: one partial product for each digit, then add."]
    for _ in range(rng.randint(4, 6)):
        left, right = rng.randint(120, 9900), rng.randint(21, 990)
        lines += ["", f"{left} × {right}"]
        parts = []
        for place, digit in enumerate(reversed(str(right))):
            parts.append(left * int(digit) * 10**place)
            lines.append(f"  {left} × {int(digit) * 10**place:<5} = {parts[-1]:>9}")
        assert sum(parts) == left * right
        lines.append(f"  sum           = {left * right:>9,}".replace(",", " "))
    return "\n".join(lines)


def long_division(rng: Random) -> str:
    """Return divisions worked out digit by digit, each with a check."""
    lines = []
    for number in range(1, rng.randint(4, 6)):
        dividend, divisor = rng.randint(2000, 99999), rng.randint(3, 48)
        quotient, rest = divmod(dividend, divisor)
        lines.append(f"{number}. Divide {dividend} by {divisor}.")
        carry = 0
        for digit in str(dividend):
            here = carry * 10 + int(digit)
            count, after = divmod(here, divisor)
            lines.append(f"   bring down {digit}: {here} ÷ {divisor} = {count}, remainder {after}")
            carry = after
        lines.append(f"   Answer: {quotient} remainder {rest}.")
        lines.append(f"   Check: {quotient} × {divisor} + {rest} = {dividend}.\n")
    return "\n".join(lines)


def linear_equations(rng: Random) -> str:
    """Return pairs of equations in two unknowns, solved by elimination."""
    lines = ["Solve each pair by making the coefficients of y equal and subtracting."]
    while len(lines) < 38:
        x, y = rng.randint(-12, 12), rng.randint(-12, 12)
        a, b, c, d = (rng.randint(1, 9) for _ in range(4))
        if a * d == b * c:
            continue
        e, f = a * x + b * y, c * x + d * y
        lines += [
            "",
            f"    {a}x + {b}y = {e}",
            f"    {c}x + {d}y = {f}",
            f"Times {d} and times {b}: {a * d}x + {b * d}y = {e * d} and "
            f"{b * c}x + {b * d}y = {b * f}.",
            f"Subtract: {a * d - b * c}x = {e * d - b * f}, so x = {x}.",
            f"Put x into the first: {b}y = {e} - ({a * x}) = {e - a * x}, so y = {y}.",
        ]
    return "\n".join(lines)


def quadratics(rng: Random) -> str:
    """Return quadratics with their discriminants and roots."""
    lines = ["equation                     discriminant   roots"]
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
        lines.append(f"{f'{a}x² {b:+d}x {c:+d} = 0':<28} {square:>12}   {roots}")
    return "\n".join(lines)


def fractions(rng: Random) -> str:
    """Return sums, differences, products and quotients of fractions in lowest terms."""
    lines = ["Work each out and reduce to lowest terms.", ""]
    for number in range(1, rng.randint(18, 24)):
        a, c = rng.randint(1, 20), rng.randint(1, 20)
        b, d = rng.randint(2, 24), rng.randint(2, 24)
        left, right = Fraction(a, b), Fraction(c, d)
        match rng.choice("+-×÷"):
            case "+":
                common = math.lcm(b, d)
                step = f"{a * common // b}/{common} + {c * common // d}/{common}"
                sign, answer = "+", left + right
            case "-":
                common = math.lcm(b, d)
                step = f"{a * common // b}/{common} - {c * common // d}/{common}"
                sign, answer = "-", left - right
            case "×":
                sign, step, answer = "×", f"{a * c}/{b * d}", left * right
            case _:
                sign, step, answer = "÷", f"{a}/{b} × {d}/{c} = {a * d}/{b * c}", left / right
        lines.append(f"({number}) {a}/{b} {sign} {c}/{d} = {step} = {answer} ≈ {float(answer):.4f}")
    return "\n".join(lines)


def number_systems(rng: Random) -> str:
    """Return one table of numbers in several notations and in words."""
    lines = [
        "| decimal | binary | octal | hex | Roman | in words |",
        "|---:|---:|---:|---:|:--|:--|",
    ]
    for _ in range(rng.randint(16, 24)):
        value = rng.randint(1, 3999)
        lines.append(
            f"| {value} | {value:b} | {value:o} | {value:X} | {roman(value)} | {in_words(value)} |"
        )
    large = rng.randint(100_000, 999_999)
    lines.append(f"\nA larger one: {large:,} is {in_words(large)}; in scientific form {large:.4e}.")
    return "\n".join(lines)


def factorizations(rng: Random) -> str:
    """Return prime factorizations, greatest common divisors and remainders."""
    lines = []
    for _ in range(rng.randint(14, 20)):
        value = rest = rng.randint(90, 6000)
        primes = []
        for divisor in range(2, value + 1):
            while rest % divisor == 0:
                primes.append(str(divisor))
                rest //= divisor
        lines.append(f"{value} = {' · '.join(primes)}" + (" (prime)" if len(primes) == 1 else ""))
    lines.append("")
    for _ in range(rng.randint(4, 7)):
        a, b = rng.randint(100, 3000), rng.randint(20, 900)
        steps = [f"gcd({a}, {b})"]
        while b:
            a, b = b, a % b
            steps.append(f"gcd({a}, {b})")
        lines.append(" = ".join(steps) + f" = {a}")
    return "\n".join(lines)


def dates(rng: Random) -> str:
    """Return spans between dates, weekdays and ISO weeks, in several notations."""
    lines = ["from, to, days, weeks and days, weekday of the second date"]
    for _ in range(rng.randint(10, 14)):
        first = date(1890, 1, 1) + timedelta(days=rng.randint(0, 52000))
        span = rng.randint(3, 4000)
        second = first + timedelta(days=span)
        lines.append(
            f"{first.isoformat()}, {second.isoformat()}, {span}, {span // 7}w {span % 7}d, "
            f"{second:%A}"
        )
    lines.append("")
    for _ in range(rng.randint(5, 8)):
        day = date(2001, 1, 1) + timedelta(days=rng.randint(0, 11000))
        week = day.isocalendar()
        lines.append(
            f"{day.day} {day:%B} {day.year} = {day:%d.%m.%Y} = {day:%m/%d/%y} = day "
            f"{day.timetuple().tm_yday} of the year, ISO week {week.year}-W{week.week:02d}-"
            f"{week.weekday}"
        )
    return "\n".join(lines)


def unit_conversions(rng: Random) -> str:
    """Return questions and answers about units."""
    lines = []
    for _ in range(rng.randint(8, 11)):
        source, target, factor = rng.choice(UNITS)
        amount = rng.choice((rng.randint(2, 900), round(rng.uniform(0.5, 60), 1)))
        lines += [
            f"Q: How many {target} are {amount} {source}?",
            f"A: Multiply by {factor:g}: {amount} × {factor:g} ≈ {amount * factor:,.3f} {target}.",
            f"   The other way round, {amount} {target} ≈ {amount / factor:,.3f} {source}.",
        ]
    celsius = rng.randint(-30, 140)
    lines += [
        f"Q: What is {celsius} °C on the Fahrenheit scale?",
        f"A: {celsius} × 9/5 + 32 = {celsius * 1.8 + 32:.1f} °F, or {celsius + 273.15:.2f} K.",
    ]
    return "\n".join(lines)


def statistics(rng: Random) -> str:
    """Return small samples with their mean, median and deviation worked out."""
    lines = []
    for number in range(1, rng.randint(4, 6)):
        values = [rng.randint(4, 99) for _ in range(rng.choice((5, 7, 9)))]
        mean = Fraction(sum(values), len(values))
        squares = sum((value - mean) ** 2 for value in values)
        ordered = sorted(values)
        lines += [
            f"Sample {number}: {', '.join(map(str, values))}",
            f"  in order: {' '.join(map(str, ordered))}",
            f"  mean = ({' + '.join(map(str, values))}) / {len(values)} = {sum(values)} / "
            f"{len(values)} = {float(mean):.3f}",
            f"  median = {ordered[len(values) // 2]}, range = {ordered[-1] - ordered[0]}",
            f"  sum of squared deviations = {float(squares):.3f}; standard deviation (n - 1) = "
            f"{math.sqrt(squares / (len(values) - 1)):.3f}",
            "",
        ]
    return "\n".join(lines)


def matrices(rng: Random) -> str:
    """Return products of small matrices and determinants."""
    lines = []
    for name in "ABCD"[: rng.randint(2, 4)]:
        left, right = ([[rng.randint(-6, 9) for _ in range(3)] for _ in range(3)] for _ in range(2))
        made = [
            [sum(left[i][k] * right[k][j] for k in range(3)) for j in range(3)] for i in range(3)
        ]
        lines.append(f"{name}1 · {name}2")
        for rows in zip(left, right, made, strict=True):
            cells = [" ".join(f"{value:>4}" for value in row) for row in rows]
            lines.append(f"  [{cells[0]} ]   [{cells[1]} ]   [{cells[2]} ]")
        terms = " + ".join(f"({left[0][k]})({right[k][0]})" for k in range(3))
        lines.append(f"top left entry: {terms} = {made[0][0]}")
        (a, b, _), (c, d, _), _ = left
        lines.append(f"upper 2×2 minor of {name}1: ({a})({d}) - ({b})({c}) = {a * d - b * c}\n")
    return "\n".join(lines)


def compound_interest(rng: Random) -> str:
    """Return a yearly table for a deposit that earns interest."""
    balance, rate = rng.randint(5, 400) * 100.0, rng.randint(4, 38) / 4
    years = rng.randint(10, 18)
    doubled = math.log(2) / math.log(1 + rate / 100)
    lines = [
        f"A deposit of {balance:,.2f} at {rate:.2f} % a year, interest added every 31 December.",
        f"It doubles after ln 2 / ln {1 + rate / 100:.4f} = {doubled:.1f} years.",
        "",
        "year    opening   interest    closing",
    ]
    for year in range(1, years + 1):
        interest = round(balance * rate / 100, 2)
        closing = round(balance + interest, 2)
        lines.append(f"{year:>4} {balance:>10.2f} {interest:>10.2f} {closing:>10.2f}")
        balance = closing
    return "\n".join(lines)


def truth_table(rng: Random) -> str:
    """Return the truth tables of random formulas in three variables."""
    operate = {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b}
    lines = []
    for number in range(1, 4):
        literals = [rng.choice(("", "not ")) + name for name in "pqr"]
        first, second = (rng.choice(tuple(operate)) for _ in range(2))
        lines += [
            f"{number}. ({literals[0]} {first} {literals[1]}) {second} {literals[2]}",
            "   p      q      r      value",
        ]
        for values in product((False, True), repeat=3):
            a, b, c = (
                value != literal.startswith("not")
                for value, literal in zip(values, literals, strict=True)
            )
            value = operate[second](operate[first](a, b), c)
            lines.append("   " + "  ".join(f"{item!s:<5}" for item in (*values, value)).rstrip())
        lines.append("")
    return "\n".join(lines)


def word_problems(rng: Random) -> str:
    """Return short word problems with their solutions."""
    lines = []
    for _ in range(rng.randint(6, 9)):
        one, two = rng.sample(PEOPLE, 2)
        goods = rng.choice(GOODS)
        boxes, each, broken = rng.randint(3, 24), rng.randint(6, 48), rng.randint(1, 17)
        cents = rng.randint(12, 480)
        left = boxes * each - broken
        lines.append(
            f"{one} buys {boxes} boxes of {each} {goods}. {in_words(broken).capitalize()} "
            f"{'is' if broken == 1 else 'are'} broken, and {two} takes half of the rest, rounded "
            f"down. What does {one} get for the others at {cents / 100:.2f} apiece?\n"
            f"Bought: {boxes} × {each} = {boxes * each}. Whole: {boxes * each} - {broken} = {left}."
            f" {two} takes {left // 2}, so {left - left // 2} remain.\n"
            f"{left - left // 2} × {cents / 100:.2f} = {(left - left // 2) * cents / 100:,.2f}.\n"
        )
    return "\n".join(lines)
