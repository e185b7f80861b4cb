"""The bodies of commands: they import torch on top, so commands import them when they run."""
