"""Seeded generator of simple English documents for the demo model.

Words, records and sentence templates are data (words.txt, tables.txt, templates.txt); this module
expands them with names, towns and pronouns that stay consistent within a document.
`python demo/corpus.py --stats` prints the size of the vocabulary.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

from english import gerund, number, ordinal, past, plural, tidy

HERE = Path(__file__).resolve().parent
EOS = "<|eos|>"
MIN_WORD_TYPES = 5000
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
PRONOUNS = {"girls": ("she", "her", "her"), "boys": ("he", "him", "his")}
KINDS = {
    "story": 26,
    "lost": 9,
    "trade": 6,
    "fable": 9,
    "animal": 8,
    "town": 7,
    "job": 6,
    "howto": 7,
    "facts": 7,
    "letter": 7,
    "diary": 4,
    "news": 5,
    "riddle": 2,
    "season": 3,
    "talk": 4,
    "recipe": 3,
    "sum": 3,
    "school": 5,
    "thing": 5,
    "journey": 6,
    "compare": 2,
    "person": 5,
}

Record = dict[str, str]
Value = str | Record


def _sections(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name, rest of the header, lines) for every section of a data file."""
    name, rest, lines = "", "", list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.match(r"\[(\w+)\]\s*(.*)$", line)
        if header:
            if name:
                yield name, rest, lines
            name, rest, lines = header[1], header[2], []
        elif line and not line.startswith("#"):
            lines.append(line)
    yield name, rest, lines


def load_words() -> dict[str, list[str]]:
    """Return the word lists by name."""
    found = _sections(HERE / "words.txt")
    return {name: [w.strip() for w in ",".join(lines).split(",")] for name, _, lines in found}


def load_tables() -> dict[str, list[Record]]:
    """Return the record tables by name."""
    tables: dict[str, list[Record]] = {}
    for name, header, lines in _sections(HERE / "tables.txt"):
        fields = [field.strip() for field in header.split("|")]
        names = [
            f"{f}{fields[: i + 1].count(f)}" if fields.count(f) > 1 else f
            for i, f in enumerate(fields)
        ]
        rows = [[cell.strip() for cell in line.split("|")] for line in lines]
        if len(names) == 1:
            rows = [[cell] for row in rows for cell in row]
        tables[name] = [dict(zip(names, row, strict=True)) for row in rows]
    return tables


class Corpus:
    """The data files, an invented world that never changes, and a seeded source of documents."""

    def __init__(self, seed: int = 0) -> None:
        self.words = load_words()
        self.tables = load_tables()
        self.templates = {name: lines for name, _, lines in _sections(HERE / "templates.txt")}
        self.past = dict(pair.split("=") for pair in self.words["irregular_past"])
        self.plural = dict(pair.split("=") for pair in self.words["irregular_plural"])
        self.words |= {
            "weekday": WEEKDAYS,
            "month": MONTHS,
            "season": [row["name"] for row in self.tables["seasons"]],
            "land": self.words["lands"],
            "ordinal": [ordinal(n) for n in range(1, 31)],
            "few": [number(n) for n in range(4, 13)],
            "num": [number(n) for n in (*range(2, 13), *range(2, 21), *range(2, 100))],
            "animal": [row["name"] for row in self.tables["animals"]],
        }
        for alias in ("thing", "thing_adj", "person_adj", "flower"):
            self.words[alias] = self.words[alias + "s"]
        self._build_world(Random(7))
        self.rng = Random(seed)
        self.mods: dict[str, Callable[[str], str]] = {
            "s": lambda text: plural(text, self.plural),
            "ed": lambda text: past(text, self.past),
            "ing": lambda text: gerund(text, self.past),
            "cap": capital,
            "a": lambda text: f"a {text}",
            "name": lambda text: text,
            "comma": lambda text: text.removesuffix(".") + ",",
        }

    def _build_world(self, rng: Random) -> None:
        """Make the towns and the people whose facts are the same in all documents."""
        words, tables = self.words, self.tables
        heads, tails = words["town_heads"], words["town_tails"]
        names = sorted({f"{h}{rng.choice(tails)}" for h in heads for _ in range(3)})
        words["surname"] = sorted(
            {h + t for h in words["surname_heads"] for t in rng.sample(words["surname_tails"], 5)}
        )
        towns = [
            {
                "name": name,
                "river": rng.choice(words["rivers"]),
                "land": rng.choice(words["lands"]),
                "next": names[i - 1],
                "known": rng.choice(tables["known"])["thing"],
                "ruler": rng.choice(tables["rulers"])["text"],
                "people": f"{number(rng.randint(2, 60))} thousand",
                "tree": rng.choice(words["trees"]),
                "market": rng.choice(WEEKDAYS),
                "animal": rng.choice(tables["animals"])["name"],
                "flower": rng.choice(words["flowers"]),
                "year": number(rng.randint(1100, 1890)),
            }
            for i, name in enumerate(names)
        ]
        tables["towns"] = towns
        tables["persons"] = [self._resident(rng) for _ in range(400)]

    def _resident(self, rng: Random) -> Record:
        """Return one invented person with a job, a home and habits."""
        group = rng.choice(["girls", "boys"])
        he, him, his = PRONOUNS[group]
        first, job = rng.choice(self.words[group]), rng.choice(self.tables["jobs"])
        towns = self.tables["towns"]
        pick = rng.choice
        hobby = f"{pick(['plays', 'enjoys', 'teaches'])} {pick(self.words['games'])}"
        return {
            "first": first,
            "name": f"{first} {pick(self.words['surname'])}",
            "he": he,
            "him": him,
            "his": his,
            "job": job["name"],
            "work": job["work"],
            "town": pick(towns)["name"],
            "from": pick(towns)["name"],
            "month": pick(MONTHS),
            "dish": pick(self.words["dishes"]),
            "hobby": hobby,
            "adj": pick(self.words["person_adjs"]),
            "pet": pick(self.tables["animals"])["name"],
            "colour": pick(self.words["colours"]),
            "thing": pick(self.words["things"]),
        }

    def documents(self) -> Iterator[str]:
        """Yield documents without end."""
        kinds, weights = list(KINDS), list(KINDS.values())
        while True:
            kind = self.rng.choices(kinds, weights)[0]
            yield tidy(Document(self).expand(f"{{doc_{kind}}}"))


