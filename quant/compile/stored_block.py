"""A quantized MTP block on its way into the output: its tensors, digests and record."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch

from exl2flow.core.reports import SublayerReport
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.store.files import Layout, read_json
from exl2flow.model import CanonicalTensors, TensorFiles
from exl2flow.model.config.mtp import TOKEN_COUNTS, MtpSpec
from exl2flow.quant.allocate.block import block_layout, plain_block_layout
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.mtp.stage import block_files
from exl2flow.quant.quantize.matrix_work import read_report
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.training.trainable import fits_half


class StoredBlock:
    """A block whose matrices are in a folder of the stage `mtp`, the rest in the source.

    rows: folder of the stage `tokenize`.
    """

    def __init__(self, spec: MtpSpec, folder: Path, rows: Path) -> None:
        self.spec, self.folder, self._rows = spec, folder, rows
        self.plain = plain_block_layout(spec)
        self._source = CanonicalTensors(spec.layer)
        self._quantized = TensorFiles(folder / "sublayers")

    @cached_property
    def layout(self) -> Layout:
        """Name → (dtype, shape) of its tensors in the output."""
        return block_layout(self.spec, read_choice(self.folder))

    @cached_property
    def reports(self) -> list[SublayerReport]:
        """The joint, then the sublayers."""
        return [read_report(self.folder / name) for name in block_files(self.spec)]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored in the output."""
        look()
        if name in self._quantized:
            return self._quantized.read(name)
        if name == TOKEN_COUNTS:
            ids = load_rows(self._rows, "quantize").flatten()
            size = self.spec.layer.vocab_size
            return torch.bincount(ids[(ids >= 0) & (ids < size)], minlength=size).int()
        tensor = self._source.read(name)
        dtype, shape = self.plain[name]
        if dtype is torch.float16:
            tensor = fits_half(tensor, name)
        return tensor.expand(shape).contiguous()

    def digests(self) -> Iterator[tuple[str, str]]:
        """Yield (key, sha256 of the reconstruction) for all its matrices."""
        parts = ((self.spec.joint,), *(s.projections for s in self.spec.layer.sublayers))
        for report, projections in zip(self.reports, parts, strict=True):
            digests = {matrix.name: matrix.sha256 for matrix in report.matrices}
            for projection in projections:
                yield projection.key, digests[projection.name] or ""

    def record(self) -> Mapping[str, object]:
        """Return what a record tells of it: bits apart from the decoder's, errors."""
        allocation = read_json(self.folder / ALLOCATION_FILE)
        return {
            "bpw": allocation["bpw"],
            "bytes": allocation["used_bits"] // 8,
            "layers": [report.to_json() for report in self.reports],
        }
