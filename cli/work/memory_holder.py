"""A process that holds memory of a GPU until its standard input ends, so that less of it is left.

    python -m exl2flow.cli.work.memory_holder BYTES

BYTES: that are left. Prints a line when it holds the rest.
"""

import sys

import torch


def main() -> None:
    """Hold the memory."""
    left = int(sys.argv[1])
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda")
    print(held.numel(), flush=True)  # for the process that started this one
    sys.stdin.read()


if __name__ == "__main__":
    main()
