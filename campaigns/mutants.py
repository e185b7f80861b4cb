"""Mutation testing: change one thing in the package at a time, and see whether a unit test fails.

    python campaigns/mutants.py --count 40 --seed 1 core/store/store.py core/store/files.py

Every mutant runs in a process forked from one that has loaded all libraries, so it takes seconds;
tools that start Python for each mutant load torch each time. A mutant is killed if a test of its
file fails, or if the tests take far more processor time than without it. The tests of a file are
the one of its name, those in `MORE`, then others in its mirrored folder that import it.
Survivors are counted, but end the program with 0: many change nothing that matters.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from mutant_tests import MORE
from state import HELP, State

ROOT = Path(__file__).parents[1]
MODULES = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "core").rglob("[a-z]*.py")),
    "model/files/exl2.py",
    "quant/quantize/stored_form.py",
    "engine/cache/page_pool.py",
    "engine/filters/phases.py",
    "engine/generate/scheduler.py",  # preemption
)
TURN = 4  # mutants of a file, then it is the turn of another
MOST_TESTS = 4  # test files that run for a module, but all that `MORE` names
SINCE = "killed since"  # survivors, by tests that were written then
MARKERS = "not slow and not gpu and not multigpu and not network"
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Pow: ast.Mult,
}
TESTED = (ast.Compare, ast.UnaryOp)  # conditions that are changed themselves
# `zip` asserts lengths that callers have made equal; the other is for debuggers
UNTESTED = ("strict", "thread_name_prefix")
# Words for people, whose exact text is not a fact that a test should hold
SPOKEN_CALLS = ("Field", "info", "warning", "debug", "append_notes")


@dataclass(frozen=True)
class Mutant:
    """A changed source: its file and line, and the line before and after."""

    file: str
    line: int
    before: str
    after: str
    source: str


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's replacements; the node itself stays as it is."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                other = copy.deepcopy(node)
                other.ops[index] = COMPARED[type(operator)]()
                yield other
        case ast.BoolOp():
            operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.BoolOp(operator, node.values)
        case ast.BinOp() if type(node.op) in COMPUTED:
            yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str(value)) if value:
            yield ast.Constant(f"X{value}")
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, TESTED):
            other = copy.deepcopy(node)
            other.test = ast.UnaryOp(ast.Not(), node.test)
            yield other
        case ast.comprehension() if node.ifs:
            yield ast.comprehension(node.target, node.iter, node.ifs[1:], node.is_async)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Assign() if not _is_none(node.value) and not _is_type(node):
            yield ast.Assign(node.targets, ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_type(node: ast.Assign) -> bool:
    """Return whether this names a type, for annotations only."""
    return any(isinstance(t, ast.Name) and re.match("[A-Z][a-z]", t.id) for t in node.targets)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def sites(node: ast.AST, *, spoken: bool = False) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield (parent, field, index in it) of all nodes to change, without words for people."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "type_ignores"):
            continue
        if isinstance(node, ast.keyword) and node.arg in UNTESTED:
            continue
        children: list[Any] = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_docstring(child):
                continue
            name = ""
            if isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
            silent = spoken or isinstance(child, ast.Raise | ast.Assert) or name in SPOKEN_CALLS
            is_text = isinstance(child, ast.Constant) and isinstance(child.value, str)
            if not (is_text and (spoken or isinstance(node, ast.JoinedStr))):
                yield node, field, index if isinstance(value, list) else None
            yield from sites(child, spoken=silent)


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a file, in order."""
    tree = ast.parse(source)
    lines = ast.unparse(tree).splitlines()
    found = []
    for parent, field, index in list(sites(tree)):
        value = getattr(parent, field)
        node = value if index is None else value[index]
        for other in list(variants(node)):
            _put(
                parent,
                field,
                index,
                ast.copy_location(other, node) if hasattr(node, "lineno") else other,
            )
            text = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, index, node)
            changed = text.splitlines()
            at = next((i for i, pair in enumerate(zip(lines, changed)) if len(set(pair)) > 1), None)  # noqa: B905
            if at is not None:
                line = getattr(node, "lineno", getattr(parent, "lineno", 0))
                found.append(Mutant(file, line, lines[at].strip(), changed[at].strip(), text))
    return found


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def tests_of(file: str) -> list[str]:
    """Return the test files for a file of the package, its own first."""
    path = Path(file)
    package = f"exl2flow.{path.parent.as_posix().replace('/', '.')}"
    module = re.compile(rf"from {package}(\.{path.stem} import|.* import .*\b{path.stem}\b)")
    folder = ROOT / "tests" / "unit" / path.parent
    importing = [t for t in sorted(folder.glob("test_*.py")) if module.search(t.read_text())]
    found = [str(test.relative_to(ROOT)) for test in importing]
    own = [test for test in found if path.stem in Path(test).stem]
    named = list(dict.fromkeys([*own, *MORE.get(file, [])]))
    return list(dict.fromkeys([*named, *found]))[: max(MOST_TESTS, len(named))]


