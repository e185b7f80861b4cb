"""Quality of conversions by preset and bitrate, next to exllamav2's figures for the same model.

    python benchmarks/quality.py --model DIR --text FILE [--bpw 2.5 3.0 ...] [--peer FIGURES.json]
        [--total [2.5 3.0 ...]] [--quality fast standard best exllamav2] [--jobs N]
        [--device cpu] [--work DIR] [-- MORE OPTIONS OF `exl2flow convert`]

The first table has a fixed head (6 bits unless options say otherwise) and decoders at `--bpw`. The
second, with `--total`, has outputs of at most the peer's bytes at these bitrates, or at all the
peer's bitrates, and a free head. The peer's file maps a bitrate to an object with `bytes`,
`perplexity`, `kl_divergence` and `top1_agreement`.

A preset is measured once: its first conversion shares its checkpoints with the others. All models
are scored on the text as written to disk. Seconds cover all stages but `validate`, shared ones
included, whenever they ran; peak memory is the largest resident set of a process. A stopped run
continues when it is repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Figures = dict[str, float]
SHARED_STAGES = ("compose", "tokenize", "sensitivity", "measure")
NO_LIMIT = ("--warn-ratio", 10**6, "--fail-ratio", 10**6)  # bad models are results too
BITRATES = (2.5, 3.0, 4.0, 5.0, 6.0)
ALL_ROWS = 10**6
COLUMNS = (
    "preset",
    "bpw",
    "bytes",
    "bytes ratio",
    "perplexity",
    "KL divergence",
    "KL ratio",
    "top-1",
    "seconds",
    "peak MB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One model to create; `target_bytes` is None for a decoder of `bpw` and a fixed head."""

    quality: str
    bpw: float
    target_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name of the output folder."""
        kind = "" if self.target_bytes is None else "-total"
        return f"{self.quality}-{self.bpw:g}bpw{kind}"

    @property
    def target(self) -> tuple[object, ...]:
        """The options that limit its size."""
        if self.target_bytes is None:
            return ("--bpw", self.bpw)
        return ("--target-bytes", self.target_bytes)


def run(*arguments: object, threads: int, log: Path) -> tuple[str, float]:
    """Run the command line; return its output and the peak memory in MB."""
    command = [sys.executable, "-m", "exl2flow.flows.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert process.stdout is not None
        with process.stdout as pipe:
            printed = pipe.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(
            f"status {process.returncode} of `{' '.join(command)}`:\n{log.read_text()[-2000:]}"
        )
    return printed, usage.ru_maxrss / 1024


def lend(root: Path, other: Path) -> None:
    """Link the shared stages of a work root into another one; no stage writes into its files."""
    for folder in root.glob("*/*/*"):  # model, stage, fingerprint
        target = other / folder.relative_to(root)
        if folder.parent.name in SHARED_STAGES and not target.exists():
            shutil.copytree(folder, target, copy_function=os.link)


def stage_seconds(folder: Path) -> Figures:
    """Return the seconds of a stage and of all stages it depends on, by stage."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    found = {manifest["stage"]: manifest["seconds"]}
    for stage, fingerprint in manifest["inputs"].items():
        found |= stage_seconds(folder.parents[1] / stage / fingerprint[:16])
    return found


def convert(conversion: Conversion, *, arguments: argparse.Namespace, threads: int) -> Figures:
    """Convert, and return seconds and peak memory."""
    work: Path = arguments.work
    root = work / "checkpoints" / conversion.name
    printed, peak = run(
        "convert",
        arguments.model,
        "--out",
        work / conversion.name,
        *conversion.target,
        "--quality",
        conversion.quality,
        "--work-root",
        root,
        "--device",
        arguments.device,
        "--no-prefect",
        "--json",
        "--validate-rows",
        1,
        "--sample-tokens",
        0,
        *NO_LIMIT,
        *arguments.options,
        threads=threads,
        log=work / f"{conversion.name}.log",
    )
    memory = work / f"{conversion.name}.peak.json"  # a repeated run finds all stages finished
    if memory.is_file():
        peak = max(peak, json.loads(memory.read_bytes()))
    memory.write_text(json.dumps(peak))
    stages = stage_seconds(Path(json.loads(printed)["report_folder"]))
    del stages["validate"]
    print(f"{conversion.name}: {stages}", file=sys.stderr, flush=True)
    return {"seconds": sum(stages.values()), "peak": peak}


def convert_all(conversions: Sequence[Conversion], arguments: argparse.Namespace) -> list[Figures]:
    """Convert the first of every preset, then the others with the first one's checkpoints."""
    roots = arguments.work / "checkpoints"
    first: dict[str, Conversion] = {}
    for conversion in conversions:
        first.setdefault(conversion.quality, conversion)
    done = dict(zip(first.values(), together(convert, first.values(), arguments), strict=True))
    others = [conversion for conversion in conversions if conversion not in done]
    for conversion in others:
        lend(roots / first[conversion.quality].name, roots / conversion.name)
    done |= zip(others, together(convert, others, arguments), strict=True)
    peaks = {quality: done[conversion]["peak"] for quality, conversion in first.items()}
    return [{**done[c], "peak": max(done[c]["peak"], peaks[c.quality])} for c in conversions]


