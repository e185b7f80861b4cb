"""Kernels behind one interface: a torch implementation that is the specification."""

from exl2flow.kernels.ops import Group, Ops, get_ops, resolve_device

__all__ = ["Group", "Ops", "get_ops", "resolve_device"]
