"""The scale refit: the part of the torch twin that chooses a group's scales again.

See `docs/concepts/quality.md`, section 4.
"""

import torch

from exl2flow.kernels.interface.groups import (
    PANEL_ROWS,
    SCALE_LEVELS,
    BegunGroups,
    Scales,
    by_factor,
)
from exl2flow.kernels.streams import device_cache, sent

REFIT_MAXIMA = 31  # maxima tried around the current one
REFIT_SPAN = 0.15  # their reach, relative to it
STRENGTHS = 2  # fractions of the wanted change of scales to try: 1, 1/2, ...
LEAST_CURVATURE = 1e-30
LEAST_UNIT = 1e-12


def decode_scales(codes: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
    """Return the scales fp16 (g, n) a decoder uses for codes (g, n) and maxima fp16 (g,).

    They are RN16((code + 1)² · RN16(max / 256)).
    """
    unit = (max_scales.float() / SCALE_LEVELS**2).half().float()
    return ((codes.float() + 1).square() * unit[..., None]).half()


def times_output(x: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
    """Return x O for x (r, m) and O fp32 (blocks, b, b); None: the identity."""
    if output is None:
        return x
    blocks, b, _ = output.shape
    wide = torch.bmm(x.view(-1, blocks, b).transpose(0, 1), output)
    return wide.transpose(0, 1).reshape(x.shape)


def times_hessian(hessian: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return H x for x (r, m) and H fp32 (r, r), or (f, r, r) by the columns' factors."""
    if hessian.ndim == 2:
        return hessian @ x
    product = torch.bmm(hessian, by_factor(x, len(hessian)))
    return product.transpose(0, 1).reshape(x.shape)


def refit_scales(
    steps: torch.Tensor,
    gradient: torch.Tensor,
    hessian: torch.Tensor,
    begun: BegunGroups,
    scales: Scales,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move scales towards the optimum of tr(O Eᵀ H E) as long as each matrix's share falls.

    Args:
        steps: fp32 (r, m), signed codes of `j` matrices side by side, from the groups' start.
        gradient: fp32 (r, m), H E of these rows.
        hessian: fp32 (r, r), their diagonal block of H; or (f, r, r), see `Ops`.
        begun: the groups, the longest of r rows.
        scales: of the r / 32 panels; overwritten.
        output: fp32 (blocks, b, b), O; None: the identity.

    Returns:
        The change of the rows' values, fp32 (r, m).
    """
    (r, m), rows = steps.shape, begun.rows
    j = len(rows)
    n = m // j
    steps = begun.only(steps)
    before = scales.decoded[0].clone()  # (j, n)
    pushed = times_output(gradient, output)
    curvature = (times_hessian(hessian, steps) * steps).sum(dim=0)
    if output is not None:
        curvature *= output.diagonal(dim1=1, dim2=2).flatten()
    slope = (pushed * steps).sum(dim=0)
    wanted = (-slope / curvature.clamp(min=LEAST_CURVATURE) * (curvature > 0)).view(j, n)
    panels = torch.arange(r // PANEL_ROWS, device=steps.device)[:, None] < rows // PANEL_ROWS
    is_open = rows > 0
    for attempt in range(STRENGTHS):
        target = before + wanted * 0.5**attempt
        codes, maxima = nearest_scales(scales.maxima[0], target, curvature.view(j, n))
        decoded = decode_scales(codes, maxima).float()
        change = steps * (decoded - before).view(-1)  # (r, m)
        moved = times_hessian(hessian, times_output(change, output))
        rise = ((moved + 2 * pushed) * change).view(r, j, n).sum(dim=(0, 2))
        taken = is_open & (rise < 0)
        is_open = is_open & ~taken
        is_new = (taken & panels)[:, :, None]
        scales.decoded.copy_(torch.where(is_new, decoded, scales.decoded))
        scales.codes[0] = torch.where(taken[:, None], codes, scales.codes[0])
        scales.maxima[0] = torch.where(taken, maxima, scales.maxima[0])
    return steps * (scales.decoded[0] - before).view(-1)


@device_cache
def maxima_multiples(device: torch.device) -> torch.Tensor:
    """Return the multiples of a maximum to try, fp32 (REFIT_MAXIMA,)."""
    return sent(1 + torch.linspace(-REFIT_SPAN, REFIT_SPAN, REFIT_MAXIMA), device)


def nearest_scales(
    present: torch.Tensor, wanted: torch.Tensor, curvature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes uint8 (j, n) and maxima fp16 (j,) whose scales are nearest `wanted`.

    Args:
        present: current maxima fp16 (j,).
        wanted: scales fp32 (j, n).
        curvature: fp32 (j, n), weight of each column's squared error.
    """
    multiples = maxima_multiples(wanted.device)
    maxima = (present[:, None].float() * multiples).half()  # (j, REFIT_MAXIMA)
    unit = (maxima.float() / SCALE_LEVELS**2).half().float().clamp(min=LEAST_UNIT)
    root = (wanted.clamp(min=0)[:, None] / unit[:, :, None]).sqrt().floor()
    levels = torch.stack([root, root + 1]).clamp(1, SCALE_LEVELS)  # (2, j, REFIT_MAXIMA, n)
    codes = (levels - 1).to(torch.uint8)
    scales = decode_scales(codes, maxima.expand(2, *maxima.shape)).float()
    miss, chosen = (scales - wanted[:, None]).abs().min(dim=0)  # (j, REFIT_MAXIMA, n)
    best = (miss.square() * curvature[:, None]).sum(dim=2).argmin(dim=1)
    place = best[:, None, None].expand(-1, 1, wanted.shape[1])
    nearest = torch.where(chosen == 0, codes[0], codes[1]).gather(1, place)[:, 0]
    return nearest, maxima.gather(1, best[:, None])[:, 0]
