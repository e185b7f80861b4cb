"""The choice of a launch's plan: candidates that fit, the fastest of them, and the file."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl2flow.kernels import FusedLinear, Group, NormArgs, PackedMatrix
from exl2flow.kernels.plans.product import LaunchPlan, plan_of
from exl2flow.kernels.plans.tuning import (
    APART,
    LEAST_GAIN,
    MOST_CANDIDATES,
    WAYS,
    Parts,
    Tuning,
    candidates,
    fastest,
    key_of,
)

LARGE, SMALL = 227 << 10, 99 << 10  # bytes of shared memory of an H200, of an RTX 4090
WRITERS, KEYS = 4, 8


def matrix(k: int, n: int, bits: int = 4, rows: int = 32) -> PackedMatrix:
    groups = tuple(Group(bits=bits, start=start, rows=rows) for start in range(0, k, rows))
    return PackedMatrix(
        words=torch.zeros(n // 32, k * bits + 8 * len(groups), dtype=torch.int32),
        groups=groups,
        order=torch.arange(k),
        columns=n,
    )


def chain() -> list[FusedLinear]:
    norm = NormArgs(weight=torch.ones(1024).half(), eps=1e-5)
    return [
        FusedLinear(matrices=(matrix(1024, 1024),), adds=True),
        FusedLinear(
            matrices=(matrix(1024, 2816), matrix(1024, 2816)), norm=norm, activation="silu"
        ),
        FusedLinear(matrices=(matrix(2816, 1024),), adds=True),
        FusedLinear(matrices=(matrix(1024, 1024), matrix(1024, 256), matrix(1024, 256)), norm=norm),
    ]


LAUNCHES: dict[str, Callable[[], list[FusedLinear]]] = {
    "chain": chain,
    "few tiles": lambda: [FusedLinear(matrices=(matrix(4096, 512),))],
    "many tiles": lambda: [FusedLinear(matrices=(matrix(512, 16384),))],
    "one panel": lambda: [FusedLinear(matrices=(matrix(32, 32),))],
    "ten panels": lambda: [FusedLinear(matrices=(matrix(320, 32),))],
    "rows that do not fit": lambda: [FusedLinear(matrices=(matrix(28672, 256, 8, 128),))],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tuning.json"


def refused() -> Parts | None:
    raise AssertionError("measured again")


@pytest.mark.parametrize(
    ("processors", "most_shared", "rows"), [(132, LARGE, 1), (132, LARGE, 4), (128, SMALL, 2)]
)
@pytest.mark.parametrize("name", LAUNCHES)
def test_candidates_fit_and_the_default_is_the_first(
    name: str, processors: int, most_shared: int, rows: int
) -> None:
    products = LAUNCHES[name]()

    plans = candidates(products, rows, (processors, most_shared))

    default = plan_of(products, rows, (processors, most_shared))
    assert default is not None
    assert plans[0].parts == default.parts
    assert plans[0].argument["stages"]["length"].tolist() == (
        default.argument["stages"]["length"].tolist()
    )
    assert len({plan.parts for plan in plans}) == len(plans) <= MOST_CANDIDATES
    assert (len(plans) == 1) == (name == "one panel")
    for plan in plans:
        assert plan.shared <= most_shared
        assert plan.argument["stages"]["parts"].tolist()[: len(products)] == list(plan.parts)
        assert len(products) == 1 or plan.ctas <= processors
        changed = [a != b for a, b in zip(plan.parts, default.parts, strict=True)]
        assert sum(changed) == (plan is not plans[0])


def test_a_plan_has_the_parts_that_it_is_told() -> None:
    for parts in ((1, 1, 1, 1), (2, 1, 3, 1), (1, 4, 1, 2)):
        plan = plan_of(chain(), 1, (132, LARGE), parts)

        assert plan is not None
        assert plan.parts == parts
        stages = plan.argument["stages"]
        assert [
            (count - 1) * int(length) < panels <= count * int(length)
            for count, length, panels in zip(
                parts, stages["length"], (32, 32, 88, 32), strict=False
            )
        ] == [True] * 4


def test_parts_that_do_not_fit_become_more() -> None:
    [product] = LAUNCHES["rows that do not fit"]()

    plan = plan_of([product], 4, (132, SMALL), (1,))

    assert plan is not None
    assert plan.parts[0] > 1
    assert plan.shared <= SMALL


def test_a_chain_that_does_not_fit_has_no_candidates() -> None:
    assert candidates(chain(), 1, (2, LARGE)) == []


def plans_of(name: str) -> Sequence[LaunchPlan]:
    return candidates(LAUNCHES[name](), 1, (132, LARGE))


def test_the_fastest_is_taken() -> None:
    plans = plans_of("chain")
    for quickest in plans:
        assert fastest(plans, lambda plan, q=quickest: 1.0 if plan is q else 1.5) is quickest


def test_the_default_is_taken_unless_another_gains_enough() -> None:
    plans = plans_of("chain")

    taken = fastest(plans, lambda plan: 1.0 if plan is plans[0] else 1.0 - LEAST_GAIN / 2)

    assert taken is plans[0]


def test_slow_first_turns_and_outliers_do_not_count() -> None:
    plans = plans_of("few tiles")
    seen: list[LaunchPlan] = []

    def time(plan: LaunchPlan) -> float:
        seen.append(plan)
        turn = seen.count(plan)
        if plan is plans[1]:
            return 9.0 if turn in (1, 4) else 1.0  # is compiled; something else ran
        return 0.1 if turn == 3 else 2.0

    assert fastest(plans, time) is plans[1]
    assert seen[: len(plans)] == list(plans)


@pytest.mark.parametrize("way", WAYS)
def test_another_way_is_kept_like_parts(tmp_path: Path, way: str) -> None:
    file = tmp_path / "tuning.json"

    assert Tuning(file).choice("chain", 4, lambda: way) == way
    assert Tuning(file).choice("chain", 4, lambda: (1, 1, 1, 1)) == way
    file.write_text('{"chain": "sideways"}')
    assert Tuning(file).choice("chain", 4, lambda: (1, 1, 1, 1)) == (1, 1, 1, 1)


def test_products_are_measured_while_their_chain_is(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path / "tuning.json")

    def measure() -> str:
        assert tuning.choice("one", 1, lambda: (2,)) == (2,)
        return APART

    assert tuning.choice("chain", 2, measure) == APART
    assert Tuning(tmp_path / "tuning.json").choice("one", 1, lambda: (3,)) == (2,)


def test_keys_tell_launches_apart() -> None:
    one, gate = matrix(1024, 512), matrix(1024, 512)
    products = [
        [FusedLinear(matrices=(one,))],
        [FusedLinear(matrices=(one,), adds=True)],
        [FusedLinear(matrices=(one,), norm=NormArgs(weight=torch.ones(1024).half(), eps=1e-5))],
        [FusedLinear(matrices=(one, gate))],
        [FusedLinear(matrices=(one, gate), activation="silu")],
        [FusedLinear(matrices=(one, gate), activation="gelu")],
        [FusedLinear(matrices=(one,)), FusedLinear(matrices=(matrix(512, 512),))],
        [FusedLinear(matrices=(matrix(512, 512),))],
        [FusedLinear(matrices=(matrix(1024, 544),))],
        [FusedLinear(matrices=(matrix(1024, 512, bits=5),))],
        [FusedLinear(matrices=(matrix(1024, 512, rows=64),))],
        [FusedLinear(matrices=(one.cut(500),))],
        [FusedLinear(matrices=(replace(one, bias=torch.zeros(512).half()),))],
        [FusedLinear(matrices=(replace(one, has_zeros=True),))],
    ]

    keys = {key_of(p, 1, gpu="A", kernel="1") for p in products}
    keys |= {key_of(products[0], 2, gpu="A", kernel="1"), key_of(products[0], 1, gpu="B", kernel=1)}
    keys.add(key_of(products[0], 1, gpu="A", kernel="2"))

    assert len(keys) == len(products) + 3
    assert key_of(chain(), 4, gpu="A", kernel="1") == key_of(chain(), 4, gpu="A", kernel="1")


def test_a_choice_is_measured_once_and_kept_for_the_next_process(file: Path) -> None:
    tuning = Tuning(file)

    assert tuning.choice("a", 2, lambda: (1, 3)) == (1, 3)
    assert tuning.choice("a", 2, refused) == (1, 3)
    assert Tuning(file).choice("a", 2, refused) == (1, 3)
    assert Tuning(file).choice("b", 2, lambda: (2, 2)) == (2, 2)
    assert json.loads(file.read_text()) == {"a": [1, 3], "b": [2, 2]}


def test_a_launch_that_cannot_be_measured_keeps_the_default_in_this_process_only(
    file: Path,
) -> None:
    tuning = Tuning(file)

    assert tuning.choice("a", 1, lambda: None) is None
    assert tuning.choice("a", 1, refused) is None
    assert not file.exists()
    assert Tuning(file).choice("a", 1, lambda: (2,)) == (2,)


def test_a_choice_that_another_process_made_meanwhile_is_taken(file: Path) -> None:
    def slow() -> Parts:
        Tuning(file).choice("a", 1, lambda: (5,))
        return (2,)

    assert Tuning(file).choice("a", 1, slow) == (5,)
    assert json.loads(file.read_text()) == {"a": [5]}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "\xff", '{"a": 3}', '{"a": [1, 2]}', '{"a": [0]}', '{"a": ["1"]}'],
)
def test_a_damaged_file_is_written_anew(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))

    assert Tuning(file).choice("a", 1, lambda: (4,)) == (4,)
    assert Tuning(file).choice("a", 1, refused) == (4,)


def test_damaged_entries_do_not_cost_the_others(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"a": [2], "b": {}}')

    Tuning(file).choice("c", 1, lambda: (3,))

    assert json.loads(file.read_text()) == {"a": [2], "c": [3]}


@pytest.mark.parametrize("where", ["under a file", "a folder"])
def test_a_file_that_cannot_be_written_only_means_that_nothing_is_kept(
    tmp_path: Path, where: str
) -> None:
    (tmp_path / "x").write_text("")
    file = tmp_path / "x" / "tuning.json" if where == "under a file" else tmp_path
    tuning = Tuning(file)

    assert tuning.choice("a", 1, lambda: (2,)) == (2,)
    assert tuning.choice("a", 1, refused) == (2,)
    assert Tuning(file).choice("a", 1, lambda: (3,)) == (3,)


def keep(file: Path, writer: int) -> Parts | None:
    """Choose its own keys and one shared key, like a process: with its own handles."""
    tuning = Tuning(file)
    for key in range(KEYS):
        tuning.choice(f"{writer} {key}", 1, lambda key=key: (key + 1,))
    return tuning.choice("shared", 1, lambda: (writer + 1,))


def test_processes_that_write_at_the_same_time_lose_no_choice(file: Path) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        shared = list(pool.map(keep, [file] * WRITERS, range(WRITERS)))

    table = json.loads(file.read_text())
    own = {f"{w} {key}": [key + 1] for w in range(WRITERS) for key in range(KEYS)}
    assert {key: parts for key, parts in table.items() if key != "shared"} == own
    assert shared == [tuple(table["shared"])] * WRITERS


def test_threads_measure_once(file: Path) -> None:
    measured: list[int] = []
    tuning = Tuning(file)

    def measure() -> Parts:
        measured.append(1)
        return (len(measured),)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tuning.choice("a", 1, measure), range(8)))

    assert found == [(1,)] * 8
