"""A few flips of every kind of stored data, all found, and what a mutant is."""

from pathlib import Path

import mutants
import pytest
from converted import Converted
from flips import KINDS, TENSORS, campaign
from tiny import make_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("flips")
    source = make_tiny("qwen2", folder / "model", num_hidden_layers=1)  # has biases
    return Converted(source, folder, row_tokens=64)


def test_every_flip_is_found_by_a_digest_and_those_of_tensors_by_the_comparison(
    made: Converted,
) -> None:
    found = campaign(made, count=4, gate=0, seed=1)

    assert tuple(found) == KINDS
    for kind, counts in found.items():
        assert counts.undetected == []
        assert counts.share("digest") == "4/4", kind
        if kind in TENSORS:
            assert counts.share("compile") == "4/4", kind


def test_without_time_no_bit_is_flipped(made: Converted) -> None:
    found = campaign(made, count=4, gate=4, seed=1, seconds=-1.0)

    assert tuple(found) == KINDS
    assert all(counts.tried.total() == 0 for counts in found.values())


def test_mutants_change_one_thing_each_and_no_words_for_people() -> None:
    source = '''
def least(values: list[int], floor: int = 0) -> int:
    """Not this."""
    found = [value for value in values if value > floor]
    if not found:
        raise ValueError(f"none above {floor}")
    return min(found) + 1
'''

    found = {(mutant.before, mutant.after) for mutant in mutants.mutants("core/x.py", source)}

    assert len(found) == 9
    assert ("return min(found) + 1", "return min(found) - 1") in found
    assert ("return min(found) + 1", "return min(found) + 2") in found
    assert ("return min(found) + 1", "return None") in found
    assert ("if not found:", "if found:") in found
    assert ("raise ValueError(f'none above {floor}')", "pass") in found
    assert not any("Xnone" in after for _, after in found)


def test_tests_of_a_file_begin_with_its_own() -> None:
    assert mutants.tests_of("core/store/store.py")[0] == "tests/unit/core/store/test_store.py"


@pytest.mark.parametrize("file", mutants.MODULES)
def test_every_file_has_tests(file: str) -> None:
    found = mutants.tests_of(file)

    assert found
    assert all(Path(__file__).parents[3].joinpath(name).is_file() for name in found)
