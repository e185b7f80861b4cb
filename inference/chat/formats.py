"""Prompt formats: how a conversation is written for a model, and how its answers end.

A format is a row here and a Jinja file in `formats/`; `ChatTemplate` renders all of them. To add
one, write the file and the row.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from exl2flow.core.errors import ConfigError, UnknownPromptFormat
from exl2flow.model import Tokenizer
from exl2flow.model.chat_template import find_template, special_tokens

FOLDER = Path(__file__).with_name("formats")
OWN = "own"  # name of the format that a model's own template makes
FALLBACK = "raw"
ADVICE = "choose another format, or change the system prompt"
SHORT = "You are a helpful assistant."
CAREFUL = (
    "You are a helpful, honest and careful assistant. Answer as usefully as you can while being "
    "safe: refuse what would harm people, avoid insults and prejudice, and stay fair. If a "
    "question makes no sense or rests on something false, say so and explain why. If you do not "
    "know the answer, say that you do not know it."
)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Marks around what a model thinks before it answers.

    answer: what may begin an answer without thoughts, and is not part of it.
    """

    open: str
    close: str
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How conversations are written, and by what answers end besides the model's EOS ids.

    file: of the Jinja template; text: the template itself, if it is not in `formats/`.
    stop_tokens: end an answer as tokens, those that the vocabulary has.
    stop_strings: end an answer as text, and as tokens where the vocabulary has them. `{user}`,
        `{USER}`, `{lower}` and `{initial}` stand for the user's name in different spellings.
    marks: tokens by which a vocabulary is recognized; without any it never is.
    system: the system prompt if none is given; `{user}` and `{bot}` stand for the names.
    special: read special tokens spelled in the text as such; otherwise only BOS is one.
    ending: put behind an answer that does not end in it, before the conversation goes on.
    tokens: variables such as `bos_token` from a model's folder; None: those of the tokenizer.
    """

    name: str
    file: Path
    text: str | None = None
    stop_tokens: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    thinking: Thinking | None = None
    marks: tuple[str, ...] = ()
    system: str = ""
    special: bool = True
    ending: str = ""
    tokens: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """The Jinja template.

        Raises:
            ConfigError: its file cannot be read.
        """
        return _read(self.file) if self.text is None else self.text

    def stops(self, tokenizer: Tokenizer, user: str) -> tuple[int | str, ...]:
        """Return all that ends an answer: ids, the model's EOS ids among them, then strings."""
        spellings = {"user": user, "USER": user.upper(), "lower": user.lower(), "initial": user[:1]}
        strings = [text.format(**spellings) for text in self.stop_strings]
        found = map(tokenizer.backend.token_to_id, (*self.stop_tokens, *strings))
        ids = [*tokenizer.eos_token_ids, *(i for i in found if i is not None)]
        return (*dict.fromkeys(ids), *dict.fromkeys(strings))


def _row(name: str, *, file: str | None = None, **fields: object) -> PromptFormat:
    path = FOLDER / f"{file or name}.jinja"
    return PromptFormat(name=name, file=path, **fields)  # type: ignore[arg-type]  # of the rows


