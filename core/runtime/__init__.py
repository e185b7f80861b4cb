"""The running process: signals, background threads, device locks, memory, progress."""
