"""A model's own chat template: messages to the text that the model was trained to read.

Templates are Jinja programs by the model's authors. They run in a sandbox and in a process whose
time and memory are limited (`template_program`), with the names that transformers gives them, so
that both render the same text.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ChatTemplateError, ConfigError
from exl2flow.model.config.fields import Fields
from exl2flow.model.text.messages import AnyMessage, roles_of, tools_of, values_of
from exl2flow.model.text.repairs import REPAIRS, Talk
from exl2flow.model.text.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT_NAME = "default"  # of several templates in one file
PROGRAM = Path(__file__).with_name("template_program.py")


class ChatTemplate:
    """A model's compiled template.

    special_tokens: text of `bos_token` and the like. mentioned: names that the template reads and
    does not set itself, such as `messages` and `enable_thinking`; others have no effect.
    """

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, str],
        origin: Path,
        advice: str = "give it the roles and the order of turns that it is made for",
    ) -> None:
        """Compile a template, in a process of its own that ends with this object.

        Args:
            text: the Jinja source.
            special_tokens: variables of the template.
            origin: the file it is from, for messages.
            advice: what to do where it cannot render a conversation.

        Raises:
            ChatTemplateError: it is not Jinja.
        """
        self.text = text
        self.special_tokens = dict(special_tokens)
        self.origin = origin
        self.advice = advice
        self._process: _Process | None = None
        self.mentioned = frozenset[str]()
        self._lock = Lock()
        with self._lock:
            self._started()

    @classmethod
    def load(cls, model_dir: Path, tokenizer: Tokenizer, *, otherwise: str = "") -> "ChatTemplate":
        """Read the template of a model folder: `chat_template.jinja`, else `tokenizer_config.json`.

        Args:
            model_dir: the model's folder.
            tokenizer: its tokenizer, for special tokens that no file spells.
            otherwise: what to do if there is none, besides fetching one.

        Raises:
            ChatTemplateError: neither holds a template, or it is not Jinja.
        """
        file_and_text = find_template(model_dir)
        if file_and_text is None:
            raise ChatTemplateError(
                f"`{model_dir}` has no chat template, neither `{TEMPLATE_FILE}` nor "
                f"`chat_template` in `{CONFIG_FILE}`; {otherwise and f'{otherwise}, or '}put the "
                f"template of a model with the same prompt format there as `{TEMPLATE_FILE}`"
            )
        path, text = file_and_text
        return cls(text, special_tokens=special_tokens(model_dir, tokenizer), origin=path)

    def render(
        self,
        messages: Sequence[AnyMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of a conversation, BOS and the like as the template writes them.

        Args:
            messages: the turns in order. Mappings have `role` and `content` and, where they apply,
                `tool_calls`, `tool_call_id`, `name` and `reasoning_content`; other keys reach the
                template as they are, unless they are null or empty. Arguments of a call may be a
                mapping or its JSON text; the template gets a mapping, or the text if it is not JSON
                object. What it refuses is written in another way (`repairs`) if that helps.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with what begins the assistant's next turn.
            now: the date for templates that ask for it; the present when None.
            variables: further names of this template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template refuses the messages, or fails.
            ConfigError: a message or a tool is not one, holds an image or what JSON cannot; a
                variable has the name of an argument.
        """
        if taken := {"messages", "tools", "add_generation_prompt"} & (variables or {}).keys():
            raise ConfigError(f"`{min(taken)}` is not a variable; give it as an argument")
        shared = {
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **self.special_tokens,
            **(variables or {}),
        }
        talk = Talk(values_of(messages), tools_of(tools))
        answer = self._answer(talk, shared, now or datetime.now())
        refusal = answer.get("error", "")
        for repair in REPAIRS:
            if "text" in answer or answer.get("is_limit"):
                break
            if (changed := repair(talk)) == talk:
                continue
            found = self._answer(changed, shared, now or datetime.now())
            if found != answer:
                talk, answer = changed, found
        if "text" in answer:
            return str(answer["text"])
        roles = ", ".join(roles_of(messages))
        raise ChatTemplateError(
            f"the chat template in `{self.origin}` cannot render turns of {roles}: "
            f"{refusal}; {self.advice}"
        )

    def _answer(self, talk: Talk, shared: Mapping[str, object], now: datetime) -> dict[str, Any]:
        """Return the text of a conversation, or what the template refuses in it."""
        variables = {**shared, "messages": talk.messages, "tools": talk.tools}
        try:
            line = json.dumps({"now": now.isoformat(), "variables": variables}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"a message, a tool or a variable holds what JSON cannot: {error}; give it plain "
                "values"
            ) from error
        with self._lock:
            return self._started().answer(line)

    def _started(self) -> "_Process":
        """Return the process that has compiled the template, a new one if the last one ended.

        Raises:
            ChatTemplateError: it is not Jinja.
        """
        if self._process is None or self._process.has_ended:
            self._process = _Process()
            answer = self._process.answer(json.dumps({"template": self.text}))
            if "error" in answer:
                raise ChatTemplateError(
                    f"the chat template in `{self.origin}` does not compile "
                    f"({answer['error']}); fetch it again"
                )
            self.mentioned = frozenset(answer["mentioned"])
        return self._process


