"""The judge stage: whether refining brought a model closer to its reference, on held-out rows.

They were used neither for Hessians nor for Fisher factors. The old matrices stay unless the KL
divergence decreases.
"""

import logging
from collections.abc import Mapping

import torch

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.reports import JudgementReport
from exl2flow.core.store.files import write_json
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.quant.refine.stored_model import StoredModel
from exl2flow.quant.refine.tuned import latest
from exl2flow.quant.tokenize.stage import judging_texts
from exl2flow.quant.training.judges import Judges
from exl2flow.quant.walk.divergence import row_divergences
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import advance, save_here

log = logging.getLogger(__name__)

JUDGEMENT_FILE = "judgement.json"


def divergences(
    run: StageRun[RefinementConfig],
    reference: SourceModel,
    models: Mapping[str, SourceModel],
    rows: torch.Tensor,
) -> dict[str, list[float]]:
    """Return the KL divergence of models from a reference in nats per token, by name and row.

    Args:
        run: the stage; ticks and stops after every sublayer, and resumes from saved states.
        reference: the model to compare with.
        models: the models to compare; their sublayers match the reference's.
        rows: int64 (rows, t).
    """
    order, folder = reference.spec.sublayers, run.folder
    walked = [reference, *models.values()]
    saved = folder.load_states()
    if saved is None:
        start, states = 0, [model.initial_states(rows) for model in walked]
    else:
        pairs = zip(walked, saved[1], strict=True)
        start, states = saved[0], [model.placed(hidden) for model, hidden in pairs]
    for spec in order[start:]:
        states = [model.entering(x, spec) for model, x in zip(walked, states, strict=True)]
        for model, hidden in zip(walked, states, strict=True):
            advance(model.sublayer(spec), hidden)
        run.tick(spec.index + 1, len(order) + 1, spec.name)
        save_here(run, states, spec.index + 1, torch.stack)
    expected, *others = (x[..., : reference.spec.hidden_size] for x in states)
    wanted = reference.head()
    return {
        name: row_divergences(wanted, expected, model.head(), hidden)
        for (name, model), hidden in zip(models.items(), others, strict=True)
    }


@torch.inference_mode()
def judge(run: StageRun[RefinementConfig]) -> None:
    """Write the divergences before and after refining, and which matrices to use."""
    if run.folder.valid(JUDGEMENT_FILE):
        return  # it ended behind its last commit
    config = run.config
    stored = StoredModel.open(config, run.device)
    total = run.folder.manifest.total = len(stored.spec.sublayers) + 1
    folder = run.inputs["tokenize"]
    judges = Judges(judging_texts(folder, config.held_out_rows))
    models = {
        "before": stored.as_stored(),
        "after": stored.with_matrices(latest(run.inputs) / "sublayers"),
    }
    found = divergences(run, SourceModel.open(config, run.device), models, judges.rows)
    judges.judgements.extend(found[name] for name in models)
    kl = {name: judges.mean(index) for index, name in enumerate(models)}
    content: dict[str, object] = {
        "rows": len(judges.rows),
        "tokens": judges.rows.numel(),
        "kl_before": kl["before"],
        "kl_after": kl["after"],
        "refined": judges.best == 1,
    }
    if len(judges.texts) > 1:
        content["texts"] = {
            text: {"kl_before": judges.means(0)[text], "kl_after": after}
            for text, after in judges.means(1).items()
        }
    if not content["refined"]:
        reason = judges.refused() or "no lower divergence"
        run.folder.note(
            f"refining did not help: KL {kl['before']:.5f} -> {kl['after']:.5f} on the rows set "
            f"aside ({reason}); the old matrices stay"
        )
        log.warning("%s", run.folder.manifest.notes[-1])
    sha256 = write_json(run.folder.path / JUDGEMENT_FILE, content)
    run.folder.commit(JUDGEMENT_FILE, sha256, cursor=total)
    run.tick(total, total, f"KL on rows set aside {kl['before']:.5f} -> {kl['after']:.5f}")


def judgement_in_words(judgement: JudgementReport) -> str:
    """Return in one line what the held-out rows showed."""
    kl = f"{judgement.kl_before:.5f} -> {judgement.kl_after:.5f}"
    verdict = "refined" if judgement.refined else "no better: the old matrices stay"
    return f"KL divergence on {judgement.rows} held-out rows: {kl}, {verdict}"


def _options(config: RefinementConfig) -> dict[str, object]:
    return {"held_out_rows": config.held_out_rows, "rope": config.rope.model_dump()}


JUDGE: Stage[RefinementConfig] = Stage(
    name="judge",
    schema=1,
    inputs=("tokenize", "refine", "tune"),
    options=_options,
    run=judge,
    files=lambda config: config.model.glob("*"),
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
)
