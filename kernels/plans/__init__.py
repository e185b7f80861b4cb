"""How the work of a matrix product is divided among CTAs and warps."""
