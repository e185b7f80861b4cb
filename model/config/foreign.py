"""Model files in forms that are not read here, recognized so that the error says what to do."""

from collections.abc import Iterable
from pathlib import Path

# parts of tensor names → whose form it is; AWQ shares its names with GPTQ
FORMS = {
    ".weight.quant_state.": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
}
MOST_NAMED = 8  # models in a folder
LFS_START = b"version https://git-lfs"  # of the text that git leaves instead of a large file


def is_lfs_pointer(data: bytes) -> bool:
    """Tell whether a file's first bytes are those of a Git LFS pointer."""
    return data.startswith(LFS_START)


def pointer_advice(path: Path) -> str:
    """Return the message for a file that is a Git LFS pointer."""
    return f"`{path}` is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"


def advice(folder: Path) -> str | None:
    """Return what to do with a folder of another program or of models; None if not known."""
    if any(folder.glob("*.gguf")):
        return (
            f"`{folder}` holds a GGUF file, and GGUF is quantized already; give the model that it "
            "was made from"
        )
    if any(folder.glob("pytorch_model*.bin")):
        code = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained('converted'); "
            f"T.from_pretrained({str(folder)!r}).save_pretrained('converted')"
        )
        return (
            f"`{folder}` holds `pytorch_model.bin`, which can run code when it is opened; if you "
            f'trust it, convert it to `*.safetensors` with `python -c "{code}"` and give the '
            "folder `converted`"
        )
    if models := sorted(path.parent.name for path in folder.glob("*/config.json")):
        named = ", ".join(f"`{name}`" for name in models[:MOST_NAMED]) + ", …" * (
            len(models) > MOST_NAMED
        )
        return f"`{folder}` holds several models; give one of its folders: {named}"
    return None


def quantized_form(names: Iterable[str], quant_method: str | None) -> tuple[str, str] | None:
    """Return a form of quantized weights that is not decoded here, and one of its tensors."""
    for name in names:
        if quant_method == "awq" and name.endswith(".qweight"):
            return "AWQ", name
        for part, form in FORMS.items():
            if part in name:
                return form, name
    return None
