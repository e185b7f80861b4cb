import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_tiny

from exl2flow.core.errors import MissingTensor, SourceModelError
from exl2flow.core.store.shard_index import INDEX_FILE
from exl2flow.model import TensorFiles
from exl2flow.model.files import weights

MIB = 1 << 20
WALK = """
import resource, sys, torch
from pathlib import Path
from exl2flow.model import TensorFiles, build_sublayer, resolve

def peak_after_walk(folder):
    spec, tensors = resolve(folder), TensorFiles(folder)
    for sublayer in spec.sublayers:
        build_sublayer(spec, sublayer, tensors, dtype=torch.float32, device="cpu")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(*(peak_after_walk(Path(folder)) for folder in sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int16]
)
def test_read_returns_what_was_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(7).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    save_file(stored, tmp_path / "a.safetensors")

    files = TensorFiles(tmp_path)

    for name, tensor in stored.items():
        torch.testing.assert_close(files.read(name), tensor, rtol=0, atol=0)
        assert files.shape(name) == tuple(tensor.shape)
        assert files.dtype(name) == dtype
        assert files.nbytes(name) == tensor.nbytes


def test_a_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.arange(35, dtype=torch.int32).reshape(5, 7)
    save_file({"before": torch.ones(3), "x": stored}, tmp_path / "a.safetensors")
    monkeypatch.setattr(weights, "PIECE_BYTES", 32)

    assert torch.equal(TensorFiles(tmp_path).read("x"), stored)


def test_names_come_from_all_files_whatever_the_index_says(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("not even JSON")

    files = TensorFiles(tmp_path)

    assert set(files.names) == {"a", "b"}
    assert [path.name for path in files.files] == ["x.safetensors", "y.safetensors"]
    assert "a" in files
    assert "c" not in files


def indexed(folder: Path, files: dict[str, dict[str, torch.Tensor]], **index: str) -> Path:
    for name, tensors in files.items():
        save_file({key: x.clone() for key, x in tensors.items()}, folder / name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


ZERO, ONE = torch.zeros(2), torch.ones(2)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    stale = {"a": ZERO, "c": ZERO}
    indexed(tmp_path, {"x.safetensors": {"a": ONE}, "model.safetensors": stale}, a="x.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"damaged, too")

    files = TensorFiles(tmp_path)

    assert files.names == ("a",)
    assert torch.equal(files.read("a"), ONE)


def test_an_index_of_other_files_says_nothing(tmp_path: Path) -> None:
    indexed(tmp_path, {"output.safetensors": {"a": ONE}}, a="model-00001-of-00002.safetensors")

    assert TensorFiles(tmp_path).names == ("a",)


def test_equal_copies_in_two_files_are_no_problem(tmp_path: Path) -> None:
    indexed(tmp_path, {"x.safetensors": {"a": ONE}, "y.safetensors": {"a": ONE, "b": ONE}})

    assert set(TensorFiles(tmp_path).names) == {"a", "b"}


@pytest.mark.parametrize(("counts", "stale"), [("x", "y"), ("y", "x")])
def test_a_stale_copy_is_refused_with_a_program_that_removes_it(
    counts: str, stale: str, tmp_path: Path
) -> None:
    files = {"x.safetensors": {"a": ONE, "c": ONE}, "y.safetensors": {"a": ZERO, "b": ONE}}
    indexed(tmp_path, files, a=f"{counts}.safetensors", b="y.safetensors", c="x.safetensors")

    with pytest.raises(SourceModelError, match=r"names `.*safetensors`, but transfo") as raised:
        TensorFiles(tmp_path)
    exec(str(raised.value).partition('python -c "')[2].rpartition('"')[0])

    assert torch.equal(TensorFiles(tmp_path).read("a"), files[f"{counts}.safetensors"]["a"])
    assert set(TensorFiles(tmp_path).names) == {"a", "b", "c"}


def test_a_file_that_the_index_names_and_that_is_absent_is_named(tmp_path: Path) -> None:
    indexed(tmp_path, {"x.safetensors": {"a": ONE}}, a="x.safetensors", b="../y.safetensors")

    with pytest.raises(MissingTensor, match=r"`\.\./y\.safetensors` is not in .*1 files in all"):
        TensorFiles(tmp_path)


def test_read_tensors_can_be_written_to_and_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    files = TensorFiles(tmp_path)

    first, second = files.read("a"), files.read("a")
    path.unlink()
    first += 1

    assert second.tolist() == [0.0] * 4


def test_peak_memory_of_a_walk_does_not_grow_with_depth(tmp_path: Path) -> None:
    folders = [
        make_tiny(
            "llama", tmp_path / str(layers), num_hidden_layers=layers, hidden_size=128, head_dim=32
        )
        for layers in (8, 64)
    ]

    output = subprocess.run(
        [sys.executable, "-c", WALK, *map(str, folders)], check=True, capture_output=True, text=True
    ).stdout

    few, many = (int(kib) * 1024 for kib in output.split())
    files = [sum(path.stat().st_size for path in f.glob("*.safetensors")) for f in folders]
    assert files[1] - files[0] > 16 * MIB
    assert many - few < 2 * MIB


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")

    with pytest.raises(MissingTensor, match="`b`"):
        TensorFiles(tmp_path).read("b")


def test_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match=r"no `\*\.safetensors`"):
        TensorFiles(tmp_path)


def test_a_pytorch_bin_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(SourceModelError, match=r"python -c \"from transformers import .*converted"):
        TensorFiles(tmp_path)


def test_a_git_lfs_pointer_says_how_to_get_the_file(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
    (tmp_path / "model.safetensors").write_text(text)

    with pytest.raises(SourceModelError, match=r"is a Git LFS pointer.*git lfs pull"):
        TensorFiles(tmp_path)


def test_integers_are_not_read_as_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.int32)}, tmp_path / "a.safetensors")

    with pytest.raises(SourceModelError, match=r"are integers: `w` is torch\.int32, 1 in all"):
        TensorFiles(tmp_path).read_floating("w")


def test_name_in_two_files_names_both(tmp_path: Path) -> None:
    for number, name in enumerate(("x", "y")):
        save_file({"a": torch.full((1,), number)}, tmp_path / f"{name}.safetensors")

    with pytest.raises(SourceModelError, match=r"x\.safetensors.*y\.safetensors.*remove the file"):
        TensorFiles(tmp_path)


def test_unsupported_dtype_is_named_only_when_wanted(tmp_path: Path) -> None:
    stored = {"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(1)}
    save_file(stored, tmp_path / "x.safetensors")
    files = TensorFiles(tmp_path)

    assert files.read("b").tolist() == [0.0]
    for ask in (files.read, files.dtype):
        with pytest.raises(SourceModelError, match=r"`a` in .* U8.*BF16"):
            ask("a")


@pytest.mark.parametrize("keep", [0, 4, 20, 100, -1])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(SourceModelError, match=r"x\.safetensors"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), r"x\.safetensors` ends within `a`"),
        (Path.unlink, r"cannot read `.*x\.safetensors`"),
    ],
)
def test_file_that_changed_after_opening_is_named(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    files = TensorFiles(tmp_path)
    damage(path)

    with pytest.raises(SourceModelError, match=message):
        files.read("a")


def test_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("<!DOCTYPE html><title>404</title>")

    with pytest.raises(SourceModelError, match=r"x\.safetensors` is not a whole safetensors"):
        TensorFiles(tmp_path)


def test_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()

    with pytest.raises(SourceModelError, match=r"x\.safetensors"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_the_bytes_of_a_part_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(12 * 10).reshape(12, 10).to(dtype)
    save_file({"w": whole, "b": whole[:, 0].contiguous()}, tmp_path / "a.safetensors")
    files = TensorFiles(tmp_path)
    entry, bias = (files._entries[name] for name in "wb")
    parts = {
        "rows": (entry.rows(3, 4), whole[3:7]),
        "columns": (entry.columns(2, 5), whole[:, 2:7]),
        "transpose": (entry.transposed(), whole.T),
        "rows of the transpose": (entry.transposed().rows(2, 5), whole.T[2:7]),
        "groups": (entry.grouped(3, 1, 2), whole.view(3, 4, 10)[:, 1:3].flatten(0, 1)),
        "groups of a bias": (bias.grouped(3, 3, 1), whole[3::4, 0]),
    }
    for name, (part, expected) in parts.items():
        files._entries[name] = part

        assert torch.equal(files.read(name), expected), name
        assert files.shape(name) == expected.shape
        assert files.nbytes(name) == expected.nbytes == sum(size for _, size in part.spans())
