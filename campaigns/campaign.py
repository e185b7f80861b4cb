"""Run all campaigns in turn, with an equal share of the time each: `make campaign SECONDS=3600`.

Each goes on with its state in `--states`, and one table shows what all of them have tried so far.
`--seed` is that of new states; a state keeps its own.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from state import ROOT, State

HERE = Path(__file__).resolve().parent
GOALS = {  # program → how much of it in all
    "fuzz": ("--inputs", "100000"),
    "crashes": ("--states", "10000"),
    "faults": ("--memory", "1000"),
    "kills": ("--kills", "1000"),
    "flips": ("--count", "1000", "--gate", "30"),
    "leaks": ("--failures", "1000", "--flows", "100"),
    "floods": ("--scale", "20"),
    "mutants": ("--count", "1000000"),
}
GRACE_SECONDS = 600.0  # after its time, for a program that does not end


def run(program: str, path: Path, *, seconds: float, seed: int) -> bool:
    """Run a program for some time; return whether it ended with 0."""
    print(f"\n{program}: {seconds:.0f} s", flush=True)
    words = [*GOALS[program], "--seconds", f"{seconds:.0f}"]
    seed = State.read(path).seed if path.exists() else seed
    words += ["--state", str(path), "--seed", str(seed)]
    command = [sys.executable, str(HERE / f"{program}.py"), *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=sys.stderr, timeout=seconds + GRACE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{program}: killed, because it did not end", flush=True)
        return False
    if done.returncode:
        print(f"{program}: exit code {done.returncode}", flush=True)
    return done.returncode == 0


def table(states: list[State]) -> str:
    """Return one table of all states, a line for each kind of subject."""
    lines = ["| program | kind | tried | failed | rate (95 %) |", "|---|---|---|---|---|"]
    for state in states:
        for kind in state.counts:
            lines.append(f"| {state.program} | {' | '.join(state.row(kind))} |")
    return "\n".join(lines)


def main() -> int:
    """Run them; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all together")
    parser.add_argument("--seed", type=int, default=1, help="of new states")
    parser.add_argument("--states", type=Path, default=HERE / "state", help="folder")
    parser.add_argument("--only", nargs="+", choices=GOALS, default=list(GOALS))
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    paths = {program: given.states.resolve() / f"{program}.json" for program in given.only}
    failed = []
    for index, (program, path) in enumerate(paths.items()):
        share = max(0.0, end - time.monotonic()) / (len(paths) - index)
        if not run(program, path, seconds=share, seed=given.seed):
            failed.append(program)
    states = [State.read(path) for path in paths.values() if path.exists()]
    print("", *(state.heading() for state in states), "", table(states), sep="\n")
    if failed:
        print(f"\nfailed: {', '.join(failed)}; failures are in `{given.states}`")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
