"""Registers, stack, shared memory and code of every kernel on each architecture, as NVRTC makes it.

    python tests/support/kernel_resources.py

writes the table of docs/reference/kernels.md. No GPU is needed.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from struct import iter_unpack, unpack_from

import checkout  # noqa: F401  # before the package
from cuda_instances import INSTANCES, SOURCES
from cupy_backends.cuda.libs import nvrtc

from exl2flow.kernels.cuda.compiler import options_of
from exl2flow.kernels.cuda.ptx import CUPY_OPTIONS
from exl2flow.kernels.plans.sources import source

PAGE = Path(__file__).parents[2] / "docs/reference/kernels.md"
DEVICES = (80, 86, 89, 90, 120)
REGISTERS, FRAME = 0x2F, 0x11  # attributes in `.nv.info`
START, END = "<!-- kernels -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """registers: of a thread; stack: bytes of a thread, spilled registers included; shared: static
    bytes of a CTA; code: bytes of its instructions."""

    registers: int
    stack: int
    shared: int
    code: int


def compiled(file: str, instances: Sequence[str], device: int) -> tuple[bytes, list[str]]:
    """Return the machine code of a source for a device, and the instances' names in it.

    Raises:
        AssertionError: it does not compile, or not without a warning.
    """
    program = nvrtc.createProgram(source(file), file, (), ())
    for instance in instances:
        nvrtc.addNameExpression(program, instance)
    try:
        nvrtc.compileProgram(program, (*options_of(file), *CUPY_OPTIONS, f"-arch=sm_{device}"))
    except nvrtc.NVRTCError:
        raise AssertionError(f"sm_{device}: {nvrtc.getProgramLog(program)}") from None
    log = nvrtc.getProgramLog(program).strip("\0\n")
    assert log == "", log
    names = [nvrtc.getLoweredName(program, instance) for instance in instances]
    return nvrtc.getCUBIN(program), names


def resources(cubin: bytes) -> dict[str, Resources]:
    """Return what each kernel of an ELF file takes, by its name in it."""
    sections = dict(_sections(cubin))
    texts = sections[".strtab"]
    symbols = [
        texts[name : texts.index(b"\0", name)].decode()
        for name, *_ in iter_unpack("<I4x16x", sections[".symtab"])
    ]
    known: dict[int, dict[str, int]] = {REGISTERS: {}, FRAME: {}}
    for kind, attribute, size, symbol, value in iter_unpack("<2BH2I", sections[".nv.info"]):
        assert (kind, size) == (4, 8)
        if attribute in known:
            known[attribute][symbols[symbol]] = value
    return {
        name: Resources(
            registers=registers,
            stack=known[FRAME].get(name, 0),
            shared=len(sections.get(f".nv.shared.{name}", b"")),
            code=len(sections[f".text.{name}"]),
        )
        for name, registers in known[REGISTERS].items()
        if f".text.{name}" in sections
    }


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,), (size, count, names) = unpack_from("<Q", cubin, 40), unpack_from("<3H", cubin, 58)
    headers = [unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    begin = headers[names][4]
    for name, kind, _, _, at, length in headers:
        text = cubin[begin + name : cubin.index(b"\0", begin + name)].decode()
        yield (
            text,
            bytes(length) if kind == 8 else cubin[at : at + length],
        )  # 8: no bytes in the file


def kernel_of(name: str) -> str:
    """Return a kernel's name without its template's arguments, from its name in an ELF file."""
    mangled = re.match(r"_Z(\d+)", name)
    return name if mangled is None else name[mangled.end() :][: int(mangled[1])]


def table() -> str:
    """Return the table: the most that instances of a kernel take on each architecture."""
    found: dict[tuple[str, str], dict[int, list[Resources]]] = defaultdict(
        lambda: defaultdict(list)
    )

    def add(file: str, device: int) -> None:
        code, _ = compiled(file, INSTANCES.get(file, []), device)
        for name, taken in resources(code).items():
            found[file, kernel_of(name)][device].append(taken)

    with ThreadPoolExecutor() as threads:
        works = [threads.submit(add, file, device) for file in SOURCES for device in DEVICES]
        for work in works:
            work.result()
    lines = [
        f"| source | kernel | instances | {' | '.join(f'sm_{device}' for device in DEVICES)} |",
        f"|---|---|---|{'---|' * len(DEVICES)}",
    ]
    for (file, kernel), of_devices in sorted(found.items()):
        cells = [_cell(of_devices[device]) for device in DEVICES]
        count = len(of_devices[DEVICES[0]])
        lines.append(f"| `{file}` | `{kernel}` | {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(taken: Sequence[Resources]) -> str:
    registers, stack, shared, code = map(max, zip(*map(astuple, taken), strict=True))
    return f"{registers}, {stack}, {shared}, {-(-code // 1024)}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END)[1], encoding="utf-8")
