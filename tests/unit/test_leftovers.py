"""What tests start ends with them, even if they are killed and it has a session of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import VARIABLE, marked

# A test process whose child is a service; the service has a service as well.
TESTS = """
import os, subprocess, sys
from leftovers import VARIABLE, end_with_this_process

end_with_this_process()
end_with_this_process()
wait = "import time; print(flush=True); time.sleep(600)"
start = "subprocess.Popen([sys.executable, '-c', {0!r}], start_new_session=True)"
both = f"import subprocess, sys; {start.format(wait)}; {wait}"
service = subprocess.Popen([sys.executable, "-c", both], start_new_session=True)
print(os.environ[VARIABLE], flush=True)
service.wait()
"""


def wait_for_number(mark: str, expected: int) -> None:
    deadline = time.monotonic() + 20
    while len(marked(mark)) != expected:
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_services_of_ended_tests_end(number: signal.Signals) -> None:
    here = str(Path(__file__).parents[1] / "support")
    tests = subprocess.Popen(
        [sys.executable, "-c", TESTS],
        env={**os.environ, "PYTHONPATH": here, VARIABLE: "of an outer process"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert tests.stdout is not None
    lines = [tests.stdout.readline().strip() for _ in range(3)]  # of the tests and both services
    mark = f"{VARIABLE}={max(lines)}"
    wait_for_number(mark, 2)

    os.killpg(tests.pid, number)

    tests.wait()
    tests.stdout.close()
    wait_for_number(mark, 0)
