"""Create the demo model: a byte-level BPE tokenizer and a small Llama, trained from scratch.

The text is the generator's corpus and, as a smaller share, the calibration prose of this
repository. The number of steps is fixed, so a run depends only on the seed and the shape. `demo` is
the shape that is shipped; `deep` checks findings on other proportions, `moe`, a Qwen3-MoE, on
experts, and `hybrid`, a Qwen3.5, on layers with a state, both in fewer steps. The loss of `moe`
includes what keeps the load of experts balanced. With `--mtp`, `hybrid` gets a block that predicts
one token more (MTP), trained along with it.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
STEPS, FEW_STEPS = 5000, 600
COSINE_STEPS = 1500
ROW_TOKENS, LONG_ROW_TOKENS = 512, 2048
LONG_ROW_EVERY = 4  # one in this many steps of the cosine phase also sees the last positions
WARM_UP = 150
PEAK_RATE, LAST_RATE = 2.5e-3, 1e-4
CHARACTERS_PER_TOKEN = 4.6
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Three queries share one key and together are wider than the hidden state; no dimension but
    # the vocabulary is a multiple of 128, all are multiples of 32
    "deep": {
        "hidden_size": 192,
        "intermediate_size": 416,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
    },
    "moe": {
        "hidden_size": 192,
        "intermediate_size": 416,  # of dense layers, of which there are none
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "hybrid": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.01,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "partial_rotary_factor": 0.25,
}
MTP_SHARE = 0.3  # of the block's loss
FAMILIES = {"moe": QWEN3_MOE, "hybrid": QWEN3_5}  # the others are Llamas


def config_of(shape: str) -> dict[str, Any]:
    """Return the content of `config.json`."""
    return {
        **FAMILIES.get(shape, LLAMA),
        "vocab_size": VOCABULARY,
        **SHAPES[shape],
        "hidden_act": "silu",
        "max_position_embeddings": LONG_ROW_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }


def prose_pieces(characters: int = 1600) -> list[str]:
    """Return the calibration prose, split into pieces of whole paragraphs."""
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
    """Train the byte-level BPE tokenizer; it prepends the begin token to every text."""
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
    """Return the tokens of every text, with begin and end tokens."""
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
    assert size >= tokens, f"the corpus has only {size} of {tokens} tokens"
    rng.shuffle(documents)
    return torch.tensor([token for document in documents for token in document][:tokens])


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at a step: linear warm-up, a plateau if time is left, half a cosine down."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = max(0.0, 1 - (steps - step) / min(COSINE_STEPS, steps - WARM_UP))
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_for(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def row_tokens(step: int, steps: int) -> int:
    """Return the length of a step's rows."""
    is_long = step >= steps - COSINE_STEPS and step % LONG_ROW_EVERY == 0
    return LONG_ROW_TOKENS if is_long else ROW_TOKENS


