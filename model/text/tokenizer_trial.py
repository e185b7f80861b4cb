"""Try a stranger's `tokenizer.json` in another process before it is opened in this one.

Most damage is an error or a panic of the Rust library, which can be caught. But where it reserves
too much memory or recurses too deeply, it ends the process. Files that passed are remembered by
their digest, so that only the first start with a model takes longer: 0.2 s of processor time for a
vocabulary of 83,000 tokens, and 6 ms from then on.
"""

import hashlib
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from exl2flow.core.errors import SourceModelError
from exl2flow.core.options.environment import cache_folder

PROGRAM = Path(__file__).with_name("tokenizer_program.py")


def try_tokenizer(data: bytes, path: Path) -> None:
    """Check that a file can be opened and used without the end of the process.

    Args:
        data: its content.
        path: where it is from, for messages.

    Raises:
        SourceModelError: it cannot, or not within `tokenizer_program`'s time and memory.
    """
    folder = cache_folder()
    name = f"{hashlib.sha256(data).hexdigest()}-{version('tokenizers')}"
    # an empty file that stands for a file that passed with this version
    passed = None if folder is None else folder / "tokenizers" / name
    if passed is not None and passed.exists():
        return
    command, null = [sys.executable, "-P", str(PROGRAM)], subprocess.DEVNULL
    tried = subprocess.run(command, input=data, stdout=null, stderr=null, check=False)
    if tried.returncode != 0:
        raise SourceModelError(
            f"`{path}` makes the library `tokenizers` crash, or takes more time or memory than a "
            "tokenizer may have; fetch it again"
        )
    if passed is not None:
        with suppress(OSError):  # then it is tried again the next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
