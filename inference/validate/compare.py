"""Scores of models on one text, by the GPUs that share its rows."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.reports import Score
from exl2flow.core.runtime.ranks import ALONE, WorkRanks
from exl2flow.core.store.crew import Crew
from exl2flow.inference.scoring.evaluate import Advance, evaluate
from exl2flow.inference.validate.stage import held_out_rows


def compare(
    models: Sequence[Path],
    reference: Path | None,
    options: ValidateOptions,
    *,
    places: Sequence[str],
    advance: Advance,
) -> list[Score]:
    """Score models on the same rows, which share the reference's forward pass.

    Args:
        models: model folders, EXL2 or plain.
        reference: folder of the model to measure divergence from.
        options: of the text.
        places: devices with a process each, this one's first; see `core.store.crew.places`.
        advance: see `evaluate_texts`; called in this process only.

    Raises:
        Exl2FlowError: see `evaluate_texts` and `held_out_rows`; or a process is lost.
    """
    if len(places) == 1:
        alone = replace(ALONE, device=torch.device(places[0]))
        return _scores(models, reference, options, ranks=alone, advance=advance)
    with closing(Crew(places, [_scores])) as crew:
        scores: list[Score] = crew.call(_scores, models, reference, options, advance=advance)
    return scores


def _scores(
    models: Sequence[Path],
    reference: Path | None,
    options: ValidateOptions,
    *,
    ranks: WorkRanks,
    advance: Advance | None = None,
) -> list[Score]:
    """Return the scores at rank 0; at others none."""
    ids = held_out_rows([reference or models[0], *models], options)
    return evaluate(
        models, ids, reference=reference, device=ranks.device, advance=advance, ranks=ranks
    )