class Document:
    """The bound names of one document and the words it has used already."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.rng = corpus.rng
        self.used: set[str] = set()
        self.bound: dict[str, Value] = {}
        self._bind_people()
        self._bind_records()
        self._bind_numbers()

    def _bind_people(self) -> None:
        words, bound = self.corpus.words, self.bound
        for key, pronouns in (("hero", ("he", "him", "his")), ("pal", ("pe", "pim", "pis"))):
            group = self.rng.choice(["girls", "boys"])
            bound[key] = self._fresh(words[group])
            bound |= dict(zip(pronouns, PRONOUNS[group], strict=True))
        roles = words["relations"]
        bound["rel"] = self.rng.choice([r for r in roles if r.endswith(("friend", "bour", "mate"))])

    def _bind_records(self) -> None:
        tables, rng, bound = self.corpus.tables, self.rng, self.bound
        bound["a"], bound["b"], bound["an"] = rng.sample(tables["animals"], 3)
        feature = re.sub(r"^(a|an|the) ", "", self._record("a")["feature"])
        bound["a"] = {**self._record("a"), "feature_bare": feature}
        bound["j"], bound["j2"] = rng.sample(tables["jobs"], 2)
        bound["t"], bound["u2"] = rng.sample(tables["towns"], 2)
        bound["fa"], bound["fb"], bound["fc"] = rng.sample(tables["facts"], 3)
        for key, table in (("q", "quests"), ("h", "howtos"), ("s", "seasons"), ("w", "persons")):
            bound[key] = rng.choice(tables[table])

    def _bind_numbers(self) -> None:
        rng, bound = self.rng, self.bound
        bound["p1"] = self._fresh(self.corpus.words["places"])
        bound["x"] = self._fresh(self.corpus.words["things"])
        bound["xd"] = " and ".join(rng.sample(self.corpus.words["thing_adjs"], 2))
        day, date = rng.randrange(7), rng.randint(2, 24)
        for step in (1, 2, 3):
            bound[f"wd{step}"] = WEEKDAYS[(day + step) % 7]
            bound[f"ord{step}"] = ordinal(date + step)
        bound |= {"sum1": self._sum(), "sum2": self._sum(), "sum3": self._sum()}
        bound["cal"] = self._calendar()

    def _record(self, key: str) -> Record:
        value = self.bound[key]
        assert isinstance(value, dict)
        return value

    def _fresh(self, options: list[str]) -> str:
        """Draw an option that this document has not used yet, if one turns up."""
        choice = self.rng.choice(options)
        for _ in range(6):
            if choice not in self.used:
                break
            choice = self.rng.choice(options)
        self.used.add(choice)
        return choice

    def _sum(self) -> str:
        """Return a small problem in words, with its correct answer."""
        rng, words = self.rng, self.corpus.words
        many, few = rng.randint(6, 30), rng.randint(2, 5)
        things = plural(rng.choice(words["fruits"] + words["things"]), self.corpus.plural)
        one, two = self.bound["hero"], self.bound["pal"]
        a, b = number(many), number(few)
        forms = (
            f"{one} has {a} {things} and gets {b} more from {two}. How many {things} does {one} "
            f"have now? {a} and {b} make {number(many + few)}.",
            f"There were {a} {things} on the table. {two} took away {b} of them. {a} less {b} "
            f"leaves {number(many - few)}, so {number(many - few)} {things} were left.",
            f"{capital(b)} friends have {a} {things} each. {b} times {a} is "
            f"{number(many * few)}. Together they have {number(many * few)} {things}.",
            f'"What is {a} plus {b}?" asked {two}. "{number(many + few)}," said {one}. '
            f'"And {a} minus {b}?" "{number(many - few)}."',
        )
        return rng.choice(forms)

    def _calendar(self) -> str:
        """Return a true sentence or two about days and months."""
        rng = self.rng
        day, month, step = rng.randrange(7), rng.randrange(12), rng.randint(2, 4)
        return rng.choice(
            (
                f"If today is {WEEKDAYS[day]}, then tomorrow is {WEEKDAYS[(day + 1) % 7]} and "
                f"yesterday was {WEEKDAYS[day - 1]}.",
                f"Which month comes after {MONTHS[month - 1]}? It is {MONTHS[month]}, the "
                f"{ordinal(month + 1)} month of the year.",
                f"{number(step)} days after {WEEKDAYS[day]} comes {WEEKDAYS[(day + step) % 7]}; "
                f"{number(step)} months after {MONTHS[month]} comes {MONTHS[(month + step) % 12]}.",
            )
        )

    def expand(self, text: str) -> str:
        """Replace all alternatives and slots in a template."""
        text = text.replace("\\n", "\n")
        text = re.sub(r"\(([^()]*/[^()]*)\)", lambda m: self.rng.choice(m[1].split("/")), text)
        return re.sub(r"\{(?:(\w+):)?([\w.]+)\}", self._slot, text)

    def _slot(self, match: re.Match[str]) -> str:
        name, *rest = match[2].split(".")
        value = self._value(name)
        if isinstance(value, dict):
            value = self.expand(value[rest.pop(0)])
        for mod in rest:
            value = self.corpus.mods[mod](value)
        if match[1]:
            self.bound[match[1]] = value
        return value

    def _value(self, name: str) -> Value:
        if name in self.bound:
            return self.bound[name]
        if name in self.corpus.templates:
            return self.expand(self._fresh(self.corpus.templates[name]))
        if name in self.corpus.tables:
            return self.rng.choice(self.corpus.tables[name])
        return self._fresh(self.corpus.words[name])


def capital(text: str) -> str:
    """Capitalise the first letter only."""
    return text[:1].upper() + text[1:]


def take(characters: int, seed: int = 0) -> list[str]:
    """Return documents with at least this many characters in total."""
    documents, total = [], 0
    for document in Corpus(seed).documents():
        documents.append(document)
        total += len(document)
        if total >= characters:
            break
    return documents


def word_types(documents: list[str]) -> Counter[str]:
    """Count the distinct words, ignoring case."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(re.findall(r"[a-z]+(?:'[a-z]+)?", document.lower()))
    return counts


def print_stats(documents: list[str]) -> None:
    """Print the size of the text and check that its vocabulary is rich enough."""
    counts = word_types(documents)
    characters = sum(map(len, documents))
    print(f"documents {len(documents)}  characters {characters}  words {counts.total()}")
    print(f"distinct words {len(counts)}  distinct documents {len(set(documents))}")
    assert len(counts) >= MIN_WORD_TYPES, f"only {len(counts)} distinct words"


def main() -> None:
    """Write documents, each followed by the end-of-text token or a blank line, or statistics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stats", action="store_true", help="print statistics, not the text")
    parser.add_argument("--plain", action="store_true", help="blank lines between documents")
    arguments = parser.parse_args()
    documents = take(arguments.characters, arguments.seed)
    if arguments.stats:
        print_stats(documents)
        return
    for document in documents:
        print(document, "" if arguments.plain else EOS, sep="\n")


if __name__ == "__main__":
    main()
