"""What the bundled text must hold, and what it must not: anything of the held-out text."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from exl2flow.calibration_data import build
from exl2flow.calibration_data.generate import Document

WINDOW_TOKENS = 64
DEMO_TOKENIZER = Path(__file__).parents[3] / "demo" / "model" / "tokenizer.json"

STANDARD = build.standard_documents()
CHAT = build.chat_documents()
HELDOUT = build.heldout_documents()
WRITTEN = [document for source in build.written_documents() for document in source]


def size(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo model's tokenizer, or one trained here in a checkout without the demo model."""
    if DEMO_TOKENIZER.exists():
        return Tokenizer.from_file(str(DEMO_TOKENIZER))
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=4096, show_progress=False, initial_alphabet=ByteLevel.alphabet()
    )
    trained.train_from_iterator((document.text for document in STANDARD), trainer)
    return trained


def window_hashes(tokenizer: Tokenizer, documents: list[Document]) -> npt.NDArray[np.uint64]:
    """Return one 64-bit hash for each window of each document, uint64 (windows,)."""
    factors = np.random.default_rng(0).integers(1, 2**63, WINDOW_TOKENS, dtype=np.uint64)
    hashes = []
    for encoding in tokenizer.encode_batch(
        [document.text for document in documents], add_special_tokens=False
    ):
        ids = np.array(encoding.ids, dtype=np.uint64)
        if len(ids) >= WINDOW_TOKENS:
            windows = np.lib.stride_tricks.sliding_window_view(ids, WINDOW_TOKENS)
            hashes.append((windows * factors).sum(axis=1, dtype=np.uint64))  # wraps, as it may
    return np.concatenate(hashes)


def test_no_window_of_64_tokens_is_in_both_sets(tokenizer: Tokenizer) -> None:
    ours = window_hashes(tokenizer, STANDARD + CHAT)
    theirs = window_hashes(tokenizer, HELDOUT)

    assert len(ours) > 100_000
    assert len(theirs) > 10_000
    assert np.intersect1d(ours, theirs).size == 0


def test_a_shared_window_would_be_found(tokenizer: Tokenizer) -> None:
    ours = window_hashes(tokenizer, STANDARD)
    theirs = window_hashes(tokenizer, STANDARD[5:6])

    assert np.intersect1d(ours, theirs).size == np.unique(theirs).size > 0


def test_there_is_enough_text() -> None:
    assert size(WRITTEN) >= 120_000
    assert size(HELDOUT) >= 100_000


def test_written_text_dominates() -> None:
    assert size(WRITTEN) > 4 * size(build.generated_documents())


def test_there_are_enough_languages() -> None:
    def languages(kind: str) -> set[str]:
        return {document.language for document in WRITTEN if document.kind == kind}

    assert len(languages("multilingual")) >= 12
    assert len({language for language in languages("code") if "_" not in language}) >= 8
    assert len({document.language for document in CHAT}) >= 12


def test_every_kind_has_text() -> None:
    assert {document.kind for document in WRITTEN} == set(build.KINDS)


def test_no_document_occurs_twice() -> None:
    texts = [document.text for document in STANDARD + CHAT + HELDOUT]

    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("leftover", ["\r", "\ufeff", "\ufffd", "\x00", "</doc>"])
def test_no_document_holds_leftovers(leftover: str) -> None:
    names = [document.name for document in STANDARD + CHAT + HELDOUT if leftover in document.text]

    assert names == []


def test_no_document_is_wrapped_in_a_fence() -> None:
    wrapped = [
        document.name
        for document in WRITTEN + CHAT + HELDOUT
        if document.text.startswith("```") or document.text.count("```") % 2
    ]

    assert wrapped == []


def test_encyclopedia_articles_begin_with_a_title() -> None:
    for document in WRITTEN:
        if document.kind == "encyclopedia":
            title, _, body = document.text.partition("\n")
            assert 0 < len(title) < 80, document.name
            assert len(body) > 500, document.name
