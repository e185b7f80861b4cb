"""The table of options that set a field of `ConversionConfig`: flag, field, help."""

from exl2flow.flows.cli.options.allocation import ALLOCATION
from exl2flow.flows.cli.options.setting import Panel, Setting
from exl2flow.flows.cli.options.source import FORM_OF_SOURCE

DEVICE = Setting(
    flag="--device",
    field="device",
    metavar="auto|cpu|cuda",
    help="Device to compute on; auto: CUDA if there is a usable GPU, else the CPU.",
)

RESULT: Panel = (
    "Result",
    (
        Setting(
            flag="--bpw",
            field="bpw",
            metavar="BITS",
            default="4",
            help="Average bits per weight of the decoder's matrices, from 2 to 8; "
            "embedding and head are not counted.",
        ),
        Setting(
            flag="--bpw-total",
            is_rare=True,
            field="bpw_total",
            metavar="BITS",
            help="Instead of `--bpw`: bits per weight of the whole output, embedding and "
            "head included. Allocation then chooses the head's bits, too.",
        ),
        Setting(
            flag="--target-bytes",
            is_rare=True,
            field="target_bytes",
            metavar="N",
            help="Instead of `--bpw`: maximum size of all weight files together, in bytes.",
        ),
        Setting(
            flag="--fit",
            field="fit.memory",
            metavar="SIZE",
            default="none",
            help="Instead of `--bpw`: memory of the GPU that will run the model, as 24GB. "
            "Makes the largest model that fits beside its cache and working memory.",
        ),
        Setting(
            flag="--context",
            is_rare=True,
            field="fit.context",
            metavar="N",
            help="With `--fit`: context length whose cache must fit, in tokens.",
        ),
        Setting(
            flag="--cache",
            is_rare=True,
            field="fit.cache",
            metavar="FORMAT",
            help="With `--fit`: format of that cache: fp16, fp8, q8, q6 or q4.",
        ),
        Setting(
            flag="--head-bits",
            is_rare=True,
            field="head_bits",
            metavar="BITS",
            default="6 with `--bpw`, else chosen",
            help="Bits of the output head: 2, 3, 4, 5, 6 or 8.",
        ),
        Setting(
            flag="--shard-size-mb",
            is_rare=True,
            field="shard_size_mb",
            metavar="MIB",
            help="Maximum size of an output file in MiB; 0: a single file.",
        ),
    ),
)
TOKEN_BLOCK = Setting(
    flag="--token-block",
    is_rare=True,
    field="token_block",
    metavar="NAME",
    default="the token in HF_TOKEN",
    help="Prefect Secret block with the token for the Hugging Face Hub.",
)
MAX_MEMORY = Setting(
    flag="--max-memory",
    field="max_memory",
    metavar="SIZE",
    default="all there is",
    help="GPU memory to use at most, as 24GB. Hidden states move to main memory if needed.",
)
RUNNING: Panel = (
    "Running",
    (
        MAX_MEMORY,
        Setting(
            flag="--work-root",
            field="work_root",
            metavar="DIR",
            default="`.exl2flow` beside the output",
            help="Folder for checkpoints. Conversions of one model with the same work root "
            "share tokens and measurement.",
        ),
        DEVICE,
        TOKEN_BLOCK,
    ),
)
QUALITY: Panel = (
    "Quality",
    (
        Setting(
            flag="--quality",
            field="quality",
            metavar="PRESET",
            help="How much work to spend on a small error: fast, standard or best; "
            "exllamav2: the original program's algorithm. Options you give override "
            "the preset.",
        ),
        Setting(
            flag="--sensitivity",
            is_rare=True,
            field="sensitivity.kind",
            metavar="fisher|error",
            help="Cost by which bits are allocated. fisher: expected KL divergence of each "
            "matrix, from one backward pass; error: relative error of each sublayer.",
        ),
        Setting(
            flag="--sensitivity-rows",
            is_rare=True,
            field="sensitivity.rows",
            metavar="N",
            help="Calibration rows for the backward pass.",
        ),
        Setting(
            flag="--rounds",
            is_rare=True,
            field="rounding.rounds",
            metavar="N",
            help="Rounds of scale refitting and coordinate descent after rounding; 0: none.",
        ),
    ),
)
CALIBRATION: Panel = (
    "Calibration",
    (
        Setting(
            flag="--calibration",
            field="calibration.text",
            metavar="TEXT",
            help="standard: the built-in set. chat: half of the rows are dialogues in the "
            "model's chat template. self: the model writes half of the rows. Or a "
            "Parquet file with text columns.",
        ),
        Setting(
            flag="--calibration-share",
            is_rare=True,
            field="calibration.share",
            metavar="X",
            help="Share of `chat` or `self` rows, above 0 and at most 1; the rest is the "
            "standard set.",
        ),
        Setting(
            flag="--rows",
            field="calibration.rows",
            metavar="N",
            help="Calibration rows for quantization.",
        ),
        Setting(
            flag="--row-tokens",
            is_rare=True,
            field="calibration.row_tokens",
            metavar="N",
            help="Tokens per row; a multiple of 32.",
        ),
        Setting(
            flag="--measure-rows",
            is_rare=True,
            field="calibration.measure_rows",
            metavar="N",
            help="Calibration rows for measurement.",
        ),
        Setting(
            flag="--measure-row-tokens",
            is_rare=True,
            field="calibration.measure_row_tokens",
            metavar="N",
            help="Tokens per measurement row; a multiple of 32.",
        ),
        Setting(
            flag="--seed",
            is_rare=True,
            field="calibration.seed",
            metavar="N",
            help="Seed for shuffled, random-token and self-written rows.",
        ),
        Setting(
            flag="--rope-scale",
            is_rare=True,
            field="rope.scale",
            metavar="FACTOR",
            default="as config.json says",
            help="Divide positions by this during conversion (linear context extension).",
        ),
        Setting(
            flag="--rope-alpha",
            is_rare=True,
            field="rope.alpha",
            metavar="FACTOR",
            default="as config.json says",
            help="NTK factor on the rotary base during conversion.",
        ),
    ),
)
VALIDATION: Panel = (
    "Validation",
    (
        Setting(
            flag="--validate-text",
            is_rare=True,
            field="validate_options.text",
            metavar="FILE",
            default="built-in held-out text",
            help="UTF-8 text file on which to compare source and result.",
        ),
        Setting(
            flag="--validate-rows",
            is_rare=True,
            field="validate_options.rows",
            metavar="N",
            help="Maximum number of rows of that text.",
        ),
        Setting(
            flag="--validate-row-tokens",
            is_rare=True,
            field="validate_options.row_tokens",
            metavar="N",
            help="Tokens per row; capped at the model's positions.",
        ),
        Setting(
            flag="--warn-ratio",
            is_rare=True,
            field="validate_options.warn_perplexity_ratio",
            metavar="X",
            help="Warn if perplexity exceeds X times the source's.",
        ),
        Setting(
            flag="--fail-ratio",
            is_rare=True,
            field="validate_options.fail_perplexity_ratio",
            metavar="X",
            help="Fail (exit code 1) if perplexity exceeds X times the source's.",
        ),
        Setting(
            flag="--sample-prompt",
            is_rare=True,
            field="validate_options.sample_prompt",
            metavar="TEXT",
            help="Prompt for the sample text in the report.",
        ),
        Setting(
            flag="--sample-tokens",
            is_rare=True,
            field="validate_options.sample_tokens",
            metavar="N",
            help="Length of the sample in tokens; 0: no sample.",
        ),
        Setting(
            flag="--sample-seed",
            is_rare=True,
            field="validate_options.sample_seed",
            metavar="N",
            help="Seed for the sample.",
        ),
    ),
)
PUBLISHING: Panel = (
    "Publishing",
    (
        Setting(
            flag="--publish",
            field="publish.repo",
            metavar="ORG/NAME",
            default="nowhere",
            help="Repository on the Hugging Face Hub to publish to, one branch per "
            "bitrate. Everything that could refuse it is checked first.",
        ),
        Setting(
            flag="--private",
            is_rare=True,
            field="publish.private",
            metavar="",  # a switch, which typer would show as `<bool>`
            default="public",
            help="With `--publish`: keep the repository private after verification.",
        ),
        Setting(
            flag="--force",
            is_rare=True,
            field="publish.force",
            metavar="",  # a switch, which typer would show as `<bool>`
            default="refuse",
            help="With `--publish`: publish despite quality, gating or licence; the card says so.",
        ),
        Setting(
            flag="--max-kl",
            is_rare=True,
            field="publish.max_kl",
            metavar="NATS",
            help="With `--publish`: refuse models with a KL divergence above this.",
        ),
        Setting(
            flag="--base-model",
            is_rare=True,
            field="publish.base_model",
            metavar="ORG/NAME",
            default="as recorded",
            help="With `--publish`: the source on the Hub, if it was converted from a "
            "local folder.",
        ),
        Setting(
            flag="--license",
            is_rare=True,
            field="publish.license",
            metavar="ID",
            default="as recorded",
            help="With `--publish`: the source's licence as a Hub id, if it is not recorded.",
        ),
    ),
)
EVALUATION: Panel = (
    "Evaluation",
    (
        Setting(
            flag="--text",
            field="validate_options.text",
            metavar="FILE",
            default="built-in held-out text",
            help="UTF-8 text file to evaluate on.",
        ),
        Setting(
            flag="--rows",
            field="validate_options.rows",
            metavar="N",
            help="Maximum number of rows of it.",
        ),
        Setting(
            flag="--row-tokens",
            field="validate_options.row_tokens",
            metavar="N",
            help="Tokens per row; capped at the models' positions.",
        ),
        Setting(
            flag="--warn-ratio",
            field="validate_options.warn_perplexity_ratio",
            metavar="X",
            help="Warn if a model's perplexity exceeds X times the reference's.",
        ),
        Setting(
            flag="--fail-ratio",
            field="validate_options.fail_perplexity_ratio",
            metavar="X",
            help="Fail (exit code 1) if it exceeds X times the reference's.",
        ),
        DEVICE,
        TOKEN_BLOCK,
    ),
)
OTHERS = (QUALITY, CALIBRATION, ALLOCATION, VALIDATION, PUBLISHING, RUNNING)
CONVERSION = (RESULT, FORM_OF_SOURCE, *OTHERS)
BITS = ("bpw", "bpw_total", "target_bytes", "fit")
EACH: Panel = ("Result", tuple(s for s in RESULT[1] if not s.field.startswith(BITS)))
SWEEP = (EACH, *CONVERSION[1:])
