"""Readers of what exl2flow itself has written: records, manifests, checkpoints, digests.

What they accept is compared with what Python's own `json`, and a reader of safetensors of three
lines, say of the same bytes.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
from model_readers import Exl2
from mutations import changed_bytes, changed_header, changed_json, changed_tensors
from reader import JSON, Reader
from tiny import tiny_config

from exl2flow.cli.output.results import _part_rows, _summary, cost_table
from exl2flow.cli.output.tables import plan_table, table_of
from exl2flow.core.store.files import digest, digest_of, read_metadata, read_tensors, write_tensors
from exl2flow.core.store.manifest import CHECKSUM
from exl2flow.core.store.source import digests, provenance
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.core.store.store import MANIFEST, StageFolder, WorkDir
from exl2flow.inference.report.card import render_card
from exl2flow.inference.report.comparison import compared, known_score
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.publication import (
    Origin,
    describe,
    origin_from,
    origin_problems,
    public_files,
    quality_problems,
    recorded_origins,
)
from exl2flow.quant.measure.measurement import read_entries

SHA = "0123456789abcdef" * 4
STATES = "states-a.safetensors"


def sealed(rng: random.Random, data: bytes) -> bytes:
    """Return a changed manifest with the right checksum."""
    changed = changed_json(rng, data)
    try:
        content = json.loads(changed)
    except RecursionError:
        return changed
    content.pop(CHECKSUM, None)
    return json.dumps({**content, CHECKSUM: digest_of(content)}).encode()


def parsed(data: bytes, *, errors: str = "surrogatepass") -> Any:
    """Parse JSON; return None if it is malformed. errors: passed to `str.encode`."""
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False).encode(errors=errors)
    except (ValueError, RecursionError):
        return None
    return json.loads(text.decode(errors="surrogatepass"))


def agrees(read: object, told: object) -> bool:
    """Return whether a value says what a file does; a field that the file lacks has a default."""
    if isinstance(read, Mapping) and isinstance(told, Mapping):
        return all(agrees(value, told[key]) for key, value in read.items() if key in told)
    if isinstance(read, list | tuple) and isinstance(told, list):
        return len(read) == len(told) and all(map(agrees, read, told))
    if isinstance(read, float) and math.isnan(read):
        return isinstance(told, float) and math.isnan(told)
    return read == told and isinstance(read, str) == isinstance(told, str)


class Manifest(Reader):
    """Manifests of stages: half of them with the right checksum."""

    file = f"measure/{SHA[:16]}/{MANIFEST}"
    changes = (sealed, sealed, *JSON)

    def prepare(self) -> list[bytes]:
        work = WorkDir(self.folder)
        stage = work.open(
            work.ref("measure", SHA), schema=1, inputs={"t": "f"}, options={"bpw": 4}, device="cpu"
        )
        (stage.path / "note").write_text("x")
        stage.commit("note", digest(stage.path / "note"), cursor=1)
        stage.save_states(torch.zeros(2, 2), 1)
        return [self.path.read_bytes()]

    def use(self) -> None:
        data = self.path.read_bytes()
        stage, own = StageFolder.load(self.path.parent), self._unsealed(data)
        assert stage is not None or data not in self.seeds
        if stage is None:
            return
        assert own is not None
        manifest = stage.manifest.model_dump()
        assert agrees(manifest, own)
        assert {"stage", "fingerprint", "options"} <= own.keys()
        stage.is_complete()
        stage.has_results()
        states = stage.load_states()
        assert states is None or agrees(states[0], own["states"]["index"])
        assert states is None or torch.equal(states[1], torch.zeros(2, 2))
        assert all(path.parent == stage.path for path in stage.tensor_files())

    def _unsealed(self, data: bytes) -> dict[str, Any] | None:
        """Return the content if its checksum is right, as docs/concepts/checkpoints.md has it."""
        whole = parsed(data)
        if not isinstance(whole, dict):
            return None
        seal = whole.pop(CHECKSUM, None)
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        right = sha256(text.encode(errors="backslashreplace")).hexdigest()
        return whole if seal == right else None


class Checkpoint(Reader):
    """Tensors that a stage resumes from, in a file of its own."""

    file = STATES
    changes = (changed_tensors, changed_header, changed_bytes)

    def prepare(self) -> list[bytes]:
        write_tensors(self.path, {"states": torch.zeros(3, 4)}, metadata={"report": "{}"})
        return [self.path.read_bytes()]

    def use(self) -> None:
        data = self.path.read_bytes()
        metadata, tensors = read_metadata(self.path), read_tensors(self.path)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        assert metadata == (header.pop("__metadata__", None) or {})
        assert tensors.keys() == header.keys()
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert list(tensors[name].shape) == entry["shape"]
            stored = tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert stored == data[8 + size + begin : 8 + size + end]


class Entries(Reader):
    """Measured entries of a sublayer."""

    file = "0000.attention.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        params = {"group_size": {"4": 32}, "bits": [4], "bits_prop": [1.0], "scale_bits": 4}
        return [json.dumps([{"accuracy": 0.9, "total_bits": 8, "q_proj": params}] * 2).encode()]

    def use(self) -> None:
        assert agrees(read_entries(self.path), json.loads(self.path.read_bytes()))


class Digests(Reader):
    """Digests remembered from earlier runs."""

    file = "digests.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        self.source = self.folder / "config.json"
        self.source.write_text("{}")
        self.right = {self.source: sha256(self.source.read_bytes()).hexdigest()}
        digests([self.source], self.path)
        return [self.path.read_bytes()]

    def use(self) -> None:
        assert digests([self.source], self.path) == self.right


class Provenance(Reader):
    """What was recorded of a model's origin on the Hub."""

    file = "model.source.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        texts = ("repo", "revision", "commit", "license", "license_name", "license_link")
        return [json.dumps({**dict.fromkeys(texts, "x"), "gated": False}).encode()]

    def use(self) -> None:
        data = self.path.read_bytes()
        known, own = provenance(self.folder / "model"), parsed(data)
        assert known is not None or data not in self.seeds
        if known is None:
            return
        assert agrees(known, own)
        origin = origin_from(known)
        told = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in own.items()}
        assert origin.gated == bool(own["gated"])
        texts = ((name, value) for name, value in asdict(origin).items() if name != "gated")
        assert all(value in (None, told[name]) for name, value in texts)
        origin_problems(origin)
        assert len({origin, origin_from(known)}) == 1


