"""Comparing an output with what was quantized looks names up: no list of them is scanned."""

from pathlib import Path

import pytest
from stage_runs import prepared, run_until
from tiny import make_tiny

from exl2flow.model import TensorFiles
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.quant.compile import stage as compile_module
from exl2flow.quant.compile.stage import stored_names


class Names:
    """Counts how often it is asked for a name; it cannot be iterated."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.asked = names, 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return name in self.names


@pytest.mark.parametrize("others", [0, 5000])
def test_the_number_of_look_ups_does_not_depend_on_other_names(others: int) -> None:
    known = {*tensor_names("a.q"), "a.q.bias", *(f"b.{i}.weight" for i in range(others))}
    names = Names(known)

    found = stored_names(names, "a.q")

    assert sorted(found) == sorted({*tensor_names("a.q"), "a.q.bias"})
    assert names.asked == len(found)
    assert stored_names(Names({*tensor_names("a.q"), "a.q.weight"}), "a.q") == [
        *tensor_names("a.q")
    ]


def test_an_output_is_compared_without_the_list_of_all_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    looked_up: list[str] = []

    class Counting(TensorFiles):
        @property
        def names(self) -> tuple[str, ...]:
            listed.append(self.folder)
            return super().names

        def __contains__(self, name: object) -> bool:
            if self.folder == out:
                looked_up.append(str(name))
            return super().__contains__(name)

    config = prepared(make_tiny("qwen2", tmp_path / "model", num_hidden_layers=1))
    out = config.out.resolve()
    run_until(config, "quantize")
    monkeypatch.setattr(compile_module, "TensorFiles", Counting)

    run_until(config, "compile")

    assert out not in listed
    assert len(looked_up) == 8 * 6  # matrices and the head: five tensors and a bias each
