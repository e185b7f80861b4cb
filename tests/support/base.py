"""Whether the base alone generates, chats and serves: `python tests/support/base.py BIN MODEL`.

BIN is the folder of programs of an environment in which exl2flow is installed without extras.
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

SECONDS = 300
MOST_PACKAGES, MOST_MB = 50, 260  # with torch and pip; beside torch
NOT_OURS = ("torch", "pip", "setuptools")
WHAT_IS_THERE = """
import json
from importlib.metadata import distributions
sizes = {
    d.metadata["Name"]: sum(
        d.locate_file(file).stat().st_size
        for file in d.files or ()
        if file.suffix != ".pyc" and d.locate_file(file).exists()
    )
    for d in distributions()
}
print(json.dumps(sizes))
"""


def run(program: Path, *arguments: str, asked: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], input=asked, capture_output=True, text=True, timeout=SECONDS
    )


def checked(program: Path, *arguments: str, asked: str = "") -> str:
    done = run(program, *arguments, asked=asked)
    assert done.returncode == 0, done.stderr
    return done.stdout


def served(program: Path, model: str) -> str:
    """Return the text of a completion over HTTP."""
    words = [program, "serve", model, "--device", "cpu", "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://\S+/v1", line)))
            body = json.dumps({"prompt": "One morning", "max_tokens": 4}).encode()
            request = urllib.request.Request(f"{url}/completions", body)
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        finally:
            server.terminate()


def main(arguments: Sequence[str]) -> None:
    folder, model = Path(arguments[0]), arguments[1]
    program, plain = folder / "exl2flow", ("--device", "cpu", "--max-new-tokens", "4")
    sizes: dict[str, int] = json.loads(checked(folder / "python", "-c", WHAT_IS_THERE))
    beside = sum(size for name, size in sizes.items() if name not in NOT_OURS) / 1e6
    print(f"{len(sizes)} packages, {beside:.0f} MB beside torch")
    assert len(sizes) <= MOST_PACKAGES
    assert beside <= MOST_MB
    assert checked(program, "generate", model, "--prompt", "One morning", *plain)
    assert checked(program, "chat", model, "--device", "cpu", asked="Hello\n")
    assert served(program, model)
    refused = run(program, "convert", model, "--out", "never")
    assert refused.returncode == 1
    named, found, typed = refused.stderr.partition("the extra `convert` brings: `")
    assert found and "pip install" in typed, refused.stderr  # pip is called as this environment has it
    print("generate, chat and serve run; convert says what it needs")


if __name__ == "__main__":
    main(sys.argv[1:])
