"""The program that renders one chat template, run as a process of its own by `chat_template`.

Templates come from strangers. Jinja's sandbox keeps them from the machine, but not from taking all
of its memory or time (`{{ 'a' * 10**13 }}`), and no check of operators finds every filter that
can. So they run in a child that the kernel limits. Starting it takes 0.1 s once for a template; a
conversation takes some 50 µs more than without it. It imports nothing of exl2flow, hence no torch.

A request is a line of JSON, and so is its answer. First comes `{"template": text}`, answered by
`{"mentioned": names}` of the variables that the template reads; then any number of
`{"variables": …, "now": …}`, answered by `{"text": …}`. Instead there may be an `{"error": …}`. It
ends when its input does, or when the kernel ends it.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # of processor time for a request
MEMORY = 512 << 20  # bytes of address space, of which Python and Jinja take 50 MB
LONGEST_TEXT = 1 << 24  # characters of a rendered conversation
LONGEST_REASON = 400  # characters of an error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant says; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers gives to templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    return sandbox


def _to_json(value: object, **options: Any) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def rendered(template: jinja2.Template, variables: dict[str, Any], now: str) -> str:
    """Return the text of a conversation.

    Raises:
        OverflowError: it is too long.
        ValueError: it holds what is not Unicode.
    """
    moment = datetime.fromisoformat(now)
    text = template.render(strftime_now=moment.strftime, **variables)
    if len(text) > LONGEST_TEXT:
        raise OverflowError(f"its text has {len(text)} characters, the limit is {LONGEST_TEXT}")
    text.encode()
    return text


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, unless a stricter one is set already."""
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


def answered(
    line: bytes, template: jinja2.Template | None
) -> tuple[jinja2.Template | None, dict[str, Any]]:
    """Return the template and the answer to a request: the first one compiles the template."""
    answer: dict[str, Any] = {}
    try:
        request = json.loads(line)
        if template is None:
            sandbox = environment()
            names = meta.find_undeclared_variables(sandbox.parse(request["template"]))
            template = sandbox.from_string(request["template"])
            answer["mentioned"] = sorted(names - {"strftime_now"})
        else:
            answer["text"] = rendered(template, request["variables"], request["now"])
    except MemoryError:
        answer |= {"error": f"it takes more than {MEMORY >> 20} MiB of memory", "is_limit": True}
    except Exception as error:  # whatever a stranger's code raises
        answer["error"] = (str(error) or type(error).__name__)[:LONGEST_REASON]
        answer["is_limit"] = isinstance(error, OverflowError)
    return template, answer


def main() -> None:
    """Answer requests until the input ends."""
    limit(resource.RLIMIT_AS, MEMORY)
    limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    template: jinja2.Template | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        template, answer = answered(line, template)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