def replaced(file: Path, source: str) -> None:
    """Have this process load another source for a file of the package."""
    get_code = SourceFileLoader.get_code

    def other(self: SourceFileLoader, fullname: str) -> Any:
        if Path(self.path).resolve() == file:
            return compile(source, str(file), "exec", dont_inherit=True)
        return get_code(self, fullname)

    SourceFileLoader.get_code = other  # type: ignore[method-assign]


def _replace_in_children(file: Path, source: str, folder: Path) -> None:
    """Have Python programs that tests start load the other source, too."""
    (folder / "source").write_text(source)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(ROOT / 'campaigns')!r})\n"
        "from mutants import replaced\nsys.path.pop()\n"
        f"replaced(Path({str(file)!r}), Path({str(folder / 'source')!r}).read_text())\n"
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))


def run_tests(tests: list[str], folder: Path) -> int:
    """Run tests in this process, and return pytest's exit code."""
    import pytest

    early = "ignore::pytest.PytestAssertRewriteWarning"  # plugins were loaded before the fork
    options = [
        "-W",
        early,
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        MARKERS,
        f"--basetemp={folder / 'tests'}",
    ]
    return int(pytest.main([*options, *tests]))


@dataclass(frozen=True)
class Outcome:
    """How the tests of one mutant, or of the original, ended; times in seconds."""

    passed: bool
    processor: float
    wall: float
    loaded: tuple[str, ...] = ()


def forked(file: Path, source: str | None, tests: list[str], limit: Outcome | None) -> Outcome:
    """Run tests in a fork; with a limit, twice its processor time and six times its wall time."""
    folder = Path(tempfile.mkdtemp(prefix="exl2flow-mutant-"))
    begun = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        _child(file, source, tests, folder, limit)
    status = _waited(child, begun + (600 if limit is None else 20 + 6 * limit.wall))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    listed = folder / "loaded"
    loaded = tuple(listed.read_text().split()) if listed.exists() else ()
    shutil.rmtree(folder, ignore_errors=True)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(status == 0, processor, time.monotonic() - begun, loaded)


def _child(
    file: Path, source: str | None, tests: list[str], folder: Path, limit: Outcome | None
) -> None:
    code = 1
    try:
        os.setpgrp()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
        tempfile.tempdir = str(folder)
        if limit is not None:
            seconds = int(5 + 2 * limit.processor)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        if source is not None:
            replaced(file, source)
            _replace_in_children(file, source, folder)
        code = run_tests(tests, folder)
        if limit is None:
            (folder / "loaded").write_text("\n".join(_libraries()))
    finally:
        os._exit(code)


def _waited(child: int, end: float) -> int:
    """Wait for a process, and kill it and its children at a time; return its status."""
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what it left behind
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _libraries() -> list[str]:
    """Return the names of the loaded modules that are not of this repository."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_ours = file.startswith(str(ROOT)) and "site-packages" not in file
        if not is_ours and name.partition(".")[0] not in ("exl2flow", "__main__", "tests"):
            found.append(name)
    return found


def load(names: tuple[str, ...]) -> None:
    """Load libraries before forking."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


