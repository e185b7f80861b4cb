"""Pack the text sources into the Parquet files that ship.

Run `python -m exl2flow.calibration_data.build`. A source is `text/<kind>/<name>.txt` or
`heldout/<number>_<kind>.txt`, UTF-8; lines that contain only `</doc>` separate its documents.
Dialogues, of the kind `chat`, get their own file, so that they never change the standard set.
Within a kind, the documents of all files alternate, so that a few rows see as many subjects,
languages and formats as possible. The same sources give the same rows, and the same bytes with the
same version of pyarrow. The sources stay in the repository; packages contain only the Parquet
files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from exl2flow.calibration_data import chat, heldout, standard
from exl2flow.calibration_data.generate import Document, generated

HERE = Path(__file__).resolve().parent
KINDS = ("web", "encyclopedia", "code", "stories", "multilingual", "technical")
CHAT = "chat"
SEPARATOR = "\n</doc>\n"
GENERATED_SEED = 1
GENERATED_BYTES = 36_000  # one document from each maker and a few more
BEGIN, END = "<!-- table made by build.py -->\n", "<!-- end of table -->\n"


def read_documents(path: Path, *, kind: str, language: str | None = None) -> list[Document]:
    """Split one source into its documents, without leading and trailing blank lines."""
    text = f"\n{path.read_bytes().decode()}\n"
    parts = [part.strip("\n") for part in text.split(SEPARATOR) if part.strip()]
    languages = [language] * len(parts) if language else _languages(kind, path.stem, len(parts))
    return [
        Document(kind=kind, name=f"{path.stem}-{number:02d}", language=spoken, text=part)
        for number, (part, spoken) in enumerate(zip(parts, languages, strict=True), start=1)
    ]


def written_documents() -> list[list[Document]]:
    """Return the documents of each source of the standard set."""
    return [
        read_documents(path, kind=kind) for kind in KINDS for path in _sources(HERE / "text" / kind)
    ]


def generated_documents() -> list[Document]:
    """Return the generated documents of the standard set."""
    return generated(GENERATED_SEED, GENERATED_BYTES)


def standard_documents() -> list[Document]:
    """Return the whole standard set, kind by kind."""
    from_programs = generated_documents()
    sources = written_documents() + [[d for d in from_programs if d.kind == kind] for kind in KINDS]
    documents: list[Document] = []
    for kind in KINDS:
        documents += alternated(source for source in sources if source and source[0].kind == kind)
    return documents


def chat_documents() -> list[Document]:
    """Return the dialogues."""
    sources = _sources(HERE / "text" / CHAT)
    return alternated(read_documents(path, kind=CHAT) for path in sources)


def heldout_documents() -> list[Document]:
    """Return the text kept for validation, file by file."""
    documents: list[Document] = []
    for path in _sources(HERE / "heldout"):
        kind = path.stem.partition("_")[2]
        language = "mul" if kind in ("code", "multilingual") else "en"
        documents += read_documents(path, kind=kind, language=language)
    return documents


def alternated(sources: Iterable[Sequence[Document]]) -> list[Document]:
    """Merge the sources so that each is spread evenly over the result."""
    positions = [
        ((index + 0.5) / len(source), document)
        for source in sources
        for index, document in enumerate(source)
    ]
    return [document for _, document in sorted(positions, key=lambda pair: pair[0])]


def write_documents(documents: Sequence[Document], path: Path) -> None:
    """Write the columns kind, name, language and text, all strings."""
    pq.write_table(
        pa.Table.from_pylist([asdict(document) for document in documents]),
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=["kind", "language"],
        write_statistics=False,
    )


def provenance_table(groups: Iterable[tuple[str, str, Sequence[Document]]]) -> str:
    """Return the Markdown table of `PROVENANCE.md` for groups of (file, origin, documents)."""
    lines = [
        "| file | origin | kind | documents | bytes | languages |",
        "|:--|:--|:--|--:|--:|:--|",
    ]
    for file, origin, documents in groups:
        for kind in dict.fromkeys(document.kind for document in documents):
            mine = [document for document in documents if document.kind == kind]
            size = sum(len(document.text.encode()) for document in mine)
            languages = ", ".join(sorted({document.language for document in mine}))
            lines.append(f"| {file} | {origin} | {kind} | {len(mine)} | {size} | {languages} |")
    return "\n".join(lines) + "\n"


def groups() -> list[tuple[str, str, Sequence[Document]]]:
    """Return all documents with their file and origin, for the table."""
    written = [document for source in written_documents() for document in source]
    return [
        ("standard", "written", written),
        ("standard", "generated", generated_documents()),
        ("chat", "written", chat_documents()),
        ("heldout", "written", heldout_documents()),
    ]


def main() -> None:
    """Write the Parquet files and the table of `PROVENANCE.md`, and print the table."""
    write_documents(standard_documents(), standard())
    write_documents(chat_documents(), chat())
    write_documents(heldout_documents(), heldout())
    table = provenance_table(groups())
    page = HERE / "PROVENANCE.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
    print(table, end="")


def _sources(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"no text in `{folder}`; build in a checkout of the repository")
    return paths


def _languages(kind: str, stem: str, count: int) -> list[str]:
    """Return one language per document of a file.

    Code files are named after their language, or after their documents' languages in order; files
    in languages other than English after the two-letter code.
    """
    if kind == "multilingual" or (kind == CHAT and len(stem) == 2):
        return [stem] * count
    if kind != "code":
        return ["en"] * count
    parts = stem.split("_")
    return parts if len(parts) == count else [stem] * count


if __name__ == "__main__":
    main()
