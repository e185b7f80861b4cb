"""The model's own log probabilities: of its logits, before any step of the sampler."""

from typing import NamedTuple

import torch

from exl2flow.kernels.reference.sampler import rank

ROWS = 32  # ranked at a time; their keys take several times the memory of the logits


class OwnProbabilities(NamedTuple):
    """Log probabilities, fp64 (n,), of given ids; the likeliest ids, int64 (n, k), and theirs."""

    logs: torch.Tensor
    top_ids: torch.Tensor
    top_logs: torch.Tensor

    def to_host(self) -> "OwnProbabilities":
        """Begin to copy all to the host."""
        return OwnProbabilities(*(x.to("cpu", non_blocking=True) for x in self))

    @classmethod
    def joined(cls, parts: "list[OwnProbabilities]") -> "OwnProbabilities":
        """Return the rows of all parts, of which there is at least one."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def own_probabilities(
    logits: torch.Tensor, ids: torch.Tensor, *, top: int, vocab_size: int
) -> OwnProbabilities:
    """Return the log-softmax of logits fp32 (n, width) at ids int64 (n,) and at the likeliest ids.

    There is at least one row. Ids that the logits lack have -infinity. Of equally likely ids the
    lowest comes first, and ids from `vocab_size` on are not among the `top` likeliest.
    """
    spans = (slice(begin, begin + ROWS) for begin in range(0, len(ids), ROWS))
    return OwnProbabilities.joined(
        [_of_rows(logits[span], ids[span], top, vocab_size) for span in spans]
    )


def _of_rows(
    logits: torch.Tensor, ids: torch.Tensor, top: int, vocab_size: int
) -> OwnProbabilities:
    sums = logits.logsumexp(-1, keepdim=True).double()
    chosen = logits.gather(1, ids.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    chosen = chosen.masked_fill(ids >= logits.shape[1], -torch.inf)
    top_ids, ordered = ids.new_empty(len(ids), 0), logits[:, :0]
    if top:
        top_ids, ordered = rank(logits[:, :vocab_size], top)
    return OwnProbabilities(chosen.double() - sums[:, 0], top_ids, ordered.double() - sums)