@dataclass
class File:
    """A file of the package: its mutants in the order in which the seed draws them, its tests.

    base: how the tests end without a change; None before they have run.
    """

    name: str
    drawn: list[Mutant]
    tests: list[str]
    base: Outcome | None = None

    @classmethod
    def of(cls, name: str, seed: int, state: State) -> "File":
        """Return a file; its mutants begin anew if it has changed."""
        source = (ROOT / name).read_text()
        every = mutants(name, source)
        drawn = random.Random(f"{seed} {name}").sample(every, len(every))
        state.begin(name, of=sha256(source.encode()).hexdigest()[:16], total=len(every))
        return cls(name, drawn, tests_of(name))

    def is_ready(self) -> bool:
        """Return whether its tests pass without a change, after loading their libraries."""
        if self.base is None and self.tests:
            self.base = forked(ROOT / self.name, None, self.tests, None)
            load(self.base.loaded)
        if self.base is not None and self.base.passed:
            return True
        why = "its tests fail without a change" if self.tests else "no unit test imports it"
        print(f"  {self.name}: {why}", flush=True)
        return False

    def survives(self, mutant: Mutant) -> bool:
        """Return whether the tests pass with a mutant."""
        return forked(ROOT / self.name, mutant.source, self.tests, self.base).passed

    def attempt(self, number: int, state: State) -> None:
        """Try a mutant and count it; a survivor is shown."""
        mutant, begun = self.drawn[number], time.monotonic()
        is_alive = self.survives(mutant)
        what = f"{self.name}:{mutant.line}: {mutant.before}  ->  {mutant.after}"
        if is_alive:
            print(f"  {what}", flush=True)
        counts = {"seconds": time.monotonic() - begun}
        survivors = {number: what} if is_alive else {}
        state.add(self.name, after=number + 1, failures=survivors, counts=counts)
        state.save()

    def again(self, failure: dict[str, Any], state: State) -> None:
        """Try a survivor once more, with the tests of today; count it if these kill it."""
        if self.survives(self.drawn[failure["case"]]):
            print(f"  {failure['what']}", flush=True)
            return
        state.failures.remove(failure)
        state.add(self.name, tried=0, counts={SINCE: 1})
        state.save()


def try_files(names: Sequence[str], count: int, state: State, end: float) -> None:
    """Try mutants, a few of each file in turn, those with the fewest so far first."""
    left = [File.of(name, state.seed, state) for name in names]
    while left and time.monotonic() < end:
        left = [file for file in left if state.next[file.name] < min(count, len(file.drawn))]
        for file in sorted(left, key=lambda file: state.next[file.name]):
            if time.monotonic() > end:
                return
            if not file.is_ready():
                left.remove(file)
                continue
            first = state.next[file.name]
            for number in range(first, min(first + TURN, count, len(file.drawn))):
                if time.monotonic() > end:
                    return
                file.attempt(number, state)


def try_again(names: Sequence[str], state: State, end: float) -> None:
    """Try the survivors of files that have not changed since."""
    for file in [File.of(name, state.seed, state) for name in names]:
        alive = [failure for failure in state.failures if failure["kind"] == file.name]
        if alive and file.is_ready():
            for failure in alive:
                if time.monotonic() > end:
                    return
                file.again(failure, state)


def main() -> None:
    """Print the survivors as they are found, then a table; stop when the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=MODULES, help="files of the package")
    parser.add_argument("--count", type=int, default=20, help="mutants per file")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    parser.add_argument("--seconds", type=float, default=3600, help="longest time for all")
    parser.add_argument("--state", type=Path, help=HELP)
    parser.add_argument("--again", action="store_true", help="only the survivors in the state")
    args = parser.parse_args()
    os.chdir(ROOT)
    path = None if args.state is None else args.state.resolve()
    end = time.monotonic() + args.seconds
    state = State.opened("mutants", path=path, seed=args.seed)
    if args.again:
        try_again(args.files, state, end)
    else:
        try_files(args.files, args.count, state, end)
    state.save(now=True)
    total, tried = sum(state.total.values()), sum(map(state.tried, state.counts))
    print(f"\n{state.report('file')}")
    print(
        f"\nfailed: no test noticed at once. {tried:,} of {total:,} mutants, {state.failed} of them"
    )


if __name__ == "__main__":
    main()