def score(models: Sequence[Path], *, arguments: argparse.Namespace, threads: int) -> list[Any]:
    """Score models on the text in one process, which needs one pass over the source."""
    printed, _ = run(
        "validate",
        *models,
        "--reference",
        arguments.model,
        "--text",
        arguments.text,
        "--rows",
        arguments.text_rows,
        "--json",
        "--device",
        arguments.device,
        *NO_LIMIT,
        threads=threads,
        log=arguments.work / f"{models[0].name}.validate.log",
    )
    return [json.loads(line) for line in printed.splitlines()]


def together(work: Any, items: Iterable[Any], arguments: argparse.Namespace) -> list[Any]:
    """Return the results of `work` on the items, run in `--jobs` parallel processes."""
    items = list(items)
    width = max(1, min(arguments.jobs, len(items)))
    threads = max(1, int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)) // width)
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(partial(work, arguments=arguments, threads=threads), items))


def row(name: str, bpw: float, found: Figures, peer: Figures | None) -> str:
    """Return one line of a table; without `peer` there are no ratios."""
    seconds, peak = found.get("seconds"), found.get("peak")
    cells = [
        name,
        f"{bpw:g}",
        f"{found['bytes']:,}",
        f"{found['bytes'] / peer['bytes']:.5f}" if peer else "",
        f"{found['perplexity']:.2f}",
        f"{found['kl_divergence']:.5f}",
        f"{found['kl_divergence'] / peer['kl_divergence']:.3f}" if peer else "",
        f"{found['top1_agreement']:.4f}",
        "" if seconds is None else f"{seconds:.1f}",
        "" if peak is None else f"{peak:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def print_table(
    results: Sequence[tuple[Conversion, Figures]], peers: dict[float, Figures], peer_name: str
) -> None:
    """Print one table, bitrate by bitrate, the peer's line first."""
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for bpw in dict.fromkeys(conversion.bpw for conversion, _ in results):
        peer = peers.get(bpw)
        if peer:
            print(row(peer_name, bpw, peer, peer))
        for conversion, found in results:
            if conversion.bpw == bpw:
                print(row(conversion.quality, bpw, found, peer))


def planned(arguments: argparse.Namespace, peers: dict[float, Figures]) -> list[Conversion]:
    """Return all conversions of both tables."""
    bitrates = arguments.bpw
    fixed = [Conversion(quality=q, bpw=b) for q in arguments.quality for b in bitrates]
    if arguments.total is None:
        return fixed
    free = [quality for quality in arguments.quality if quality != "exllamav2"]  # measures no head
    missing = set(arguments.total) - set(peers)
    if missing or not peers:
        sys.exit(f"--total needs --peer FILE with figures at {sorted(missing) or 'some bitrate'}")
    return fixed + [
        Conversion(quality=quality, bpw=bpw, target_bytes=int(peers[bpw]["bytes"]))
        for quality in free
        for bpw in arguments.total or peers
    ]


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--text-rows", type=int, default=ALL_ROWS, help="most rows to score on")
    parser.add_argument("--bpw", type=float, nargs="*", default=BITRATES)
    parser.add_argument("--total", type=float, nargs="*", help="bitrates of the peer to match")
    parser.add_argument("--quality", nargs="+", default=["standard"])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("quality-work"))
    parser.add_argument("options", nargs="*", help="further options of `exl2flow convert`")
    return parser.parse_args()


def main() -> None:
    """Convert, score and print."""
    arguments = parse()
    file = json.loads(arguments.peer.read_bytes()) if arguments.peer else {}
    peers = {float(bpw): figures for bpw, figures in file.items()}
    conversions = planned(arguments, peers)
    arguments.work.mkdir(parents=True, exist_ok=True)
    costs = convert_all(conversions, arguments)
    models = [arguments.work / conversion.name for conversion in conversions]
    groups = [models[i :: arguments.jobs] for i in range(min(arguments.jobs, len(models)))]
    found = [item for group in together(score, groups, arguments) for item in group]
    by_name = {Path(item["model"]).name: item for item in found}
    results = [(c, {**by_name[c.name], **cost}) for c, cost in zip(conversions, costs, strict=True)]
    for title, is_total in (("Same decoder bits, fixed head", False), ("Same bytes", True)):
        chosen = [item for item in results if (item[0].target_bytes is not None) is is_total]
        if chosen:
            print(f"\n{title}:\n")
            print_table(chosen, peers, arguments.peer.stem if arguments.peer else "")
    print(f"\nsource: perplexity {found[0]['reference_perplexity']:.2f}, ", end="")
    print(f"{found[0]['tokens']} tokens, {arguments.jobs} conversions at a time")


if __name__ == "__main__":
    main()