THINK = Thinking("<think>", "</think>")
CHANNELS = Thinking(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
)
IM_END: dict[str, tuple[str, ...]] = {
    "stop_tokens": ("<|im_end|>",),
    "stop_strings": ("<|im_end|>",),
}
ROWS = (
    _row(
        "raw", special=False, ending="\n",
        stop_strings=("{user}:", "{initial}:", "{USER}:", "{lower}:"),
        system="This is a conversation of {user} with {bot}, who knows a lot and likes to help.",
    ),
    _row("llama", special=False, system=CAREFUL),
    _row(
        "codellama", file="llama", special=False,
        system="You are a helpful coding assistant. Write correct and readable code.",
    ),
    _row(
        "llama3", marks=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), system=CAREFUL,
        stop_tokens=("<|eot_id|>", "<|start_header_id|>"),
    ),
    _row(
        "phi3", marks=("<|user|>", "<|assistant|>", "<|end|>"), system=SHORT,
        stop_tokens=("<|end|>", "<|assistant|>", "<|endoftext|>"),
    ),
    _row("chatml", marks=("<|im_start|>", "<|im_end|>"), system=SHORT, **IM_END),
    _row("tinyllama", file="chatml", special=False, system=SHORT, **IM_END),
    _row("qwq", thinking=THINK, system=SHORT, **IM_END),
    _row("zephyr", stop_strings=("<|user|>", "</s>"), system=SHORT),
    _row(
        "deepseek", stop_strings=("### Instruction",),
        system="You are an assistant for programming. Answer questions about computer science; "
        "politely decline questions about politics, private matters and anything else.",
    ),
    _row("solar", stop_strings=("\n\n### User", "\n### User"), system=SHORT),
    _row(
        "openchat", marks=("<|end_of_turn|>",), system=SHORT,
        stop_strings=("<|end_of_turn|>", "<|endoftext|>", "GPT4 Correct User:"),
    ),
    _row("nous", stop_strings=("</s>",), system=SHORT),
    _row(
        "gemma", marks=("<start_of_turn>", "<end_of_turn>"),
        stop_tokens=("<end_of_turn>", "<start_of_turn>"),
    ),
    _row("cohere", stop_strings=("<|END_OF_TURN_TOKEN|>",), system=SHORT),
    _row("granite", stop_strings=("\n\nQuestion:",), system=SHORT),
    _row("granite3", marks=("<|start_of_role|>", "<|end_of_role|>"), system=SHORT),
    _row(
        "glm", marks=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), system=SHORT,
        stop_tokens=("<|user|>",), stop_strings=("<|user|>",),
    ),
    _row("mistral-v3", marks=("[INST]", "[/INST]")),
    _row("mistral-v7", marks=("[INST]", "[/INST]", "[SYSTEM_PROMPT]")),
    _row("mistral-v7-tekken", marks=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "Ġthe")),
    _row(
        "llama4", marks=("<|header_start|>", "<|header_end|>", "<|eot|>"), system=SHORT,
        stop_tokens=("<|eot|>", "<|header_start|>"),
    ),
    _row("qwen3", marks=("<|im_start|>", "<|im_end|>", "<think>"), thinking=THINK, **IM_END),
    _row(
        "deepseek-r1", marks=("<｜User｜>", "<｜Assistant｜>", "<think>"), thinking=THINK,
        stop_tokens=("<｜end▁of▁sentence｜>", "<｜User｜>"),
    ),
    _row(
        "gemma3", marks=("<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        stop_tokens=("<end_of_turn>", "<start_of_turn>"),
    ),
    _row(
        "phi4", marks=("<|im_start|>", "<|im_sep|>", "<|im_end|>"), stop_tokens=("<|im_end|>",),
        system=SHORT,
    ),
    _row(
        "command-r", marks=("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"), system=SHORT,
        stop_tokens=("<|END_OF_TURN_TOKEN|>",),
    ),
    _row(
        "smollm3", marks=("<|im_start|>", "<|im_end|>", "<think>", "<|begin_of_text|>"),
        thinking=THINK, system=SHORT, **IM_END,
    ),
    _row(
        "gpt-oss", marks=("<|start|>", "<|channel|>", "<|message|>"), thinking=CHANNELS,
        stop_tokens=("<|return|>", "<|call|>"),
    ),
    _row(
        "alpaca", stop_strings=("### Instruction:",),
        system="An instruction describes a task. Write a response that completes it.",
    ),
    _row(
        "vicuna", stop_strings=("USER:",),
        system="A user talks with an assistant who answers politely and in detail.",
    ),
)  # fmt: skip


def all_formats() -> dict[str, PromptFormat]:
    """Return all formats by name."""
    return {row.name: row for row in ROWS}


def choose_format(
    model_dir: Path | str, tokenizer: Tokenizer, name: str | None = None
) -> tuple[PromptFormat, str]:
    """Return the format for a model, and a sentence that says which it is and why.

    Args:
        model_dir: the model's folder.
        tokenizer: its tokenizer.
        name: of a format, or a file with a Jinja template; None: the model's own template, else
            the format whose tokens its vocabulary has, else `raw`.

    Raises:
        UnknownPromptFormat: there is neither such a format nor such a file.
        ConfigError, ChatTemplateError: a file cannot be read.
    """
    rows = all_formats()
    found = _recognized(tokenizer)
    if name in rows:
        return rows[name], f"format `{name}`, as requested"
    if name is not None:
        if not Path(name).is_file():
            raise UnknownPromptFormat(_unknown(name))
        fields = _of_template(found, rows[FALLBACK])
        made = replace(fields, name=Path(name).name, file=Path(name), text=_read(Path(name)))
        return made, f"template `{name}`, as requested"
    own = find_template(Path(model_dir))
    if own is not None:
        path, text = own
        tokens = special_tokens(Path(model_dir), tokenizer)
        fields = _of_template(found, rows[FALLBACK])
        return replace(fields, name=OWN, file=path, text=text, tokens=tokens), (
            f"the model's own template, in `{path.name}`"
        )
    if found is not None:
        tokens_of = ", ".join(f"`{mark}`" for mark in found.marks)
        return found, f"format `{found.name}`: the vocabulary has {tokens_of}"
    return rows[FALLBACK], (
        f"format `{FALLBACK}`: the model has no template, and its vocabulary no known marks"
    )


def _recognized(tokenizer: Tokenizer) -> PromptFormat | None:
    """Return the row with the most marks of those whose marks are all tokens."""
    known = tokenizer.backend.token_to_id
    found = [row for row in ROWS if row.marks and None not in map(known, row.marks)]
    return max(found, key=lambda row: len(row.marks), default=None)


def _of_template(found: PromptFormat | None, fallback: PromptFormat) -> PromptFormat:
    """Return what holds for a template of which only the model's vocabulary is known."""
    row = found or replace(fallback, stop_strings=(), special=True, ending="")
    return replace(row, system="", marks=(), thinking=row.thinking or THINK)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [row.name for row in ROWS], n=3, cutoff=0.5)
    names = near or [row.name for row in ROWS]
    listed = ", ".join(f"`{each}`" for each in names)
    return f"`{name}` is neither a prompt format nor a file; {'near' if near else 'there'} are {listed}"


@cache
def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the template `{path}`: {error}") from error
