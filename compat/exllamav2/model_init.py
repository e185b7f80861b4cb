"""Options on the command lines of scripts, and a model loaded with them."""

import argparse
from typing import Any

from exl2flow.compat.exllamav2.model import ExLlamaV2, ExLlamaV2Config
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError

VALUES = {  # name: its short form, its type and help
    "model_dir": ("m", str, "folder of the model"),
    "gpu_split": ("gs", str, "auto, or GB per device"),
    "length": ("l", int, "longest text, prompt included"),
    "rope_scale": ("rs", float, "divides positions"),
    "rope_alpha": ("ra", float, "NTK factor"),
    "rope_yarn": ("ry", float, "YaRN factor"),
    "experts_per_token": ("ept", int, "no effect"),
    "chunk_size": ("chunk", int, "tokens of a prompt that one pass reads"),
}
FLAGS = {
    "tensor_parallel": "tp",
    "no_flash_attn": "nfa",
    "no_xformers": "nxf",
    "no_sdpa": "nsdpa",
    "no_graphs": "ng",
    "low_mem": "lm",
    "load_q4": "lq4",
    "fast_safetensors": "fst",
    "ignore_compatibility": "ic",
    "cache_8bit": "c8",
    "cache_q4": "cq4",
    "cache_q6": "cq6",
    "cache_q8": "cq8",
}


def add_args(parser: argparse.ArgumentParser) -> None:
    # many scripts define the options of caches themselves, before or after
    parser._optionals.conflict_handler = "resolve"
    for name, (short, kind, text) in VALUES.items():
        parser.add_argument(f"-{short}", f"--{name}", type=kind, help=text)
    for name, short in FLAGS.items():
        parser.add_argument(f"-{short}", f"--{name}", action="store_true")


def check_args(args: argparse.Namespace) -> None:
    if not args.model_dir:
        raise ConfigError("no model is given; add `-m FOLDER`")
    ExLlamaV2Tokenizer(ExLlamaV2Config(args.model_dir))


def print_options(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in (*VALUES, *FLAGS) if getattr(args, name)}
    print(" -- Model:", given.pop("model_dir", None))
    print(" -- Options:", given)


def init(
    args: argparse.Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    """Return model and tokenizer; the model is loaded unless that waits for its cache."""
    config = ExLlamaV2Config(args.model_dir)
    given: dict[str, Any] = {
        "max_seq_len": args.length,
        "scale_pos_emb": args.rope_scale,
        "scale_alpha_value": args.rope_alpha,
        "max_batch_size": max_batch_size,
        "max_input_len": args.chunk_size or max_input_len,
        "max_output_len": max_output_len,
    }
    vars(config).update({name: value for name, value in given.items() if value is not None})
    if args.rope_yarn:
        config.alt_rope_method, config.yarn_rope_factor = "yarn", args.rope_yarn
    if args.low_mem:
        config.set_low_mem()
    model = ExLlamaV2(config)
    if not skip_load and not (allow_auto_split and args.gpu_split == "auto"):
        post_init_load(model, args, progress=progress)
    return model, ExLlamaV2Tokenizer(config)


def post_init_load(
    model: ExLlamaV2,
    args: argparse.Namespace,
    allow_auto_split: bool = False,
    progress: bool = False,
) -> None:
    split = args.gpu_split if args.gpu_split not in (None, "auto") else None
    sizes = None if split is None else [float(size) for size in split.split(",")]
    (model.load_tp if args.tensor_parallel else model.load)(sizes, progress=progress)