class _Process:
    """A running `template_program`; it ends when this object does, or after too much work."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(PROGRAM)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
        self._child = child
        self._end = weakref.finalize(self, _end, child)

    @property
    def has_ended(self) -> bool:
        """Tell whether a request has ended the process."""
        return not self._end.alive

    def answer(self, request: str) -> dict[str, Any]:
        """Send a request, a line of JSON, and return the answer; see `template_program`."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            with suppress(BrokenPipeError):
                stdin.write(request.encode() + b"\n")
                stdin.flush()
            answer = stdout.readline()
        except BaseException:  # also Ctrl-C: the answer would be taken for that of the next request
            self._end()
            raise
        if not answer.endswith(b"\n"):
            self._end()
            why = "it takes more time or memory than a chat template may have"
            return {"error": why, "is_limit": True}
        parsed: dict[str, Any] = json.loads(answer)
        return parsed


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and close its pipes."""
    child.kill()
    with suppress(BrokenPipeError), child:
        pass


def find_template(model_dir: Path) -> tuple[Path, str] | None:
    """Return the file that holds a model's template, and the template; None: it has none.

    Raises:
        ChatTemplateError: the file cannot be read.
    """
    path = model_dir / TEMPLATE_FILE
    if path.is_file():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(
                f"cannot read `{path}` as UTF-8 text: {words.cause(error)}; fetch it again"
            ) from error
    path = model_dir / CONFIG_FILE
    text = _default(Fields.load(path)) if path.is_file() else None
    return None if text is None else (path, text)


def _default(fields: Fields) -> str | None:
    """Return the template in `tokenizer_config.json`; of several, the one named `default`."""
    value: object = fields.values.get("chat_template")
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        named = {str(item.get("name")): item.get("template") for item in items}
        if DEFAULT_NAME not in named:
            raise ChatTemplateError(
                f"`{fields.path}` has chat templates named {', '.join(named)}, but no "
                f"`{DEFAULT_NAME}`; put the one to use beside it as `{TEMPLATE_FILE}`"
            )
        value = named[DEFAULT_NAME]
    if value is not None and not isinstance(value, str):
        raise ChatTemplateError(
            f"`chat_template` in `{fields.path}` is neither text nor a list; fetch the file again"
        )
    return value


def special_tokens(model_dir: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Return name → text of `bos_token`, `eos_token` and others that the folder's files give."""
    tokens: dict[str, str] = {}
    roles = (("bos_token", tokenizer.bos_token_id), ("eos_token", tokenizer.eos_token_id))
    for name, token_id in roles:
        spelled = None if token_id is None else tokenizer.backend.id_to_token(token_id)
        if spelled is not None:
            tokens[name] = spelled
    for file in ("special_tokens_map.json", CONFIG_FILE):
        path = model_dir / file
        values = Fields.load(path).values if path.is_file() else {}
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens
