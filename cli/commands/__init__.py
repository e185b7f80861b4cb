"""The commands: a file each, which holds the signature, its help and its examples."""
