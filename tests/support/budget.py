"""Run a command within processor time: `python tests/support/budget.py MINUTES COMMAND …`.

Its wall time depends on what else the machine does; the processor time of it and of all its
children, which have ended, hardly does.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    most, begun = 60 * float(arguments[0]), time.monotonic()
    code = subprocess.run(arguments[1:]).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    wall = time.monotonic() - begun
    print(f"{seconds / 60:.1f} minutes of processor time, {wall / 60:.1f} of wall time", flush=True)
    if code == 0 and seconds > most:
        print(f"that is more than {most / 60:g}: make the slowest tests above quicker")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
