"""The table of options that set a field of `ConversionConfig`: flag, field, help."""

from exl2flow.flows.cli.setting import Panel, Setting

DEVICE = Setting(
    flag="--device",
    field="device",
    metavar="auto|cpu|cuda",
    help="Where to compute; auto: CUDA when there is a usable GPU, else the CPU.",
)

RESULT: Panel = (
    "Result",
    (
        Setting(
            flag="--bpw",
            field="bpw",
            metavar="BITS",
            default="4",
            help="Average bits per weight of the decoder's matrices, scales and permutations "
            "included; 2 to 8. Embedding and head are not counted.",
        ),
        Setting(
            flag="--bpw-total",
            field="bpw_total",
            metavar="BITS",
            help="Instead of `--bpw`: bits per weight of the whole output, embedding and head "
            "included. The head's bits are then chosen with all others.",
        ),
        Setting(
            flag="--target-bytes",
            field="target_bytes",
            metavar="N",
            help="Instead of `--bpw`: the most bytes that all output files of weights may take.",
        ),
        Setting(
            flag="--fit",
            field="fit.memory",
            metavar="SIZE",
            default="none",
            help="Instead of `--bpw`: the memory of the GPU that will run the model, as 24GB. The "
            "largest model that fits beside its cache and what else it takes is made.",
        ),
        Setting(
            flag="--context",
            field="fit.context",
            metavar="N",
            help="With `--fit`: tokens whose keys and values must fit.",
        ),
        Setting(
            flag="--cache",
            field="fit.cache",
            metavar="FORMAT",
            help="With `--fit`: how they are held: fp16, fp8, q8, q6 or q4.",
        ),
        Setting(
            flag="--head-bits",
            field="head_bits",
            metavar="BITS",
            default="6 with `--bpw`, else chosen",
            help="Bits of the output head: 2, 3, 4, 5, 6 or 8.",
        ),
        Setting(
            flag="--shard-size-mb",
            field="shard_size_mb",
            metavar="MIB",
            help="Greatest size of an output file in MiB; 0: everything in one file.",
        ),
    ),
)
TOKEN_BLOCK = Setting(
    flag="--token-block",
    field="token_block",
    metavar="NAME",
    default="the token in HF_TOKEN",
    help="Prefect Secret block that holds the token for the Hugging Face Hub.",
)
MAX_MEMORY = Setting(
    flag="--max-memory",
    field="max_memory",
    metavar="SIZE",
    default="all there is",
    help="Memory of the GPU to use at most, as 24GB; states then lie in main memory if need be.",
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
            help="Folder of the checkpoints. Conversions of one model that share it share what "
            "they have in common: tokens and measurement.",
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
            help="How much work goes into a small error: fast, standard or best; exllamav2: the "
            "algorithm of the original program. Options that are given override the preset.",
        ),
        Setting(
            flag="--sensitivity",
            field="sensitivity.kind",
            metavar="fisher|error",
            help="What bits are allotted by: fisher: the KL divergence expected of every matrix, "
            "from one backward pass; error: the relative error of each sublayer.",
        ),
        Setting(
            flag="--sensitivity-rows",
            field="sensitivity.rows",
            metavar="N",
            help="Calibration rows of the backward pass.",
        ),
        Setting(
            flag="--rounds",
            field="rounding.rounds",
            metavar="N",
            help="Rounds of scale refit and coordinate descent after rounding; 0: none.",
        ),
    ),
)
CALIBRATION: Panel = (
    "Calibration",
    (
        Setting(
            flag="--calibration",
            field="calibration.text",
            metavar="standard|chat|self|FILE",
            help="standard: the built-in set. chat: half of the rows are dialogues in the model's "
            "chat template. self: the model writes half of the rows. Or a Parquet file with your "
            "own text in any text columns.",
        ),
        Setting(
            flag="--calibration-share",
            field="calibration.share",
            metavar="X",
            help="The share of `chat` or `self` rows, above 0, at most 1; the standard set makes "
            "the others.",
        ),
        Setting(
            flag="--rows",
            field="calibration.rows",
            metavar="N",
            help="Calibration rows that quantization sees.",
        ),
        Setting(
            flag="--row-tokens",
            field="calibration.row_tokens",
            metavar="N",
            help="Tokens in each of them; a multiple of 32.",
        ),
        Setting(
            flag="--measure-rows",
            field="calibration.measure_rows",
            metavar="N",
            help="Calibration rows that measurement sees.",
        ),
        Setting(
            flag="--measure-row-tokens",
            field="calibration.measure_row_tokens",
            metavar="N",
            help="Tokens in each of them; a multiple of 32.",
        ),
        Setting(
            flag="--seed",
            field="calibration.seed",
            metavar="N",
            help="Seed of the shuffled, the random-token and the self-written rows.",
        ),
        Setting(
            flag="--rope-scale",
            field="rope.scale",
            metavar="FACTOR",
            default="as config.json says",
            help="Divide positions by this while converting (linear context extension).",
        ),
        Setting(
            flag="--rope-alpha",
            field="rope.alpha",
            metavar="FACTOR",
            default="as config.json says",
            help="NTK factor on the rotary base while converting.",
        ),
    ),
)
ALLOCATION: Panel = (
    "Bit allocation",
    (
        Setting(
            flag="--measurement",
            field="measurement",
            metavar="FILE",
            default="measure",
            help="A measurement.json of this model to use instead of measuring: from `exl2flow "
            "measure`, or written by exllamav2.",
        ),
        Setting(
            flag="--objective",
            field="allocate.objective",
            metavar="log|sum|power",
            help="What is least at the end: the sum over sublayers of ln(error), of error, or of "
            "error to a power.",
        ),
        Setting(
            flag="--objective-power",
            field="allocate.power",
            metavar="P",
            help="The exponent of `--objective power`; above 0, at most 8.",
        ),
    ),
)
VALIDATION: Panel = (
    "Validation",
    (
        Setting(
            flag="--validate-text",
            field="validate_options.text",
            metavar="FILE",
            default="built-in held-out text",
            help="UTF-8 text file on which source and result are compared.",
        ),
        Setting(
            flag="--validate-rows",
            field="validate_options.rows",
            metavar="N",
            help="Rows of it at most.",
        ),
        Setting(
            flag="--validate-row-tokens",
            field="validate_options.row_tokens",
            metavar="N",
            help="Tokens per row; never more than the model has positions.",
        ),
        Setting(
            flag="--warn-ratio",
            field="validate_options.warn_perplexity_ratio",
            metavar="X",
            help="Warn when the result's perplexity is above X times the source's.",
        ),
        Setting(
            flag="--fail-ratio",
            field="validate_options.fail_perplexity_ratio",
            metavar="X",
            help="Fail (exit code 1) when it is above X times the source's.",
        ),
        Setting(
            flag="--sample-prompt",
            field="validate_options.sample_prompt",
            metavar="TEXT",
            help="Prompt of the text that the result generates for the report.",
        ),
        Setting(
            flag="--sample-tokens",
            field="validate_options.sample_tokens",
            metavar="N",
            help="Length of that text in tokens; 0: none.",
        ),
        Setting(
            flag="--sample-seed",
            field="validate_options.sample_seed",
            metavar="N",
            help="Seed of that text.",
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
            help="Repository on the Hugging Face Hub that receives a branch per bitrate in the "
            "end, as `exl2flow publish` does it. What can be refused is asked before any work.",
        ),
        Setting(
            flag="--private",
            field="publish.private",
            metavar="",  # a switch, which typer would show as `<bool>`
            default="public",
            help="With `--publish`: leave the repository private when all is verified.",
        ),
        Setting(
            flag="--force",
            field="publish.force",
            metavar="",  # a switch, which typer would show as `<bool>`
            default="refuse",
            help="With `--publish`: publish in spite of quality, gating or licence; the card "
            "says so.",
        ),
        Setting(
            flag="--max-kl",
            field="publish.max_kl",
            metavar="NATS",
            help="With `--publish`: refuse models whose KL divergence is above this.",
        ),
        Setting(
            flag="--base-model",
            field="publish.base_model",
            metavar="ORG/NAME",
            default="as recorded",
            help="With `--publish`: the source on the Hub, if it is a folder of your own.",
        ),
        Setting(
            flag="--license",
            field="publish.license",
            metavar="ID",
            default="as recorded",
            help="With `--publish`: licence of the source by the Hub's ids, if it is not recorded.",
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
            help="Rows of it at most.",
        ),
        Setting(
            flag="--row-tokens",
            field="validate_options.row_tokens",
            metavar="N",
            help="Tokens per row; never more than the models have positions.",
        ),
        Setting(
            flag="--warn-ratio",
            field="validate_options.warn_perplexity_ratio",
            metavar="X",
            help="Warn when a model's perplexity is above X times the reference's.",
        ),
        Setting(
            flag="--fail-ratio",
            field="validate_options.fail_perplexity_ratio",
            metavar="X",
            help="Fail (exit code 1) when it is above X times the reference's.",
        ),
        DEVICE,
        TOKEN_BLOCK,
    ),
)
CONVERSION = (RESULT, QUALITY, CALIBRATION, ALLOCATION, VALIDATION, PUBLISHING, RUNNING)
BITS = ("bpw", "bpw_total", "target_bytes", "fit")
EACH: Panel = ("Result", tuple(s for s in RESULT[1] if not s.field.startswith(BITS)))
SWEEP = (EACH, *CONVERSION[1:])
