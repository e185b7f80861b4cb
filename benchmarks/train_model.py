"""Train a Llama of 63 M weights from scratch on one GPU, in minutes and without a network.

    python benchmarks/train_model.py --out DIR [--shape base] [--steps 1800] [--device cuda]

The text is what the running Python has installed: docstrings and comments of `.py` files, `.md`,
`.rst` and `.txt` files and the descriptions of packages, without paragraphs that differ only in
names and numbers. So a model depends on the installed packages as well as on the seed: compare
figures of models of one run only. Beside the model in the Hugging Face layout, weights as fp16, lie
`test.txt`, text to score on, and `kind.parquet`, more of the kind for `--calibration`; the model
has seen no file of either. `small` checks on a CPU, in a few minutes, that all of this works.
"""

import argparse
import ast
import gc
import json
import math
import os
import random
import re
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = "<|bos|>", "<|eos|>"
SEED, VOCABULARY, CONTEXT = 1234, 8192, 2048
PEAK_RATE, LAST_RATE = 1e-3, 1e-4
TEST_BYTES, KIND_BYTES = 400_000, 3_000_000
SHORTEST, LONGEST = 40, 8_000  # characters of a paragraph
SHORTEST_DOCUMENT, LONGEST_APART = 200, 40_000  # characters
LARGEST_FILE = 2_000_000  # bytes; what is larger is a table
PROSE, SPACES = 0.8, 0.1  # least shares of characters
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Shape(NamedTuple):
    """A model of heads of 64, and how it is trained; `files` is None for all."""

    sizes: tuple[int, ...]  # by SIZES
    steps: int
    rows: int
    row_tokens: int
    files: int | None = None


SHAPES = {
    "base": Shape((768, 2048, 8, 12, 4), steps=1800, rows=16, row_tokens=CONTEXT),
    "small": Shape((128, 256, 2, 2, 1), steps=20, rows=4, row_tokens=256, files=4000),
}


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        **dict(zip(SIZES.split(), shape.sizes, strict=True)),
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }


def installed_files(at_most: int | None) -> list[Path]:
    """Return the files that may hold text, shuffled."""
    paths = sysconfig.get_paths()
    roots = {Path(paths[n]).resolve() for n in ("stdlib", "platstdlib", "purelib", "platlib")}
    found: dict[str, Path] = {}  # by the path in its root, which alone decides the order
    for root in sorted(roots):
        for folder, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages")]
            for name in names:
                if name.endswith((".py", ".md", ".rst", ".txt")) or name == "METADATA":
                    path = Path(folder, name)
                    found.setdefault(str(path.relative_to(root)), path)
    files_in_order = [found[name] for name in sorted(found)]
    random.Random(SEED).shuffle(files_in_order)
    return files_in_order[:at_most]


def python_prose(source: str) -> str:
    """Return docstrings and whole lines of comments, in their order."""
    found: dict[int, str] = {}  # by the first line
    strings: set[int] = set()  # lines of docstrings
    nodes: list[Any] = [ast.parse(source)]  # only statements: expressions would take longest
    while nodes:
        node = nodes.pop()
        for name in ("body", "orelse", "handlers", "finalbody"):
            nodes += getattr(node, name, [])
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            found[node.body[0].lineno] = text
            strings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    first, last = 0, -1
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("#") and number not in strings:
            first, last = (first if number == last + 1 else number), number
            text = line.strip().lstrip("#:!").removeprefix(" ")
            found[first] = f"{found[first]}\n{text}" if first in found else text
    text = "\n\n".join(found[number] for number in sorted(found))
    return text.encode("utf-8", "replace").decode("utf-8")  # escapes may stand for half a character


def is_prose(paragraph: str) -> bool:
    """Tell sentences from code, tables and lists of words."""
    text = " ".join(paragraph.split())
    size, spaces, letters = len(text), text.count(" "), sum(map(str.isalpha, text))
    is_text = letters + spaces >= PROSE * size and spaces >= SPACES * size
    return is_text and SHORTEST <= size <= LONGEST


def paragraphs_of(path: Path) -> list[tuple[str, str]]:
    """Return the prose of a file; before each paragraph, its words without names and numbers."""
    warnings.simplefilter("ignore")  # of strings in other people's code
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= LARGEST_FILE else ""
        if path.suffix == ".py":
            text = python_prose(text)
        elif path.name == "METADATA":
            text = text.partition("\n\n")[2]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", text)]
    words = [" ".join(re.findall(r"\b[a-z]+\b", p)) or p for p in paragraphs]
    return [(w, p) for w, p in zip(words, paragraphs, strict=True) if is_prose(p)]


