import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packed_models import make_packed
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.output.console import (
    OUT,
    emit_json,
    logging_to_stderr,
    printable,
    say,
    show,
    tell,
)
from exl2flow.cli.output.tables import plan_table
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE


def test_json_is_one_line_of_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"a": [math.inf, 1.5], "b": {"c": math.nan}, "long": "[red]ä\n" * 100})

    line, end = capsys.readouterr().out.split("\n")
    assert end == ""
    assert json.loads(line) == {"a": [None, 1.5], "b": {"c": None}, "long": "[red]ä\n" * 100}


@pytest.mark.parametrize("text", ['"a":1 time 12:on:30', "/data/:fire:/x", ":heart: :warning:"])
def test_codes_of_emoji_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    emit_json(text)
    say(f"error: no file `{text}`")
    OUT.print(f"[b]{text}[/b]")
    show(plan_table([(text, text)]))

    printed = capsys.readouterr()
    line, plain, row = printed.out.splitlines()
    assert (json.loads(line), plain) == (text, text)
    assert row.split("  ") == [text, text]
    assert printed.err == f"error: no file `{text}`\n"


LONE = "/data/\udcff \ud800"


def test_lone_surrogates_are_printed_escaped_and_json_stays_exact(tmp_path: Path) -> None:
    """Also the name of a missing folder, which may look like an emoji, too."""
    missing = [str(tmp_path / name) for name in ("\udcff", ":on:")]
    script = (
        "import sys; from exl2flow.cli.main import main\n"
        "from exl2flow.cli.output.console import OUT, emit_json, say\n"
        f"for name in {missing!r}:\n    sys.argv = ['exl2flow', 'inspect', name]\n"
        "    try:\n        main()\n    except SystemExit as error:\n        print(error.code)\n"
        f"emit_json({LONE!r}); say({LONE!r}); OUT.print({LONE!r})\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )

    *codes, line, path = done.stdout.splitlines()
    assert json.loads(line) == LONE
    assert (codes, path) == (["1", "1"], r"/data/\udcff \ud800")
    *errors, last = done.stderr.splitlines()
    assert last == r"/data/\udcff \ud800"
    for name in missing:
        shown = name.encode("utf-8", "backslashreplace").decode()
        assert f"error: `{shown}` is not a folder" in "\n".join(errors)


def test_each_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("exl2flow.quant.forecast.preflight")

    with logging_to_stderr(logging.WARNING):
        for _ in range(2):
            logger.warning("rows are long")
            logger.info("hidden")

    assert capsys.readouterr().err == "warning: rows are long\n"


def test_logging_is_left_as_it_was() -> None:
    logger = logging.getLogger("exl2flow")
    before = (logger.level, logger.propagate, list(logger.handlers))

    with logging_to_stderr(logging.DEBUG):
        assert logger.level == logging.DEBUG

    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[31m\r\u202eb\n\tc") == "a\ufffd[31m\ufffd\ufffdb\n\tc"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b2J"
SHOWN = "\ufffd]0;owned\ufffd\ufffd[2J\ufffd2J"


def test_messages_and_warnings_replace_control_characters_of_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile, shown = HOSTILE, SHOWN

    say(f"error: `{hostile}`\n\tis not a model")
    with logging_to_stderr(logging.WARNING):
        logging.getLogger("exl2flow.model").warning("`%s`", hostile)

    assert (
        capsys.readouterr().err == f"error: `{shown}`\n        is not a model\nwarning: `{shown}`\n"
    )


def edit(path: Path, **changes: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **changes}))


@pytest.fixture
def hostile_model(tmp_path: Path) -> Path:
    """An EXL2 model whose files hold commands for a terminal wherever they may hold text."""
    folder = make_packed("llama", tmp_path / HOSTILE).source_dir
    edit(
        folder / "config.json",
        architectures=[f"[red]{HOSTILE}"],
        quantization_config={"quant_method": "exl2", "bits": HOSTILE},
    )
    item = {"params": HOSTILE, "bpw": 4.0, "nats": 0.5, "rel_err": 0.1}
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = [
        {"name": f"model.layers.{index}.{kind}", "projections": dict.fromkeys(names, item)}
        for index in range(8)
        for kind in ("self_attn", "mlp")
    ]
    edit(folder / RECORD_FILE, fingerprint="x", layers=layers, predicted_kl=0.5)
    score = {"kl_divergence": 0.5, "tokens": 100}
    edit(folder / SCORE_FILE, fingerprint="x", score=score, calibration=score)
    return folder


@pytest.mark.parametrize("options", [(), ("--matrices",), ("--json",)])
def test_inspecting_a_file_of_a_stranger_sends_no_commands_to_the_terminal(
    hostile_model: Path, options: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(app, ["inspect", str(hostile_model), *options])

    assert done.exit_code == 0, done.output
    assert printable(done.stdout) == done.stdout
    if "--json" in options:
        assert json.loads(done.stdout)["architecture"] == f"[red]{HOSTILE}"
    else:
        assert f"[red]{SHOWN}" in done.stdout


def test_json_escapes_all_controls_and_stays_exact(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(map(chr, range(0x100)))

    emit_json({text: text})

    line = capsys.readouterr().out.removesuffix("\n")
    assert all(character >= " " and not "\x7f" <= character <= "\x9f" for character in line)
    assert json.loads(line) == {text: text}


def test_results_and_tables_replace_control_characters_of_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell(f"model [b]{HOSTILE}")
    show(plan_table([(HOSTILE, f"[b]{HOSTILE}")]))

    line, row = capsys.readouterr().out.splitlines()
    assert line == f"model [b]{SHOWN}"
    assert row.split() == [SHOWN, f"[b]{SHOWN}"]
