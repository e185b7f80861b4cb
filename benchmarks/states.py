"""Whether errors of a quantized model with states grow along a text.

    python demo/train.py --shape hybrid --output DIR
    python demo/corpus.py --seed 2 --characters 800000 --plain > TEXT
    python benchmarks/states.py --model DIR --quantized OUT --text TEXT [--rows 64] [--device cpu]

Prints the mean KL divergence of the quantized model from the source, in nats, at positions 64 to
564 of rows of 2,048 tokens and at 1,500 to 2,000, and their ratio.
"""

import argparse
from pathlib import Path

import torch

from exl2flow.inference import load_model

TOKENS, AT_ONCE = 2048, 4
EARLY, LATE = slice(64, 564), slice(1500, 2000)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "quantized", "text"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    models = [
        load_model(m, device=arguments.device) for m in (arguments.model, arguments.quantized)
    ]
    ids = models[0].tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    rows = torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).view(-1, TOKENS)[: arguments.rows]
    sums = {EARLY.start: 0.0, LATE.start: 0.0}
    for some in rows.to(arguments.device).split(AT_ONCE):
        hidden = [model.decoder.hidden(some) for model in models]
        for span in (EARLY, LATE):
            expected, found = (
                model.decoder.head(x[:, span]).float().log_softmax(-1)
                for model, x in zip(models, hidden, strict=True)
            )
            divergence = (expected.exp() * (expected - found)).sum(-1)
            sums[span.start] += float(divergence.mean(dim=1).sum())
    early, late = (total / len(rows) for total in sums.values())
    print("| rows | KL at 64 to 564 | KL at 1,500 to 2,000 | ratio |\n|---|---|---|---|")
    print(f"| {len(rows)} | {early:.5f} | {late:.5f} | {late / early:.3f} |")


if __name__ == "__main__":
    main()