def documents_of(files: Sequence[Path]) -> list[str]:
    """Return the prose of each file, without paragraphs that an earlier file has."""
    seen: set[str] = set()
    documents = []
    with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
        for paragraphs in pool.map(paragraphs_of, files, chunksize=64):
            new = {words: text for words, text in paragraphs if words not in seen}
            seen.update(new)
            document = "\n\n".join(new.values())
            if len(document) >= SHORTEST_DOCUMENT:
                documents.append(document)
    return documents


def size_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def set_apart(documents: list[str], size: int) -> list[str]:
    """Take documents of `size` bytes out of the list, none so long that it would dominate."""
    taken = []
    for index in reversed(range(len(documents))):
        if size > 0 and len(documents[index]) <= LONGEST_APART:
            taken.append(documents.pop(index))
            size -= size_of(taken[-1:])
    return taken


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer; it prepends the begin token to every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    template = {"single": f"{BOS} $A", "pair": f"{BOS} $A {BOS} $B"}
    tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=[(BOS, 0)])
    return tokenizer


def batches(tokenizer: Tokenizer, documents: Sequence[str], shape: Shape) -> Iterator[torch.Tensor]:
    """Yield rows of shuffled documents, int64 (rows, row_tokens), in as many passes as asked."""
    ids: list[torch.Tensor] = []
    for start in range(0, len(documents), 1000):
        encoded = tokenizer.encode_batch(list(documents[start : start + 1000]))
        ids += [torch.tensor([*item.ids, 1]) for item in encoded]
    generator = random.Random(SEED)
    tokens, size = sum(map(len, ids)), shape.rows * shape.row_tokens
    print(f"{tokens} tokens, {tokens // size} steps a pass", flush=True)
    if tokens < size:
        raise SystemExit(f"{tokens} tokens of text, a step needs {size}; install more packages")
    while True:
        generator.shuffle(ids)
        stream = torch.cat(ids)
        yield from stream[: len(stream) // size * size].view(-1, shape.rows, shape.row_tokens)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at a step: linear warm-up, then half a cosine down."""
    warm_up = max(1, steps // 20)
    progress = max(0, step - warm_up) / max(1, steps - warm_up)
    rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
    return rate * min(1.0, (step + 1) / warm_up)


def train(model: LlamaForCausalLM, rows: Iterator[torch.Tensor], steps: int) -> None:
    """Train: AdamW on fp32 weights, which a GPU computes with in bf16; print loss and rate."""
    weights = list(model.parameters())
    masters = [w.detach().clone() for w in weights]
    decays = [
        {"params": [m for m in masters if (m.dim() > 1) == (decay > 0)], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]
    optimizer = torch.optim.AdamW(decays, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16 if weight.is_cuda else torch.float32)
    losses, started = list[torch.Tensor](), time.monotonic()
    for step in range(steps):
        batch = next(rows).to(model.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.data.copy_(master)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            mean = torch.stack(losses).mean().item()  # waits for the GPU
            rate = len(losses) * batch.numel() / (time.monotonic() - started)
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {rate:.0f} tokens/s", flush=True)
            losses, started = [], time.monotonic()
    for weight, master in zip(weights, masters, strict=True):
        weight.data = master


@torch.inference_mode()
def test_loss(model: LlamaForCausalLM, ids: Sequence[int], row_tokens: int) -> float:
    """Return the mean loss of whole rows of a text."""
    rows = torch.tensor(ids[: len(ids) // row_tokens * row_tokens], device=model.device)
    losses = [model(input_ids=row, labels=row).loss for row in rows.view(-1, 1, row_tokens)]
    return torch.stack(losses).mean().item()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights as fp16, and the tokenizer."""
    weights = {n: v.detach().half().cpu().contiguous() for n, v in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    tokens = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | tokens, indent=2) + "\n")


def main() -> None:
    """Collect the text, create the tokenizer, train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--steps", type=int, help="default: the shape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    shape, folder = SHAPES[arguments.shape], arguments.out
    started = time.monotonic()
    documents = documents_of(installed_files(shape.files))
    total, seconds = size_of(documents), time.monotonic() - started
    test, kind = set_apart(documents, TEST_BYTES), set_apart(documents, KIND_BYTES)
    print(f"{total} bytes of text in {seconds:.0f} s; apart: {size_of(test)}, {size_of(kind)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.txt").write_text("\n\n".join(test), encoding="utf-8")
    pq.write_table(pa.table({"text": [f"{text}\n\n" for text in kind]}), folder / "kind.parquet")
    tokenizer = make_tokenizer(documents[::3])
    rows = batches(tokenizer, documents, shape)
    torch.manual_seed(SEED)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    model = LlamaForCausalLM(LlamaConfig(**config_of(shape)))
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    train(model.to(arguments.device), rows, arguments.steps or shape.steps)
    loss = test_loss(model, tokenizer.encode("\n\n".join(test)).ids, shape.row_tokens)
    print(f"test loss {loss:.4f}, perplexity {math.exp(loss):.2f}", flush=True)
    save(model, tokenizer, folder)


if __name__ == "__main__":
    main()