class MtpBlock(torch.nn.Module):
    """Reads a token and the model's state before it, and makes the state that the token will have.

    Names are those of published files, behind `mtp.`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the kind of layer and of norm from the model, whose last layer attends."""
        super().__init__()
        own, hidden = model.model, model.config.hidden_size
        last, eps = own.layers[-1], model.config.rms_norm_eps

        def norm() -> torch.nn.Module:
            return type(own.norm)(hidden, eps=eps)

        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = torch.nn.ModuleList([type(last)(model.config, len(own.layers) - 1)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm(), norm()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=model.config.initializer_range)
            elif "norm" in name:
                torch.nn.init.zeros_(parameter)  # norms multiply by one more

    def forward(self, model: PreTrainedModel, rows: torch.Tensor, states: torch.Tensor) -> Any:
        """Return the loss: of each token that is not its row's first or second."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(rows[:, 1:]))
        joined = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(states[:, :-1])], dim=-1))
        places = torch.arange(joined.shape[1], device=rows.device).expand(3, 1, -1)
        angles = model.model.rotary_emb(joined, places)
        made = self.norm(self.layers[0](joined, position_embeddings=angles, attention_mask=None))
        logits = model.lm_head(made[:, :-1])
        return cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())


def loss_of(model: PreTrainedModel, block: MtpBlock | None, rows: torch.Tensor) -> Any:
    """Return the loss of a model, and of its block if it has one."""
    if block is None:
        return model(input_ids=rows, labels=rows).loss
    states = model.model(input_ids=rows).last_hidden_state
    logits = model.lm_head(states[:, :-1])
    own = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return own + MTP_SHARE * block(model, rows, states)


def train(
    model: PreTrainedModel, stream: torch.Tensor, steps: int, block: MtpBlock | None = None
) -> None:
    """Train in one pass over the stream, printing the mean loss of the last hundred steps."""
    trained = torch.nn.ModuleList([model] if block is None else [model, block])
    optimizer = optimizer_for(trained)
    started = time.monotonic()
    recent: list[float] = []
    model.train()
    for step in range(steps):
        tokens = stream[step * TOKENS_PER_STEP :][:TOKENS_PER_STEP]
        rows = tokens.view(-1, row_tokens(step, steps)).to(model.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(model, block, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], loss.item()]
        if (step + 1) % 50 == 0 or step + 1 == steps:
            mean, seconds = sum(recent) / len(recent), time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)


def weights_of(model: PreTrainedModel, mtp: MtpBlock | None = None) -> dict[str, torch.Tensor]:
    """Return the weights as fp16 by their names in files: experts are packed in memory only."""
    named = {} if mtp is None else dict(mtp.named_parameters(prefix="mtp"))
    weights: dict[str, torch.Tensor] = named
    for name, value in model.named_parameters():
        block, is_packed, projections = name.partition(".experts.")
        if not is_packed:
            weights[name] = value
            continue
        names = ("gate_proj", "up_proj") if projections == "gate_up_proj" else ("down_proj",)
        for expert, both in enumerate(value):
            for projection, matrix in zip(names, both.chunk(len(names)), strict=True):
                weights[f"{block}.experts.{expert}.{projection}.weight"] = matrix
    return {name: value.half().cpu().contiguous() for name, value in weights.items()}


def save(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    folder: Path,
    mtp: MtpBlock | None = None,
) -> None:
    """Write the model in the Hugging Face layout, weights as fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(model, mtp), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True}
    files = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Create the tokenizer, train, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--steps", type=int, help=f"{STEPS}; of `moe` and `hybrid` {FEW_STEPS}")
    parser.add_argument("--output", type=Path, help="default for `demo`: the shipped folder")
    parser.add_argument("--device", default="cpu", help="cpu (2 threads) or cuda")
    parser.add_argument("--mtp", action="store_true", help="`hybrid` with an MTP block")
    arguments = parser.parse_args()
    if arguments.mtp and arguments.shape != "hybrid":
        parser.error("`--mtp` goes with `--shape hybrid`")
    if arguments.output is None and arguments.shape != "demo":
        parser.error(f"`--shape {arguments.shape}` is not shipped; give `--output`")
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    prose = prose_pieces()
    steps = arguments.steps or (FEW_STEPS if arguments.shape in FAMILIES else STEPS)
    tokens = steps * TOKENS_PER_STEP
    corpus = take(max(5_000_000, int(tokens * CHARACTERS_PER_TOKEN)), SEED)
    tokenizer = make_tokenizer(corpus[:8000] + prose * 6)
    stream = make_stream(tokenizer, corpus, prose, tokens, random.Random(SEED))
    config = config_of(arguments.shape)
    if arguments.mtp:
        config["mtp_num_hidden_layers"] = 1
    balanced = {"output_router_logits": True} if "num_experts" in config else {}
    known = AutoConfig.for_model(**config, **balanced)
    model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    mtp = MtpBlock(model).to(arguments.device) if arguments.mtp else None
    train(model.to(arguments.device), stream, steps, mtp)
    save(model, tokenizer, config, arguments.output or HERE / "model", mtp)


if __name__ == "__main__":
    main()
