"""lm-eval scores a text through the server as we score it without.

It brings 31 packages, so it is installed in an environment of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serving import DEMO, serving
from sources import ROOT

from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.model import Tokenizer

PACKAGES = ("lm-eval==0.4.13", "aiohttp", "requests", "tenacity")
TASK = """
task: own_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
NATS_PER_TOKEN = 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sums_of_lm_eval_are_ours(tmp_path: Path) -> None:
    whole = (ROOT / "demo" / "heldout.txt").read_text(encoding="utf-8")
    texts = [text for text in whole.split("\n\n") if 100 < len(text) < 2000][:8]
    rows, bos = [{"text": text} for text in texts], 0
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = TASK.replace("FILE", str(tmp_path / "rows.jsonl"))
    (tmp_path / "own_text.yaml").write_text(task, encoding="utf-8")
    python = installed(tmp_path / "venv")

    with serving("--tokens", "8192") as served:
        model = {
            "model": "demo",
            "base_url": f"{served.url}/v1/completions",
            "tokenizer_backend": "remote",
            "custom_prefix_token_id": str(bos),
            "max_length": "2048",
        }
        subprocess.run(
            [
                *(python, "-m", "lm_eval", "run", "--model", "local-completions"),
                *("--model_args", ",".join(f"{k}={v}" for k, v in model.items())),
                *("--batch_size", "4", "--tasks", "own_text", "--include_path", tmp_path),
                *("--log_samples", "--output_path", tmp_path / "out"),
            ],
            check=True,
            cwd=tmp_path,
            env={n: v for n, v in os.environ.items() if not n.startswith("PYTHON")},
        )

    [log] = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = {each["doc"]["text"]: float(each["resps"][0][0]) for each in samples}
    tokenizer = Tokenizer.load(DEMO)
    assert set(found) == set(texts)
    for text in texts:
        ids = torch.tensor([[bos, *tokenizer.encode(text, add_bos=False)]])
        [score] = evaluate([DEMO], ids)
        assert score.rows is not None
        [losses] = score.rows.losses
        assert found[text] == pytest.approx(-losses, abs=NATS_PER_TOKEN * (ids.shape[1] - 1))


def installed(folder: Path) -> str:
    """Return the Python of a new environment that has lm-eval."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python
