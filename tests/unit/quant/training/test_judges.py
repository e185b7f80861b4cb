"""What several texts say of a training."""

import math

import pytest
import torch

from exl2flow.quant.training.judges import Judges, from_flat

TEXTS = {"own": torch.zeros(3, 4), "unlike": torch.zeros(3, 4)}
FIRST = [1.0, 1.1, 0.9, 2.0, 2.2, 1.8]


@pytest.fixture
def judges() -> Judges:
    """Nothing but the first judgement."""
    return Judges(TEXTS, [FIRST])


def test_the_mean_over_texts_of_the_ratio_decides(judges: Judges) -> None:
    judges.judgements.append([0.5, 0.55, 0.45, 2.0, 2.2, 1.8])
    judges.judgements.append([0.9, 0.99, 0.81, 1.0, 1.1, 0.9])

    assert judges.scores() == pytest.approx([1.0, 0.75, 0.7])
    assert judges.best == 2
    assert judges.refused() == ""
    assert judges.in_words(1) == "own 1.0000 -> 0.5000, unlike 2.0000 -> 2.0000"


def test_a_text_that_got_worse_beyond_its_interval_refuses(judges: Judges) -> None:
    judges.judgements.append([0.1, 0.1, 0.1, 2.1, 2.3, 1.9])  # each row, so beyond any interval
    judges.judgements.append([0.9, 0.9, 0.9, 1.9, 2.7, 1.5])  # on average, not beyond it

    assert judges.worse(1) == ["unlike"]
    assert judges.scores()[1] == math.inf
    assert judges.worse(2) == []
    assert judges.best == 2
    assert judges.refused().startswith(
        "not taken, because unlike text got worse: own 1.0000 -> 0.1"
    )


def test_what_is_not_a_number_is_never_taken(judges: Judges) -> None:
    judges.judgements.append([math.nan] * 6)

    assert judges.best == 0


def test_judgements_are_restored_from_numbers(judges: Judges) -> None:
    judges.judgements.append([0.5] * 6)

    again = from_flat(TEXTS, [kl for judgement in judges.judgements for kl in judgement])

    assert again.judgements == judges.judgements