class Record(Exl2):
    """`exl2flow.json` of a converted model, as `inspect` and the comparison show it."""

    file = RECORD_FILE
    changes = JSON

    def prepare(self) -> list[bytes]:
        model, *_ = super().prepare()
        (self.folder / "model.safetensors").write_bytes(model)
        (self.folder / "config.json").write_text(json.dumps(tiny_config("llama")))
        report = {"nats": 0.1, "rel_err": 0.01, "bpw": 4.0, "params": "4b"}
        record = {
            "fingerprint": "f",
            "options": {"quality": "best", "bpw": 4.0, "head_bits": 6},
            "allocation": {"objective": "nats", "value": 0.1, "bpw": 4.0},
            "predicted_kl": 0.1,
            "tuning": None,
            "provenance": {"repo": "org/model", "commit": "c", "license": "mit", "gated": False},
            "not_quantized": {"parts": "vision tower", "bytes": 10},
            "experts": {"layers": []},
            "versions": {"exl2flow": "0.1.0", "torch": "2.13.0"},
            "calibration": {"dataset": "d", "sha256": "s"},
            "files": ["model.safetensors", "config.json"],
            "layers": [
                {
                    "name": "model.layers.0.mlp",
                    "rel_err": 0.1,
                    "bpw": 4.0,
                    "projections": {"q": report},
                }
            ],
        }
        (self.folder / SCORE_FILE).write_text(json.dumps(self.score()))
        return [json.dumps(record).encode()]

    def score(self) -> dict[str, object]:
        """Return what validation wrote."""
        score = {"model": "m", "bytes": 100, "tokens": 10, "perplexity": 3.0, "kl_divergence": 0.1}
        return {"fingerprint": "f", "score": score, "calibration": score}

    def use(self) -> None:
        contents = inspect_model(self.folder)
        shown = json.loads(json.dumps(contents.to_json()))
        record, scores = (
            parsed((self.folder / name).read_bytes(), errors="replace")
            for name in (RECORD_FILE, SCORE_FILE)
        )
        assert shown["written_by_exl2flow"] or not isinstance(record, dict) or not record
        for key in ("nats", "rel_err", "params"):
            own = [None, *found(record, key)]
            assert all(value in own for value in found(shown["layers"], key))
        assert shown["predicted_kl"] in (None, *found(record, "predicted_kl"))
        assert shown["allocated_kl"] in (None, *found(record, "value"))
        for name in ("score", "calibration"):
            told = scores.get(name) if isinstance(scores, dict) else None
            assert shown[name] is None or agrees(shown[name], told)
        plan_table(_summary(contents))
        table_of(_part_rows(contents))
        cost_table(contents.matrices)
        score = known_score(self.folder)
        if score is not None:
            assert isinstance(scores, dict)
            fields = {key: value for key, value in asdict(score).items() if value is not None}
            assert agrees({**fields, "model": None}, {**scores["score"], "model": None})
            compared([score])
        self._publish()

    def _publish(self) -> None:
        """Use it as a publication does."""
        bitrate = describe(self.folder)
        origins = recorded_origins([bitrate])
        quality_problems([bitrate], 1.0)
        card = render_card("org/x", [bitrate], origins[0] if origins else Origin())
        public_files(bitrate, card)


def found(value: object, key: str) -> Iterator[object]:
    """Yield all values under a key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for each in value.values():
            yield from found(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from found(each, key)


class ScoreFile(Record):
    """`exl2flow-score.json` beside it."""

    file = SCORE_FILE

    def prepare(self) -> list[bytes]:
        [record] = super().prepare()
        (self.folder / RECORD_FILE).write_bytes(record)
        return [json.dumps(self.score()).encode()]
