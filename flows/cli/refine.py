"""`exl2flow refine`: better codes and scales for a model that is there, at the same size."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from exl2flow.core.config import ConversionConfig, RefinementConfig, TuneOptions
from exl2flow.flows.cli.console import OUT, emit_json, show
from exl2flow.flows.cli.options import Values, build, with_settings
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.settings import CALIBRATION, QUALITY, RUNNING, VALIDATION
from exl2flow.flows.cli.sources import with_local_source
from exl2flow.flows.cli.tables import plan_table, print_report

MOST_BPW = 8.0  # reachable for every model; how many bits the model has is not asked
EXAMPLES = (
    "Examples:",
    "exl2flow refine ./Llama-3.2-1B-4.0bpw --reference ./Llama-3.2-1B --out ./refined",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --quality best",
    "An interrupted run goes on where it stopped when the command is repeated.",
)


@with_settings(QUALITY, CALIBRATION, VALIDATION, RUNNING)
def refine(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of the EXL2 model, by exl2flow or exllamav2.",
            show_default=False,
        ),
    ],
    *,
    reference: Annotated[
        Path,
        typer.Option(
            "--reference",
            metavar="SOURCE",
            help="The unquantized model that it was made from: a folder, or org/name on the Hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder that receives the refined model: new, empty, or of an earlier run with "
            "the same reference.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Forget the checkpoints of this refinement, begin anew."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on stdout: report, judgement, paths."),
    ] = False,
) -> None:
    """Fit codes and scales of an EXL2 model anew to its source.

    Bits, groups and permutations stay, so the size is the same to the byte. Rows of text that are
    set aside judge: where they do not get nearer to the source, the old matrices stay.
    """
    begun = time.monotonic()
    given = build(reference, out, values)
    config = _config(model, with_local_source(given, plain=as_json, renew=restart))
    rows = _check(config)
    if not as_json:
        show(plan_table(rows))
    with shown(plain=as_json):
        report = _run(config, restart=restart)
    seconds = time.monotonic() - begun
    if as_json:
        emit_json({"seconds": round(seconds, 1), **report})
    else:
        print_report(report, seconds)
        OUT.print(_in_words(report["refinement"]), markup=False, soft_wrap=True)
    if report["failures"]:
        from exl2flow.inference.validate.stage import check_verdict

        check_verdict(Path(report["report_folder"]))


def _config(model: Path, config: ConversionConfig) -> RefinementConfig:
    return RefinementConfig.model_validate({**dict(config), "model": model})


def _check(config: RefinementConfig) -> list[tuple[str, str]]:
    """Find out what would go wrong, and return (what, value) of what will be done.

    Raises:
        ConfigError, SourceModelError: problems with the model, or it is not the reference's.
        PreflightFailed: problems with the reference, the output or the options.
    """
    from exl2flow.quant.forecast.preflight import preflight  # these import torch
    from exl2flow.quant.refine.stored_model import check_refinement
    from exl2flow.tasks.stages import REFINE_STAGES

    check_refinement(config)
    forecast = config.model_copy(update={"bpw": MOST_BPW, "tune": TuneOptions()})
    plan = preflight(forecast, REFINE_STAGES)
    return [
        ("model", str(config.model)),
        ("reference", f"{plan.model} ({plan.architecture}, {plan.layers} layers)"),
        ("device", plan.device),
        ("calibration", plan.calibration),
        ("output", plan.out),
        ("checkpoints", plan.work_dir),
    ]


def _run(config: RefinementConfig, *, restart: bool) -> dict[str, Any]:
    """Run the stages and return the validation report with the judgement."""
    from exl2flow.core.files import read_json
    from exl2flow.core.progress import Tick, report
    from exl2flow.flows.cli.restart import forget
    from exl2flow.flows.conversion import open_pipeline
    from exl2flow.inference.validate.stage import REPORT_FILE
    from exl2flow.quant.judge.stage import JUDGEMENT_FILE
    from exl2flow.tasks.stages import REFINE_STAGES

    pipeline = open_pipeline(config, REFINE_STAGES)
    if restart:
        forget(pipeline)
    for name in pipeline.stages:
        if pipeline.is_complete(name):
            report(Tick(stage=name, done=1, total=1, detail="cached"))
        pipeline.run(name, progress=report)
    folder = pipeline.path("validate")
    judgement = read_json(pipeline.path("judge") / JUDGEMENT_FILE)
    return {
        **read_json(folder / REPORT_FILE),
        "refinement": judgement,
        "report_folder": str(folder),
    }


def _in_words(judgement: dict[str, Any]) -> str:
    """Return what the rows set aside said."""
    kl = f"{judgement['kl_before']:.5f} -> {judgement['kl_after']:.5f}"
    verdict = "refined" if judgement["refined"] else "no better: the old matrices stay"
    return f"KL divergence on {judgement['rows']} rows set aside: {kl}, {verdict}"
