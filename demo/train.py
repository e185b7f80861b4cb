"""Make the demo model: a byte-level BPE tokenizer and a small Llama, trained from scratch.

The text is the generator's corpus and, as a smaller share, the calibration prose of this
repository. The number of steps is fixed, so a run depends on the seed only.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from corpus import take

HERE = Path(__file__).resolve().parent
PROSE = HERE.parent / "calibration_data" / "text"
PROSE_KINDS = ("encyclopedia", "web", "stories", "technical")
PROSE_SHARE, PROSE_REPEATS = 0.15, 16
BOS, EOS = "<|bos|>", "<|eos|>"
SEED = 1234
VOCABULARY = 4096
TOKENS_PER_STEP = 2048
STREAM_TOKENS = 8_600_000
STEPS = 4000
COSINE_STEPS = 1200
LONG_STEPS = 200
WARM_UP = 150
PEAK_RATE, LAST_RATE = 2.5e-3, 1e-4
CHARACTERS_PER_TOKEN = 4.6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float16",
}


def prose_pieces(characters: int = 1600) -> list[str]:
    """Return the calibration prose in pieces of whole paragraphs."""
    pieces: list[str] = []
    for kind in PROSE_KINDS:
        for path in sorted((PROSE / kind).rglob("*.txt")):
            piece = ""
            for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
                piece = f"{piece}\n\n{paragraph.strip()}".strip()
                if len(piece) >= characters:
                    pieces.append(piece)
                    piece = ""
            if piece:
                pieces.append(piece)
    return pieces


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer; it puts the begin token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
            ),
        ]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of every text, with the begin and the end token."""
    encoded = tokenizer.encode_batch(texts)
    return [[*item.ids, 1] for item in encoded]


def make_stream(
    tokenizer: Tokenizer, corpus: list[str], prose: list[str], tokens: int, rng: random.Random
) -> torch.Tensor:
    """Return one stream of shuffled documents, with the prose repeated up to its share."""
    stories, pieces = encode(tokenizer, corpus), encode(tokenizer, prose)
    prose_tokens = sum(map(len, pieces))
    repeats = min(PROSE_REPEATS, round(PROSE_SHARE * tokens / max(1, prose_tokens)))
    documents = pieces * repeats
    size = prose_tokens * repeats
    print(f"prose: {len(pieces)} pieces, {repeats} times, {size} tokens", flush=True)
    for story in stories:
        documents.append(story)
        size += len(story)
        if size >= tokens:
            break
    assert size >= tokens, f"the corpus has only {size} tokens of {tokens}"
    rng.shuffle(documents)
    return torch.tensor([token for document in documents for token in document][:tokens])


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at a step: linear warm-up, a plateau, then half a cosine down."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = max(0.0, 1 - (steps - step) / COSINE_STEPS)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_for(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


class Training:
    """One pass over the stream, resumable from a checkpoint; the last steps use longer rows."""

    def __init__(self, model: LlamaForCausalLM, stream: torch.Tensor, steps: int) -> None:
        self.model, self.stream, self.steps = model, stream, steps
        self.optimizer = optimizer_for(model)
        self.step = 0
        self.seconds = 0.0
        self.recent: list[float] = []

    def rows(self) -> torch.Tensor:
        """Return the tokens of the current step."""
        length = 1024 if self.step >= self.steps - LONG_STEPS else 512
        start = self.step * TOKENS_PER_STEP
        return self.stream[start : start + TOKENS_PER_STEP].view(-1, length)

    def advance(self) -> None:
        """Take one step."""
        started = time.monotonic()
        rows = self.rows()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps)
        loss = self.model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recent = [*self.recent[-99:], loss.item()]
        self.step += 1
        self.seconds += time.monotonic() - started

    def mean_loss(self) -> float:
        """Return the mean loss of the last hundred steps."""
        return sum(self.recent) / max(1, len(self.recent))

    def run(self, checkpoint: Path | None) -> None:
        """Train to the last step, printing the loss and keeping the checkpoint."""
        self.model.train()
        while self.step < self.steps:
            self.advance()
            if self.step % 50 == 0 or self.step == self.steps:
                progress = f"step {self.step}/{self.steps}  loss {self.mean_loss():.3f}"
                print(f"{progress}  {self.seconds:.0f} s", flush=True)
            if checkpoint and self.step % 200 == 0:
                self.store(checkpoint)

    def store(self, path: Path) -> None:
        """Write the checkpoint."""
        keys = ("step", "seconds", "recent")
        state = {key: getattr(self, key) for key in keys}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path)
        self.step, self.seconds, self.recent = state["step"], state["seconds"], state["recent"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        print(f"continued at step {self.step}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in the Hugging Face layout, weights as fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    files = {
        "config.json": CONFIG,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make the tokenizer, train, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=HERE / "model")
    parser.add_argument("--checkpoint", type=Path, help="file to keep and to continue from")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    prose = prose_pieces()
    corpus = take(int(STREAM_TOKENS * CHARACTERS_PER_TOKEN), SEED)
    tokenizer = make_tokenizer(corpus[:8000] + prose * 6)
    stream = make_stream(tokenizer, corpus, prose, STREAM_TOKENS, random.Random(SEED))
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    training = Training(model, stream, arguments.steps)
    if arguments.checkpoint and arguments.checkpoint.exists():
        training.restore(arguments.checkpoint)
    training.run(arguments.checkpoint)
    save(model, tokenizer, arguments.output)
    print(f"last loss {training.mean_loss():.3f}, saved in {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
