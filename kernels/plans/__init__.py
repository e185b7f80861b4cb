"""Division of matrix products among CTAs and warps."""
