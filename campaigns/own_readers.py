"""Readers of what exl2flow itself has written: records, manifests, checkpoints, digests."""

import json
import random
from hashlib import sha256

import torch
from model_readers import Exl2
from mutations import changed_bytes, changed_header, changed_json, changed_tensors
from reader import JSON, Reader

from exl2flow.core.store.files import digest, digest_of, read_metadata, read_tensors, write_tensors
from exl2flow.core.store.manifest import CHECKSUM
from exl2flow.core.store.source import digests, provenance
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.core.store.store import MANIFEST, StageFolder, WorkDir
from exl2flow.flows.cli.results import _part_rows, _summary, cost_table
from exl2flow.flows.cli.tables import plan_table, table_of
from exl2flow.inference.report.comparison import compared, known_score
from exl2flow.inference.report.inspection import inspect_model
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
        stage = StageFolder.load(self.path.parent)
        if stage is not None:
            stage.is_complete()
            stage.has_results()
            stage.load_states()
            assert all(path.parent == stage.path for path in stage.tensor_files())


class Checkpoint(Reader):
    """Tensors that a stage resumes from, in a file of its own."""

    file = STATES
    changes = (changed_tensors, changed_header, changed_bytes)

    def prepare(self) -> list[bytes]:
        write_tensors(self.path, {"states": torch.zeros(3, 4)}, metadata={"report": "{}"})
        return [self.path.read_bytes()]

    def use(self) -> None:
        read_metadata(self.path)
        read_tensors(self.path)


class Entries(Reader):
    """Measured entries of a sublayer."""

    file = "0000.attention.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        params = {"group_size": {"4": 32}, "bits": [4], "bits_prop": [1.0], "scale_bits": 4}
        return [json.dumps([{"accuracy": 0.9, "total_bits": 8, "q_proj": params}] * 2).encode()]

    def use(self) -> None:
        read_entries(self.path)


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
        keys = ("repo", "revision", "commit", "license", "license_name", "license_link", "gated")
        return [json.dumps(dict.fromkeys(keys, "x")).encode()]

    def use(self) -> None:
        provenance(self.folder / "model")


class Record(Exl2):
    """`exl2flow.json` of a converted model, as `inspect` and the comparison show it."""

    file = RECORD_FILE
    changes = JSON

    def prepare(self) -> list[bytes]:
        model, *_ = super().prepare()
        (self.folder / "model.safetensors").write_bytes(model)
        (self.folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        report = {"nats": 0.1, "rel_err": 0.01, "bpw": 4.0, "params": "4b"}
        record = {
            "fingerprint": "f",
            "options": {"quality": "best", "bpw": 4.0, "head_bits": 6},
            "allocation": {"objective": "nats", "value": 0.1},
            "predicted_kl": 0.1,
            "tuning": None,
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
        json.dumps(contents.to_json())
        plan_table(_summary(contents))
        table_of(_part_rows(contents))
        cost_table(contents.matrices)
        score = known_score(self.folder)
        if score is not None:
            compared([score])


class ScoreFile(Record):
    """`exl2flow-score.json` beside it."""

    file = SCORE_FILE

    def prepare(self) -> list[bytes]:
        [record] = super().prepare()
        (self.folder / RECORD_FILE).write_bytes(record)
        return [json.dumps(self.score()).encode()]
