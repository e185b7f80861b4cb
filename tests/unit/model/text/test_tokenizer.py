import io
import json
import string
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tiny import TEXT, TOKENIZER_SIZE, tiny_tokenizer

from exl2flow.core.errors import SourceModelError
from exl2flow.model import Tokenizer

SAMPLES = (
    *TEXT,
    "",
    "  leading and  inner  spaces ",
    "ünïcödé, 你好, 🙂 and \u0000 control",
    "<s> is not a token here </s>",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
    write(tmp_path, "config.json", {"bos_token_id": 0, "eos_token_id": [1, 7]})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def write_sentencepiece(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a `tokenizer.model` on repeated sentences; `options` are those of the trainer."""
    buffer = io.BytesIO()
    defaults: dict[str, Any] = {
        "vocab_size": 450,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "required_chars": string.punctuation
        + string.digits,  # else `<` is unknown and `<s>` a better match
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3), model_writer=buffer, **(defaults | options)
    )
    (folder / "tokenizer.model").write_bytes(buffer.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())


@pytest.mark.parametrize("text", SAMPLES)
def test_decode_inverts_encode(text: str, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_strings_are_text_unless_asked_for(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)

    assert 0 not in tokenizer.encode("<s>a")
    assert tokenizer.encode("<s>a", special=True) == [0, *tokenizer.encode("a")]


def test_special_tokens_are_spelled_only_on_request(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("a", add_bos=True, add_eos=True)

    assert ids == [0, *tokenizer.encode("a"), 1]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, special=True) == "<s>a</s>"


def test_post_processor_truncation_and_padding_of_the_file_are_not_applied(folder: Path) -> None:
    content = json.loads(tiny_tokenizer())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [first, second],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    plain = Tokenizer.load(folder).encode(TEXT[0])

    write(folder, "tokenizer.json", content)

    assert Tokenizer.load(folder).encode(TEXT[0]) == plain


def test_ids_come_from_the_config_first(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": "</s>", "eos_token": "<s>"})
    write(folder, "generation_config.json", {"bos_token_id": 9, "eos_token_id": [7, 9]})

    tokenizer = Tokenizer.load(folder)

    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.eos_token_ids == (1, 7, 0, 9)


def test_ids_of_a_wrapper_come_from_its_text_config(folder: Path) -> None:
    write(folder, "config.json", {"text_config": {"bos_token_id": 0, "eos_token_id": 7}})

    tokenizer = Tokenizer.load(folder)

    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (7,)


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_ids_come_from_token_texts_where_the_config_has_none(eos: object, folder: Path) -> None:
    write(folder, "config.json", {})
    write(folder, "tokenizer_config.json", {"bos_token": None, "eos_token": eos})

    tokenizer = Tokenizer.load(folder)

    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (1,)


def test_absent_ids_add_nothing(tmp_path: Path) -> None:
    content = json.loads(tiny_tokenizer()) | {"post_processor": None}
    write(tmp_path, "tokenizer.json", content)

    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.eos_token_id is None
    assert tokenizer.encode("a", add_bos=True, add_eos=True) == tokenizer.encode("a")


def test_vocab_size_covers_the_highest_id(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == TOKENIZER_SIZE

    tokenizer.backend.add_tokens(["<extra>"])

    assert Tokenizer(tokenizer.backend, bos_token_id=None, eos_token_ids=()).vocab_size == (
        TOKENIZER_SIZE + 1
    )


@pytest.mark.parametrize(
    ("model_type", "byte_fallback", "dummy_prefix", "rule"),
    [  # each pair of values is there
        ("bpe", True, True, "identity"),
        ("bpe", True, True, "nmt_nfkc"),
        ("bpe", False, False, "nmt_nfkc"),
        ("unigram", True, False, "nmt_nfkc"),
        ("unigram", False, True, "identity"),
        ("unigram", False, False, "identity"),
    ],
)
def test_converted_sentencepiece_gives_the_ids_of_the_library(
    model_type: str, byte_fallback: bool, dummy_prefix: bool, rule: str, tmp_path: Path
) -> None:
    reference = write_sentencepiece(
        tmp_path,
        model_type=model_type,
        byte_fallback=byte_fallback,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
    )

    tokenizer = Tokenizer.load(tmp_path)

    for text in SAMPLES:
        assert tokenizer.encode(text) == reference.encode(text)
        if byte_fallback:
            assert tokenizer.decode(reference.encode(text)) == reference.decode(
                reference.encode(text)
            )


def test_converted_control_pieces_are_special(tmp_path: Path) -> None:
    reference = write_sentencepiece(tmp_path, control_symbols=["[INST]"])
    write(tmp_path, "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    instruction = reference.piece_to_id("[INST]")

    tokenizer = Tokenizer.load(tmp_path)

    assert instruction not in tokenizer.encode("[INST]")
    assert tokenizer.encode("[INST]", special=True) == [instruction]
    assert tokenizer.decode([1, instruction, 2]) == ""


@pytest.mark.parametrize("options", [{"add_dummy_prefix": False}, {"add_dummy_prefix": True}])
def test_user_defined_pieces_are_whole_in_every_text(
    options: dict[str, bool], tmp_path: Path
) -> None:
    reference = write_sentencepiece(tmp_path, user_defined_symbols=["<sep>"], **options)

    tokenizer = Tokenizer.load(tmp_path)

    for text in ("a fox<sep>the dog", "<sep>a", "<sep> fox<sep>", " a<sep><sep>  dog ", ""):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == tokenizer.encode(text, special=True) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    ("setting", "adds"),
    [({}, True), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)],
)
def test_sentencepiece_texts_begin_with_bos_unless_switched_off(
    setting: dict[str, bool], adds: bool, tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path)
    write(tmp_path, "config.json", {"bos_token_id": 1})
    write(tmp_path, "tokenizer_config.json", setting)

    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.encode("a fox", add_bos=True) == [1] * adds + tokenizer.encode("a fox")


def test_tokens_beside_a_sentencepiece_model_are_added(tmp_path: Path) -> None:
    size = write_sentencepiece(tmp_path).get_piece_size()
    write(tmp_path, "added_tokens.json", {"<b>": size + 1, "<a>": size})
    decoder = {str(size + 2): {"content": "<c>", "special": False}}
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": decoder, "eos_token": "<b>"})

    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos_token_ids == (size + 1,)
    assert tokenizer.encode("<a>", special=True) == [size]
    assert tokenizer.encode("<c>") == [size + 2]


def test_gap_between_model_and_added_tokens_is_refused(tmp_path: Path) -> None:
    size = write_sentencepiece(tmp_path).get_piece_size()
    write(tmp_path, "added_tokens.json", {"<a>": size + 5})

    with pytest.raises(SourceModelError, match=r"`<a>`.*does not follow"):
        Tokenizer.load(tmp_path)


def test_unfaithful_conversion_is_refused(tmp_path: Path) -> None:
    # the library strips the text once, a converted one every stretch between user-defined pieces
    options = {"add_dummy_prefix": True, "remove_extra_whitespaces": True}
    write_sentencepiece(tmp_path, user_defined_symbols=["<sep>"], **options)

    with pytest.raises(SourceModelError, match=r"does not convert faithfully.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"model_type": "char"}, "CHAR model"), ({"treat_whitespace_as_suffix": True}, "white space")],
)
def test_model_without_counterpart_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_sentencepiece(tmp_path, **options)

    with pytest.raises(SourceModelError, match=words):
        Tokenizer.load(tmp_path)


def test_tokenizer_json_takes_precedence(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"not a model")

    assert Tokenizer.load(folder).vocab_size == TOKENIZER_SIZE


def test_folder_without_tokenizer_names_both_files(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match=r"neither `tokenizer\.json` nor `tokenizer\.model`"):
        Tokenizer.load(tmp_path)


DAMAGED = {
    "tokenizer.json": [b"", b"{", b'{"model": {}}', b"[]"],
    "tokenizer.model": [b"", b"\x00", b"\xff" * 40, b"\x0a\x05abc", b"plain text"],
}


@pytest.mark.parametrize(
    ("name", "content"), [(n, c) for n, found in DAMAGED.items() for c in found]
)
def test_damaged_tokenizer_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(SourceModelError, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)


def test_every_cut_of_a_sentencepiece_model_is_named(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    data = (tmp_path / "tokenizer.model").read_bytes()
    step = len(data) // 20

    for size in range(step, len(data), step):
        (tmp_path / "tokenizer.model").write_bytes(data[:size])
        with pytest.raises(SourceModelError):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("size", [10_000, 4_000_000])
def test_a_sentencepiece_file_of_one_endless_integer_is_refused_at_once(
    tmp_path: Path, size: int
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * size)

    begin = time.process_time()
    with pytest.raises(SourceModelError, match="an integer of more than 10 bytes"):
        Tokenizer.load(tmp_path)
    assert time.process_time() - begin < 1  # quadratic: minutes


def test_a_piece_of_megabytes_is_refused(tmp_path: Path) -> None:
    piece = b"\x0a\x80\x80\x40" + b"a" * (1 << 20)
    size = len(piece)
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a" + length + piece)

    with pytest.raises(SourceModelError, match="a piece of 1048576 bytes"):
        Tokenizer.load(tmp_path)


def damaged(folder: Path, **changes: object) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_normalization_that_states_more_than_it_has_is_refused(folder: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}

    with pytest.raises(SourceModelError, match="8 bytes states a trie of 4294967295"):
        Tokenizer.load(damaged(folder, normalizer=normalizer))


def test_a_panic_of_the_library_is_an_error_of_ours(folder: Path) -> None:
    empty = {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}

    with pytest.raises(SourceModelError, match=r"`tokenizers` fails on .*fetch it again"):
        Tokenizer.load(damaged(folder, normalizer=empty)).encode("three words here")


def test_a_git_lfs_pointer_says_how_to_get_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")

    with pytest.raises(SourceModelError, match="is a Git LFS pointer"):
        Tokenizer.load(folder)


def test_decoding_leaves_out_exactly_the_special_ids(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = range(tokenizer.vocab_size)

    assert tokenizer.special_ids == {0, 1, 7}  # 7 is a letter, but ends texts
    assert {token_id for token_id in ids if not tokenizer.decode([token_id])} == {0, 1, 7}
    assert all(tokenizer.decode([token_id], special=True) for token_id in ids)


@pytest.mark.parametrize(
    ("config", "tokens", "pad"),
    [
        ({"pad_token_id": 5}, (), 5),
        ({"pad_token_id": -1}, (), 1),
        ({}, ("<pad>",), TOKENIZER_SIZE),
        ({}, (), 1),  # EOS
        ({"eos_token_id": 0}, (), None),  # which is BOS
    ],
)
def test_pad_id_has_fallbacks(
    config: dict[str, int], tokens: tuple[str, ...], pad: int | None, folder: Path
) -> None:
    write(folder, "config.json", {"bos_token_id": 0, "eos_token_id": 1} | config)
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    backend.add_special_tokens(list(tokens))
    (folder / "tokenizer.json").write_text(backend.to_str())

    assert Tokenizer.load(folder).pad_token_id == pad


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_generation_config_is_ignored_with_a_warning(
    content: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text(content)

    assert Tokenizer.load(folder).eos_token_ids == (1, 7)
    assert "generation_config.json" in caplog.text
    assert "is ignored" in caplog.text
