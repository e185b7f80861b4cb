"""Compiles grammars with llguidance; as a program, it does so for strangers' grammars.

The program imports nothing of exl2flow, hence no torch. Standard input is a socket that brings a
socket for each request: the first one is for the vocabulary, each further one for a grammar, which
gets a process of its own (a fork, so that it has the vocabulary). One that takes too much ends that
process only.
"""

import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

VOCABULARY_SECONDS = 60  # of processor time
MEMORY = 1 << 30  # bytes of address space, beyond what the vocabulary takes
MASK_STACK = 1 << 20  # bytes: half of what llguidance's own threads have
UNLIMITED_STACK = 2 << 20  # bytes that glibc gives a thread without a limit
STEP_ITEMS = 5_000  # of the parser, for one mask; ordinary schemas need some hundreds
SCHEMA = re.compile("\0([0-9]+)\0")  # in a Lark grammar: where one of its schemas stands
Source = dict[str, Any]


def matcher(known: Any, rules: str) -> Any:
    """Return the state of an empty text; its `is_error` tells whether the rules compile."""
    limits = llguidance.LLParserLimits(step_max_items=STEP_ITEMS)
    return llguidance.LLMatcher(known, rules, log_level=0, limits=limits)


def settled(source: Source, name: str = "text") -> tuple[list[dict[str, Any]], list[str]]:
    """Return a source as grammars that llguidance reads, the first of a name, and warnings.

    source: `kind` (`json_schema`, `regex`, `lark`, `gbnf`) and `text`; for `schemas` and `inner`
    see `GrammarFilter`.

    Raises:
        ValueError: it is broken.
    """
    kind, text, warnings = source["kind"], source["text"], list[str]()
    match kind:
        case "json_schema":
            grammars = [{"name": name, "json_schema": json.loads(text)}]
        case "regex":
            rule = f"start: /{llguidance.regex_to_lark(text, '')}/"
            grammars = [{"name": name, "lark_grammar": rule}]
        case _:
            text = _lark(text) if kind == "gbnf" else text
            chosen = [_chosen(each, warnings) for each in source.get("schemas", ())]
            text = SCHEMA.sub(lambda found: chosen[int(found[1])], text) if chosen else text
            grammars = [{"name": name, "lark_grammar": text}]
    if source.get("inner"):
        more, warned = settled(source["inner"], "inner")
        return [*grammars, *more], [*warnings, *warned]
    return grammars, warnings


def wrong_with(grammars: list[dict[str, Any]]) -> str:
    """Return why llguidance cannot read grammars, without a vocabulary; empty: it can."""
    return str(llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": grammars})))


def _lark(text: str) -> str:
    try:
        return str(any_to_lark(text))
    except Exception as error:  # its own kinds
        raise ValueError(f"the `grammar` is neither Lark nor GBNF: {error}") from error


def _chosen(alternatives: list[tuple[str, str]], warnings: list[str]) -> str:
    """Return the first schema that llguidance can do, and note the warning that goes with it."""
    reason = ""
    for schema, warning in alternatives:
        wrong = wrong_with([{"name": "text", "json_schema": json.loads(schema)}])
        if not wrong:
            if warning:
                warnings.append(warning.replace("\0", reason))
            return f"%json {schema}"
        reason = " ".join(wrong.split())
    raise ValueError(reason)


def _limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless a lower one holds."""
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _size() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _in_thread(stack: int, work: Any) -> None:
    """Do work on a stack of some bytes."""
    threading.stack_size(stack)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _verdict(known: Any, source: Source) -> dict[str, Any]:
    """Return what is wrong with a source, else its grammars, on less stack than the server has."""
    found: dict[str, Any] = {}
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = UNLIMITED_STACK if stack == resource.RLIM_INFINITY else stack

    def compile_() -> None:
        try:
            grammars, warnings = settled(source)
        except (ValueError, TypeError, RecursionError) as error:
            found["wrong"] = str(error)
            return
        state = matcher(known, json.dumps({"grammars": grammars}))
        wrong = state.get_error() if state.is_error() else ""
        found.update(wrong=wrong, warnings=warnings, grammars=grammars, state=state)

    def mask() -> None:
        found["state"].compute_bitmask()
        if found["state"].is_error():
            found["wrong"] = found["state"].get_error()

    _in_thread(max(stack // 2, MASK_STACK), compile_)
    if not found["wrong"]:
        _in_thread(MASK_STACK, mask)
    found.pop("state", None)
    return found


def _received(channel: socket.socket) -> Any:
    """Return the JSON that a socket brings until its end."""
    with channel.makefile("rb") as file:
        return json.loads(file.read())


def _answer(channel: socket.socket, known: Any) -> None:
    """Try the grammar that a socket brings, in a process that may end here."""
    channel.sendall(f"{os.getpid()}\n".encode())
    given = _received(channel)
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # its signal ends the process
    _limit(resource.RLIMIT_AS, _size() + MEMORY)
    channel.sendall(json.dumps(_verdict(known, given["source"])).encode())


def _vocabulary(channel: socket.socket) -> Any:
    """Read the vocabulary that a socket brings, and tell what is wrong with it, if anything."""
    signal.setitimer(signal.ITIMER_PROF, VOCABULARY_SECONDS)
    given, wrong, known = _received(channel), "", None
    try:
        known = llguidance.LLTokenizer(
            given["tokenizer"], n_vocab=given["ids"], eos_token=given["eos"] or None
        )
    except ValueError as error:
        wrong = f"llguidance cannot read the tokenizer: {error}"
    channel.sendall(json.dumps(wrong).encode())
    signal.setitimer(signal.ITIMER_PROF, 0)
    return known


def main() -> None:
    """Answer requests until the server ends."""
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    known, control = None, socket.socket(fileno=os.dup(sys.stdin.fileno()))
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as channel:
            if known is None:
                known = _vocabulary(channel)
            elif os.fork() == 0:
                control.close()
                _answer(channel, known)
                return


if __name__ == "__main__":
    main()
