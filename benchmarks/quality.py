"""Quality of conversions at several bitrates, beside exllamav2's figures for the same model.

    python benchmarks/quality.py --model DIR --text FILE [--bpw 2.5 3.0 ...] [--device cpu]
        [--peer FIGURES.json] [--work DIR] [-- MORE OPTIONS]

Converts to every bitrate (one measurement), reads the written files back, and scores all of them on
all rows of the text with one pass of the source. The peer's file maps a bitrate to an object with
`bytes`, `perplexity`, `kl_divergence` and `top1_agreement`. Prints a Markdown table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

Figures = dict[str, float]


def run(*arguments: object) -> str:
    """Run the command line and return what it prints."""
    command = [sys.executable, "-m", "exl2flow.flows.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def row(bpw: float, found: Figures, peer: Figures | None) -> str:
    """Return one line of the table."""
    cells = [
        f"{bpw:g}",
        f"{found['bytes']:,}",
        f"{found['perplexity']:.2f}",
        f"{found['kl_divergence']:.4f}",
        f"{found['top1_agreement']:.4f}",
    ]
    if peer is not None:
        cells += [
            f"{peer['bytes']:,}",
            f"{peer['perplexity']:.2f}",
            f"{peer['kl_divergence']:.4f}",
            f"{peer['top1_agreement']:.4f}",
            f"{found['kl_divergence'] / peer['kl_divergence']:.3f}",
            f"{found['bytes'] / peer['bytes']:.5f}",
        ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Convert, score and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bpw", type=float, nargs="+", default=[2.5, 3.0, 4.0, 5.0, 6.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--work", type=Path, default=Path("quality-work"))
    parser.add_argument("options", nargs="*", help="further options of `exl2flow convert`")
    arguments = parser.parse_args()
    device = ["--device", arguments.device]
    outs = [arguments.work / f"{arguments.model.name}-{bpw:g}bpw" for bpw in arguments.bpw]
    for bpw, out in zip(arguments.bpw, outs, strict=True):
        options = ["--bpw", bpw, "--work-root", arguments.work / "checkpoints", "--no-prefect"]
        run("convert", arguments.model, "--out", out, *options, *device, *arguments.options)
    scores = run(
        "validate", *outs, "--reference", arguments.model, "--text", arguments.text,
        "--rows", 10**6, "--json", *device,
    )  # fmt: skip
    peers = json.loads(arguments.peer.read_bytes()) if arguments.peer else {}
    columns = ["bpw", "bytes", "perplexity", "KL divergence", "top-1"]
    if peers:
        columns += [f"exllamav2's {name}" for name in columns[1:]] + ["KL ratio", "bytes ratio"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    found = [json.loads(line) for line in scores.splitlines()]
    for bpw, figures in zip(arguments.bpw, found, strict=True):
        print(row(bpw, figures, peers.get(f"{bpw:g}")))
    print(
        f"\nsource: perplexity {found[0]['reference_perplexity']:.2f}, {found[0]['tokens']} tokens"
    )


if __name__ == "__main__":
    main()
