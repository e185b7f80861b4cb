"""Readers of tokenizers, chat templates and conversations."""

import importlib.util
import io
import json
import string
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import patch
from zlib import crc32

from mutations import assembled, changed_bytes, changed_json
from reader import JSON, Reader
from sentencepiece import SentencePieceTrainer
from tekken_files import write as write_tekken
from tiny import TEXT, make_tiny

from exl2flow.cli.options.chat import of_model
from exl2flow.core.errors import ChatTemplateError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.conversation import Conversation
from exl2flow.engine.chat import Session, all_formats
from exl2flow.inference import Generator, load_model
from exl2flow.model import ChatTemplate, Message, Tokenizer
from exl2flow.model.text import tokenizer, tokenizer_program
from exl2flow.model.text.chat_template import PROGRAM, find_template, special_tokens
from exl2flow.model.text.sentencepiece_model import SentencePieceModel

OFTEN = 300  # one input of so many starts the process of a template
NOW = "2026-01-02T03:04:05"
VARIABLES = {
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "tools": None,
}
TEXTS = ("Some text <s> with 3.14 and\n\tcafé 🙂", "", "x" * 300)


def exercise(used: Tokenizer) -> None:
    """Use a tokenizer as generation does."""
    for text in TEXTS:
        for special in (False, True):
            ids = used.encode(text, add_bos=True, add_eos=True, special=special)
            used.decode(ids, special=special).encode(errors="replace")
    if used.vocab_size < 10_000:
        used.healing(used.vocab_size - 1)
        used.single_id("a")


def sentencepiece_model(folder: Path, kind: str, *, with_bytes: bool = True) -> bytes:
    """Return a small `tokenizer.model`; that of kind `unigram` maps A to a."""
    rules = folder / "rules.tsv"
    rules.write_text("41\t61\n")
    options = {"bpe": {"normalization_rule_name": "identity"}}
    buffer = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3),
        model_writer=buffer,
        model_type=kind,
        vocab_size=400 if with_bytes else 140,
        byte_fallback=with_bytes,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        required_chars=string.punctuation + string.digits,
        **options.get(kind, {"normalization_rule_tsv": str(rules)}),
    )
    return buffer.getvalue()


