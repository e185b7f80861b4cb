"""The options that decide how bits are allocated."""

from exl2flow.flows.cli.options.setting import Panel, Setting

ALLOCATION: Panel = (
    "Bit allocation",
    (
        Setting(
            flag="--measurement",
            field="measurement",
            metavar="FILE",
            default="measure",
            help="Use this measurement.json, written by `exl2flow measure` or exllamav2.",
        ),
        Setting(
            flag="--prefer",
            is_rare=True,
            field="allocate.prefer",
            metavar="quality|speed",
            help="quality: groups of 32, 64 and 128 rows. speed: the layers' matrices only get "
            "groups of 128, which decode a little faster on a GPU; the error grows.",
        ),
        Setting(
            flag="--objective",
            is_rare=True,
            field="allocate.objective",
            metavar="log|sum|power",
            help="Quantity to minimize over all sublayers: the sum of ln(error), of error, "
            "or of error to a power.",
        ),
        Setting(
            flag="--objective-power",
            is_rare=True,
            field="allocate.power",
            metavar="P",
            help="Exponent for `--objective power`; above 0, at most 8.",
        ),
    ),
)
