"""Location of a tensor, or of part of one, in a safetensors file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from exl2flow.model.files.mxfp4 import MXFP4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Location of a tensor; `offset` counts bytes from the beginning of the file.

    run, step: bytes of each run of the tensor, and from one run to the next; 0: it is a single run.
    is_transposed: it is stored as its transpose.
    scales, scale_name: of a weight in fp8 or mxfp4; those in mxfp4 are of the same rows, and its
    bytes are those of its blocks. block: of an fp8 weight, see `fp8.grid_of`.
    first, whole_rows: where these rows begin in the tensor that the scales of an fp8 weight belong
    to, and how many it has; 0: they are all.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    run: int = 0
    step: int = 0
    is_transposed: bool = False
    scales: "TensorEntry | None" = None
    scale_name: str = ""
    block: tuple[int, int] | None = None
    first: int = 0
    whole_rows: int = 0

    @property
    def is_rearranged(self) -> bool:
        """Whether it is transposed, or consists of several runs of bytes."""
        return self.is_transposed or bool(self.step)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file's header, for an entry of a whole tensor."""
        return self.shape[::-1] if self.is_transposed else self.shape

    def transposed(self) -> "TensorEntry":
        """Return the location of the transpose of a matrix."""
        return replace(self, shape=self.shape[::-1], is_transposed=True)

    def grouped(self, groups: int, first: int, count: int) -> "TensorEntry":
        """Return the location of `count` rows from `first` on in each of equal groups of rows."""
        row = self.nbytes // max(self.shape[0], 1)
        return replace(
            self,
            shape=(groups * count, *self.shape[1:]),
            offset=self.offset + first * row,
            nbytes=groups * count * row,
            run=count * row,
            step=self.nbytes // groups,
        )

    def slice(self, index: int) -> "TensorEntry":
        """Return the location of one of the equal parts along the first axis, without this axis."""
        nbytes = self.nbytes // max(self.shape[0], 1)
        return replace(
            self,
            shape=self.shape[1:],
            offset=self.offset + index * nbytes,
            nbytes=nbytes,
            scales=self._scales_of(lambda scales: scales.slice(index)),
        )

    def every(self, step: int, first: int) -> "TensorEntry":
        """Return the location of each `step`-th row, from `first` on, of a tensor in one run.

        Of a transposed matrix, these are columns as it is stored, whose number `step` divides.
        """
        assert not self.step
        assert self.shape[0] % step == 0
        if self.is_transposed:  # the stored columns go on in the next row as if it was one
            run = self.nbytes // max(self.shape[0] * self.shape[1], 1)
        else:
            run = self.nbytes // max(self.shape[0], 1)
        return replace(
            self,
            shape=(self.shape[0] // step, *self.shape[1:]),
            offset=self.offset + first * run,
            nbytes=self.nbytes // step,
            run=run,
            step=step * run,
            scales=self._scales_of(lambda scales: scales.every(step, first)),
        )

    def rows(self, first: int, count: int) -> "TensorEntry":
        """Return the location of `count` rows."""
        if self.is_transposed:
            columns = replace(self, shape=self.shape[::-1], is_transposed=False)
            return columns.columns(first, count).transposed()
        row = self.nbytes // max(self.shape[0], 1)
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + first * row,
            nbytes=count * row,
            scales=self._scales_of(lambda scales: scales.rows(first, count)),
            first=self.first + first,
            whole_rows=self.whole_rows or self.shape[0],
        )

    def columns(self, first: int, count: int) -> "TensorEntry":
        """Return the location of `count` columns of a matrix."""
        rows, columns = self.shape
        element = self.nbytes // max(rows * columns, 1)
        return replace(
            self,
            shape=(rows, count),
            offset=self.offset + first * element,
            nbytes=rows * count * element,
            run=count * element,
            step=columns * element,
        )

    def _scales_of(self, part: "Callable[[TensorEntry], TensorEntry]") -> "TensorEntry | None":
        """Return the scales of a part, which are that part of the scales of a weight in mxfp4."""
        if self.scales is None or self.dtype != MXFP4:
            return self.scales
        return part(self.scales)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield offset and bytes of each run."""
        run = self.run or self.nbytes
        for index in range(self.nbytes // max(run, 1)):
            yield self.offset + index * self.step, run

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield offset and number of neighbouring runs, whose steps take up to `most` bytes."""
        count, together = self.nbytes // max(self.run, 1), max(1, most // self.step)
        for first in range(0, count, together):
            yield self.offset + first * self.step, min(together, count - first)
