"""The program that compiles strangers' grammars first, run as a process of its own by `trial`.

It imports nothing of exl2flow, hence no torch. The first line of standard input is a vocabulary,
each further one a grammar, which gets an answer; one that takes too much ends the process.
"""

import json
import resource
import signal
import sys

import llguidance

SECONDS = 5.0  # of processor time, for one grammar
VOCABULARY_SECONDS = 60.0
MEMORY = 1 << 30  # bytes of address space, beyond what the vocabulary takes


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless a lower one holds."""
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


def size() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    """Answer requests until the input ends."""
    limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.setitimer(signal.ITIMER_PROF, VOCABULARY_SECONDS)
    given = json.loads(sys.stdin.buffer.readline())
    known = llguidance.LLTokenizer(
        given["tokenizer"], n_vocab=given["ids"], eos_token=given["eos"] or None
    )
    limit(resource.RLIMIT_AS, size() + MEMORY)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        matcher = llguidance.LLMatcher(known, line.decode(), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error() if matcher.is_error() else ""
        sys.stdout.buffer.write(json.dumps(error).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
