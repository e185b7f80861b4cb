"""What the tests of recorded steps share."""

import pytest

from exl2flow.kernels import recording
from exl2flow.kernels.recording import Recording


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Return all recordings made from now on."""
    made: list[Recording] = []

    class Listed(Recording):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(recording, "Recording", Listed)
    return made