class TokenizerJson(Reader):
    """`tokenizer.json`."""

    file = "tokenizer.json"
    changes = (changed_json, changed_bytes)

    def prepare(self) -> list[bytes]:
        make_tiny("llama", self.folder, num_hidden_layers=1)
        (self.folder / "a").write_bytes(sentencepiece_model(self.folder, "unigram"))
        charsmap = b64encode(SentencePieceModel.load(self.folder / "a").charsmap).decode()
        vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "▁": 4, "\r": 5}
        added = {"id": 6, "content": "<s>", "special": True, "single_word": False, "lstrip": False}
        added |= {"rstrip": False, "normalized": False}
        whole = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "NFKC"},
                    {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"},
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Lowercase"},
                    {"type": "Precompiled", "precompiled_charsmap": charsmap},
                ],
            },
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": "\\s+"},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {
                        "type": "Metaspace",
                        "replacement": "▁",
                        "prepend_scheme": "first",
                        "split": True,
                    },
                    {"type": "Digits", "individual_digits": True},
                ],
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}},
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "fuse_unk": True,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [["a", "b"]],
            },
        }
        unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": True}
        unigram["vocab"] = [[piece, -float(place)] for piece, place in vocab.items()]
        words = {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##"}
        words |= {"max_input_chars_per_word": 100, "vocab": vocab}
        models = ({}, {"model": unigram}, {"model": words})
        small = [json.dumps(whole | model).encode() for model in models]
        return [*small, small[0], self.path.read_bytes()]

    def use(self) -> None:
        def tried(data: bytes, path: Path) -> None:
            with self.trial(), suppress(BaseException):  # as the program does
                tokenizer_program.use(data)

        with patch.object(tokenizer, "try_tokenizer", tried):
            exercise(Tokenizer.load(self.folder))


class Pieces(TokenizerJson):
    """`tokenizer.model`, of both kinds."""

    file = "tokenizer.model"
    changes = (changed_bytes,)

    def prepare(self) -> list[bytes]:
        (self.folder / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
        return [
            sentencepiece_model(self.folder, "bpe"),
            sentencepiece_model(self.folder, "unigram"),
        ]


class Tekken(TokenizerJson):
    """`tekken.json`."""

    file = "tekken.json"

    def prepare(self) -> list[bytes]:
        write_tekken(self.folder)
        return [self.path.read_bytes()]


class TokenizerConfig(Reader):
    """`tokenizer_config.json`, which names tokens and holds a template."""

    file = "tokenizer_config.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        make_tiny("llama", self.folder, num_hidden_layers=1)
        content = {
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "</s>",
            "eos_token_id": [1, 2],
            "pad_token_id": 0,
            "text_config": {"bos_token_id": 1},
            "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
            "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
            "model_max_length": 1e30,
        }
        return [json.dumps(content).encode()]

    def use(self) -> None:
        found = Tokenizer.load(self.folder)
        exercise(found)
        find_template(self.folder)
        special_tokens(self.folder, found)


class GenerationConfig(TokenizerConfig):
    """`generation_config.json`, which names tokens and recommends settings."""

    file = "generation_config.json"

    def prepare(self) -> list[bytes]:
        super().prepare()
        content = {
            "bos_token_id": 0,
            "eos_token_id": [1, 2],
            "pad_token_id": 0,
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "repetition_penalty": 1.05,
        }
        return [json.dumps(content).encode()]

    def use(self) -> None:
        super().use()
        SamplingSettings(**of_model(self.folder))


class AddedTokens(TokenizerConfig):
    """The same file beside a `tokenizer.model`, to which it adds tokens."""

    def prepare(self) -> list[bytes]:
        model = sentencepiece_model(self.folder, "bpe", with_bytes=False)
        (self.folder / "tokenizer.model").write_bytes(model)
        added = {"content": "<x>", "special": True}
        listed = {"340": added, "341": {"content": "<y>"}}
        size = Tokenizer.load(self.folder).vocab_size
        listed = {str(size + i): entry for i, entry in enumerate(listed.values())}
        return [json.dumps({"added_tokens_decoder": listed, "eos_token": "<x>"}).encode()]


PARTS = (
    "{{ messages }}",
    "{{ x.y.z }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if a %}",
    "{% endif %}",
    "{% set x = 1 %}",
    "{% set x.y = 1 %}",
    "{{ x[1:2:0] }}",
    "{{ 1 / 0 }}",
    "{% macro m(a, a) %}",
    "{% endmacro %}",
    "{{ m() }}",
    "{% block b %}",
    "{% endblock %}",
    "{% extends x %}",
    "{% import 'y' as z %}",
    "{{ super() }}",
    "{% for None in x %}",
    "{{ 'a",
    "{% set None = 1 %}",
    "{{ loop.index }}",
    "{% continue %}",
    "{% break %}",
    "{{ 1 | x }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ x is odd }}",
    "{{ [] | first.a }}",
    "{#",
    "{{ ''.__class__ }}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ messages | tojson(indent='x') }}",
    "}}",
    "{{ ().__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self._TemplateRef }}",
    "{{ range(10 ** 9) | list }}",
    "{% for i in range(99999) %}",
    "{{ ns.a }}",
    "{{ m | attr('x') }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ strftime_now('%Y' * 99) }}",
    "{{ raise_exception('no') }}",
    "{% set ns = namespace(a=1) %}",
    "{{ cycler.__init__ }}",
    "{{ lipsum(n=10 ** 7) }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "\ud800",
    "{% include '/etc/passwd' %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{% call m() %}",
)


def program() -> ModuleType:
    """Return the program that renders templates, without the rest of the package."""
    found = importlib.util.spec_from_file_location("template_program", PROGRAM)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Template(Reader):
    """Chat templates, in the environment and under the limits of their own process."""

    file = "chat_template.jinja"
    changes = (changed_bytes, assembled(PARTS), assembled(PARTS))

    def prepare(self) -> list[bytes]:
        self.program = program()
        return [each.template.encode() for each in all_formats().values()]

    def use(self) -> None:
        found = find_template(self.folder)
        assert found is not None
        path, text = found
        with self.trial():
            line = json.dumps({"template": text}).encode()
            template, answer = self.program.answered(line, None)
            if template is not None:
                line = json.dumps({"variables": VARIABLES, "now": NOW}).encode()
                _, answer = self.program.answered(line, template)
        if crc32(text.encode()) % OFTEN == 0:
            self.in_its_process(path, text)
        if "error" in answer:
            raise ChatTemplateError(answer["error"])

    def in_its_process(self, path: Path, text: str) -> None:
        """Render a template as a conversation does."""
        messages = [Message(role="user", content="x")]
        with suppress(ChatTemplateError):
            ChatTemplate(text, special_tokens={}, origin=path).render(messages)


class Chat(Reader):
    """Files of conversations; a share of them goes on."""

    file = "chat.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        folder = make_tiny("llama", self.folder, num_hidden_layers=1, max_position_embeddings=2048)
        self.generator = Generator(load_model(folder, device="cpu"), tokens=1024, slots=1)
        found = []
        for name in ("alpaca", "qwen3"):
            session = Session(self.generator, all_formats()[name], seed=1, max_answer_tokens=4)
            for text in ("Hello", "And then?"):
                for _ in session.reply(text):
                    pass
            session.save(self.path)
            content = json.loads(self.path.read_bytes()) | {"started": NOW}
            found.append(json.dumps(content).encode())
        return found

    def use(self) -> None:
        found = Conversation.read(self.path)
        found.has_ids_below(299)
        found.write(self.path.with_name("copy.json"))
        Conversation.read(self.path.with_name("copy.json"))
        if crc32(self.path.read_bytes()) % OFTEN == 0:
            session = Session.load(self.path, self.generator)
            next(session.reply("Go on"), None)
            session.stop()
            session.save(self.path.with_name("copy.json"))
