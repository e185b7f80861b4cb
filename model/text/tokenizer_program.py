"""The program that tries one `tokenizer.json`, run as a process of its own by `tokenizer_trial`.

It imports nothing of exl2flow, hence no torch. The file comes through standard input. The process
ends with 0 unless the Rust library ends it: any other error comes back when the file is used.
"""

import resource
import signal
import sys
from contextlib import suppress

import tokenizers

SECONDS = 20.0  # of processor time; a vocabulary of 265,000 tokens takes 1.4
MEMORY = 1 << 30  # bytes of address space; such a vocabulary takes 0.4 GiB
TEXT = "A text <s> with 3.14,  two spaces,\n\ta tab, 你好, café and 🙂👩‍👩‍👧\r\n" + "x" * 300


def use(data: bytes) -> None:
    """Open a tokenizer, encode a text and decode it; raises what the library raises."""
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    for special in (True, False):
        backend.encode_special_tokens = not special
        for text in ("", TEXT):
            ids = backend.encode(text, add_special_tokens=False).ids
            backend.decode(ids, skip_special_tokens=not special)


def main() -> None:
    """Try the file, under limits that also hold for the library's own threads."""
    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    with suppress(BaseException):  # panics of the library are no `Exception`
        use(sys.stdin.buffer.read())


if __name__ == "__main__":
    main()
