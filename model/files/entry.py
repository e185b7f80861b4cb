"""Location of a tensor, or of part of one, in a safetensors file."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path


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

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield offset and bytes of each run."""
        run = self.run or self.nbytes
        for index in range(self.nbytes // max(run, 1)):
            yield self.offset + index * self.step, run
