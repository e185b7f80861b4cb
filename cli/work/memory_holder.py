"""A process that holds memory of a GPU until its standard input ends, so that less of it is left.

    python -m exl2flow.cli.work.memory_holder BYTES DEVICE

BYTES: that are left of DEVICE. Prints a line when it holds the rest.
"""

import sys

import torch


def main() -> None:
    """Hold the memory."""
    left, device = int(sys.argv[1]), torch.device(sys.argv[2])
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(max(0, free - left), dtype=torch.uint8, device=device)
    print(held.numel(), flush=True)  # for the process that started this one
    sys.stdin.read()


if __name__ == "__main__":
    main()
