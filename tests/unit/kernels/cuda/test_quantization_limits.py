"""The kernels of a conversion launch on every card from sm_80 on: nothing they take is special."""

import ast
import re
from collections.abc import Iterator

import pytest
from kernel_resources import DEVICES, END, PAGE, START
from sources import ROOT

from exl2flow.kernels.cuda.compiler import THREADS
from exl2flow.kernels.interface.groups import MOST_COLUMNS
from exl2flow.kernels.plans.sources import source
from exl2flow.kernels.reference.ops import MAXIMA

FILES = {"search.cu", "round.cu", "descend.cu", "refit.cu", "pack.cu"}
CTA_THREADS, REGISTERS, STATIC_SHARED = 1024, 65536, 48 << 10  # of every card: CUDA's own limits
COUPLED = ("round_coupled", "descend_coupled")
WIDEST = {**dict.fromkeys(COUPLED, MOST_COLUMNS), "best_maximum": 32 * MAXIMA}  # threads of a CTA
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")
# what a launch has no room for on some card, or needs of the whole card at once
SPECIAL = re.compile(r"extern __shared__|cooperative_groups|__cluster|cluster_dim|this_grid")


def table() -> dict[str, list[tuple[int, int]]]:
    """Return the kernels' registers of a thread and static shared bytes, for each device."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0].splitlines()[2:]:
        file, kernel, _, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        if file in FILES:
            taken = [tuple(map(int, cell.split(", "))) for cell in cells]
            found[kernel] = [(registers, shared) for registers, _, shared, _ in taken]
    return found


TABLE = table()


def launches() -> Iterator[tuple[str, ast.Call]]:
    """Yield all launches of these sources, by kernel."""
    for path in sorted((ROOT / "kernels" / "cuda").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                file, kernel = node.args[:2]
                if isinstance(file, ast.Constant) and file.value in FILES:
                    assert isinstance(kernel, ast.Constant)
                    yield kernel.value, node


def test_the_table_has_every_kernel_on_every_architecture() -> None:
    named = {kernel for file in FILES for kernel in KERNEL.findall(source(file))}

    assert named == TABLE.keys()
    assert {len(taken) for taken in TABLE.values()} == {len(DEVICES)}


@pytest.mark.parametrize("kernel", TABLE)
def test_a_cta_fits_any_multiprocessor(kernel: str) -> None:
    threads = WIDEST.get(kernel, THREADS)

    assert threads <= CTA_THREADS
    for registers, shared in TABLE[kernel]:
        of_thread = -(-registers // 8) * 8  # as a warp is given them
        assert of_thread * threads <= REGISTERS
        assert shared <= STATIC_SHARED


def test_kernels_in_the_metric_of_the_output_take_all_registers() -> None:
    """One register more, and their widest block could not be launched anywhere."""
    for kernel in COUPLED:
        assert max(registers for registers, _ in TABLE[kernel]) * MOST_COLUMNS == REGISTERS


def test_launches_need_no_dynamic_memory_and_no_ctas_at_once() -> None:
    found = list(launches())

    assert {kernel for kernel, _ in found} == TABLE.keys()
    for kernel, call in found:
        names = {keyword.arg for keyword in call.keywords}
        assert names <= ({"threads"} if kernel in WIDEST else set()), kernel
    for file in FILES:
        assert SPECIAL.search(source(file)) is None, file
