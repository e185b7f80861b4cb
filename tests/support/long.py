"""Which test modules take long: `python tests/support/long.py JUNIT.xml` writes `tests/long.txt`.

    make test ARGS="-o junit_family=xunit1 --junitxml=junit.xml"

writes such a file. `make quick` leaves these modules out; a new one is quick until it is measured.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parents[1] / "long.txt"
SECONDS = 1.2  # of a module, on a machine that does nothing else


def main() -> None:
    seconds = Counter[str]()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        seconds[str(case.get("file"))] += float(str(case.get("time")))
    long = sorted(file for file, taken in seconds.items() if taken > SECONDS)
    LIST.write_text("".join(f"{file}\n" for file in long if file.startswith("tests/")))


if __name__ == "__main__":
    main()
