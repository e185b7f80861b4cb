"""The options of `exl2flow generate` that set a field of `GenerationOptions`, in panels."""

from collections.abc import Mapping

from exl2flow.core.options.generation import GenerationOptions
from exl2flow.flows.cli.options.build import Values, validated
from exl2flow.flows.cli.options.sampling import SAMPLING
from exl2flow.flows.cli.options.setting import Panel, Setting

# panel → field → (metavar, what people see as the default); the help is the field's description
ROWS: Mapping[str, Mapping[str, tuple[str, str | None]]] = {
    "Prompt": {
        "prompts": ("FILE", None),
        "out": ("FILE", "stdout"),
        "negative_prompt": ("TEXT", None),
        "heal": ("", None),
        "no_bos": ("", None),
        "special": ("", None),
    },
    "Stopping": {
        "max_new_tokens": ("N", None),
        "min_new_tokens": ("N", None),
        "stop": ("TEXT", None),
        "ignore_eos": ("", None),
        "ban": ("TEXT", None),
        "end_loops": ("", None),
    },
    "Constraints": {
        "json_schema": ("FILE|JSON", None),
        "regex": ("REGEX", None),
        "grammar": ("FILE", None),
        "prefer_end": ("", None),
    },
    "Model and cache": {
        "device": ("auto|cpu|cuda", None),
        "gpu_split": ("GB,…|auto", "one GPU"),
        "reserve": ("BYTES,…", "192 MiB of the first one, 64 MiB of the others"),
        "devices": ("N,…", "all"),
        "cache": ("FORMAT", "as computed"),
        "tokens": ("N", "one context, or as many as fit"),
        "slots": ("N", None),
        "lora": ("FOLDER", None),
        "max_tokens": ("N", "the model's context"),
        "rope_scale": ("X", None),
        "rope_alpha": ("X", None),
        "rope_yarn": ("X", None),
    },
    "Speculative decoding (same text)": {
        "draft": ("MODEL", None),
        "ngram": ("", None),
        "draft_tokens": ("N", None),
    },
}
ROPE = ("rope_scale", "rope_alpha", "rope_yarn")
SPLIT = ("gpu_split", "reserve", "devices")
RARE = (*ROPE, *SPLIT, "draft_tokens", "no_bos", "end_loops", "prefer_end")
REPEATED = ("stop", "ban", "lora")


def _row(field: str, metavar: str, default: str | None) -> Setting:
    text = str(GenerationOptions.model_fields[field].description)
    more = "; may be repeated" if field in REPEATED else ""
    return Setting(
        flag=f"--{field.replace('_', '-')}",
        field=field,
        metavar=metavar,
        help=f"{text[0].upper()}{text[1:]}{more}.",
        default=default,
        is_rare=field in RARE,
        model=GenerationOptions,
    )


GENERATION: tuple[Panel, ...] = tuple(
    (panel, tuple(_row(field, *row) for field, row in rows.items())) for panel, rows in ROWS.items()
)


def build_generation(values: Values) -> GenerationOptions:
    """Return the options of `exl2flow generate` but for those of the sampler.

    Raises:
        ConfigError: naming the option that is out of range.
    """
    flags = {s.field: s.flag for _, members in GENERATION for s in members}
    sampling = {s.field for s in SAMPLING[1]}
    own = {field: value for field, value in values.items() if field not in sampling}
    return validated(GenerationOptions, own, flags)
