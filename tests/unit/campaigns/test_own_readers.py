"""What readers of a campaign accept is compared with what an independent reading says."""

import json
from pathlib import Path

import pytest
from own_readers import Digests

from exl2flow.core.store.files import digest_of
from exl2flow.core.store.manifest import CHECKSUM


def test_a_digest_that_is_believed_although_it_is_wrong_is_a_failure(tmp_path: Path) -> None:
    reader = Digests(tmp_path / "digests")
    [whole] = reader.seeds
    content = json.loads(whole)
    content.pop(CHECKSUM)
    for record in content.values():
        record["sha256"] = "0" * 64

    reader.read(whole)
    reader.read(json.dumps({**content, CHECKSUM: "0" * 64}).encode())  # is computed again
    with pytest.raises(AssertionError):
        reader.read(json.dumps({**content, CHECKSUM: digest_of(content)}).encode())
