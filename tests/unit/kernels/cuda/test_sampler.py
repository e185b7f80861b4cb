"""What a GPU launches to sample: launches are recorded instead of made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sampled import PLAIN, slots_of

from exl2flow.core.errors import ConfigError
from exl2flow.engine.sampling import Kind, SamplingSettings
from exl2flow.kernels.cuda import sampler as cuda_sampler
from exl2flow.kernels.cuda.compiler import STRETCH, LaunchRefused
from exl2flow.kernels.interface.sampling import MOST_REPEATED
from exl2flow.kernels.reference import sampler as torch_sampler

VOCABULARY = 40_000
GREEDY = SamplingSettings.greedy()
FEW = ["select_likeliest", "choose_few"]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[int, ...], int]]:
    """Record the grids and the shared memory of launches from now on, by name."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}

    def kept(file: str, name: str, grid: tuple[int, ...], *arguments: Any, **how: Any) -> None:
        assert how.get("together", False) == (name == "choose_all")
        found[name] = grid, how.get("shared", 0)

    monkeypatch.setattr(cuda_sampler, "launch", kept)
    monkeypatch.setattr(cuda_sampler, "limits", lambda index: (132, 227 << 10))
    return found


@torch.inference_mode()
def sample(settings: SamplingSettings, rows: int = 3, **options: Any) -> None:
    slots = slots_of([settings] * rows, VOCABULARY, room=3 * STRETCH)
    kind = Kind.of([settings], **options)
    draws = torch.zeros(rows, dtype=torch.float64)
    cuda_sampler.sample(torch.zeros(rows, VOCABULARY), slots.state(rows, kind), draws, kind)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GREEDY, FEW),
        (SamplingSettings(top_k=1024), FEW),
        (SamplingSettings(typical=0.5, mirostat=True, xtc_probability=0.5), FEW),
        (SamplingSettings(repetition_penalty=1.1, token_bias=((1, 1.0),)), ["adjust", *FEW]),
        (SamplingSettings(dry_multiplier=1.0), ["find_repetitions", "adjust", *FEW]),
        (SamplingSettings(cfg_scale=1.5), ["norms", "adjust", *FEW]),
        (SamplingSettings(top_k=1025), ["adjust", "choose_all"]),
        (PLAIN, ["adjust", "choose_all"]),
    ],
    ids=lambda value: "",
)
def test_a_disabled_sampler_step_is_not_launched(
    settings: SamplingSettings, expected: list[str], launches: dict
) -> None:
    sample(settings)

    assert list(launches) == expected


def test_pieces_cover_the_vocabulary_and_the_history(launches: dict) -> None:
    sample(replace(GREEDY, repetition_penalty=1.1, dry_multiplier=1.0))

    assert launches == {
        "find_repetitions": ((3, 3), 0),
        "adjust": ((10, 3), 4096 * 16),
        "select_likeliest": ((3, 3), 0),
        "choose_few": ((3,), 56),
    }


def test_ids_are_counted_only_where_a_penalty_needs_it(launches: dict) -> None:
    sample(GREEDY, masked=True)

    assert launches["adjust"] == ((10, 3), 0)


@pytest.mark.parametrize(("rows", "teams"), [(1, 1), (16, 16), (64, 16)])
def test_as_many_teams_work_as_are_resident_together(rows: int, teams: int, launches: dict) -> None:
    sample(PLAIN, rows)

    assert launches["choose_all"][0] == (8, teams)


def test_every_repetition_of_the_settings_fits() -> None:
    SamplingSettings(dry_multiplier=1.0, dry_max_ngram=MOST_REPEATED)
    with pytest.raises(ConfigError, match="dry_max_ngram"):
        SamplingSettings(dry_multiplier=1.0, dry_max_ngram=MOST_REPEATED + 1)


@pytest.mark.parametrize(("most", "tried"), [(16, [16]), (5, [16, 8, 4]), (0, [16, 8, 4, 2, 1])])
def test_fewer_teams_work_where_all_are_refused(
    most: int, tried: list[int], launches: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, launch = list[int](), cuda_sampler.launch

    def refusing(file: str, name: str, grid: tuple[int, ...], *given: Any, **how: Any) -> None:
        if name == "choose_all":
            asked.append(grid[1])
            if grid[1] > most:
                raise LaunchRefused(name, reason="no room")
        launch(file, name, grid, *given, **how)

    monkeypatch.setattr(cuda_sampler, "launch", refusing)
    monkeypatch.setattr(cuda_sampler, "_MOST_TEAMS", {})

    sample(PLAIN, 16)
    assert asked == tried
    assert launches.get("choose_all", ((8, 0), 0))[0] == (8, tried[-1] if most else 0)

    asked.clear()
    sample(PLAIN, 16)
    assert asked == tried[-1:] * (most > 0)  # remembered


@torch.inference_mode()
def test_without_any_team_the_torch_version_samples(
    launches: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(file: str, name: str, *given: Any, **how: Any) -> None:
        if name == "choose_all":
            raise LaunchRefused(name, reason="no room")

    monkeypatch.setattr(cuda_sampler, "launch", refusing)
    monkeypatch.setattr(cuda_sampler, "_MOST_TEAMS", {})
    logits, settings = torch.randn(3, VOCABULARY), [PLAIN] * 3
    here, there = (slots_of(settings, VOCABULARY) for _ in range(2))
    kind, draws = Kind.of(settings, probabilities=True), torch.rand(3, dtype=torch.float64)

    found = cuda_sampler.sample(logits, here.state(3, kind), draws, kind)

    expected = torch_sampler.sample(logits, there.state(3, kind), draws, kind)
    assert torch.equal(found.ids, expected.ids)
    assert found.probabilities is not None
    assert torch.equal(found.probabilities, expected.probabilities)
    assert torch.equal(here.history, there.history)
