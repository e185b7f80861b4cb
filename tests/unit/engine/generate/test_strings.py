"""Strings in a text that arrives in pieces."""

import random
import re

from exl2flow.engine.generate.strings import Strings


def drawn(rng: random.Random) -> tuple[list[str], str]:
    count = rng.randint(1, 6)
    strings = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(count)]
    return strings, "".join(rng.choices("abc", k=rng.randint(0, 9)))


def test_found_is_the_earliest_string_and_of_several_there_the_first_listed() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        strings, text = drawn(rng)
        match = re.search("|".join(strings), text)

        found = Strings(strings).find(text)

        assert found == (match and (match.start(), match.group())), (strings, text)


def test_unfinished_is_the_longest_end_that_begins_a_string() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        strings, text = drawn(rng)
        starts = range(max(len(text) - max(map(len, strings)) + 1, 0), len(text))
        begun = [i for i in starts if any(one.startswith(text[i:]) for one in strings)]

        assert Strings(strings).unfinished(text) == min(begun, default=len(text))


def test_no_strings_are_nowhere() -> None:
    none = Strings([])

    assert not none
    assert none.find("a") is None
    assert none.unfinished("ab") == 2


def test_characters_of_patterns_have_no_meaning() -> None:
    strings = Strings(["^a", "]b", "\\d", "-", "[x-z]"])

    assert strings.find("b5y\\d") == (3, "\\d")
    assert strings.find("b5y") is None
    assert strings.unfinished("y]") == 1


class Counted(str):
    """Counts comparisons, as times depend on the machine."""

    looks = 0

    def __lt__(self, other: str) -> bool:
        Counted.looks += 1
        return str.__lt__(self, other)


def test_work_does_not_grow_with_the_number_of_strings() -> None:
    rng, looks = random.Random(2), list[int]()
    for count in (100, 10_000):
        strings = Strings(["".join(rng.choices("abcdefgh ijT", k=30)) for _ in range(count)])
        strings._sorted = [*map(Counted, strings._sorted)]
        Counted.looks = 0
        assert strings.find("The quick brown fox jumps. " * 4) is None
        looks.append(Counted.looks)

    assert looks[1] < 8 * looks[0]  # of 100 times as many strings
