"""Take the picture of `docs/how-to/serve.md`: the page of a server, with an example conversation.

    PYTHONPATH=tests/support .venv/bin/python docs/images/serve_page.py     # half a minute

The server runs the demo model, which cannot write such an answer: the conversation is put into the
browser's storage. It needs Debian's `chromium`.
"""

import json
from pathlib import Path

from browser import browser, program
from serving import serving

PICTURE = Path(__file__).with_name("serve-page.png")
ANSWER = """A generator function with `yield` does it:

```python
def squares(count: int):
    for number in range(count):
        yield number * number
```

1. Calling it runs **nothing** yet.
2. Each `next()` runs up to the next `yield`.

| call | value |
|---|--:|
| first | 0 |
| third | 4 |
"""
QUESTIONS = ["How do I write an iterator in Python?", "Which ferries go to Wenlow?"]


def conversations() -> list[dict[str, object]]:
    """Return what the browser holds: the first one is open."""
    return [
        {
            "id": f"example{index}",
            "title": question,
            "changed": -index,
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": ANSWER, "reasoning": "An iterator in Python."},
            ],
        }
        for index, question in enumerate(QUESTIONS)
    ]


def main() -> None:
    """Write the picture beside this file."""
    chromium = program()
    if chromium is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    rows = json.dumps({f"exl2flow/conversation/{c['id']}": json.dumps(c) for c in conversations()})
    with serving("--format", "chatml") as server, browser(chromium, server.url) as opened:
        opened.page.set_viewport_size({"width": 1180, "height": 720})
        opened.page.add_init_script(f"Object.assign(localStorage, {rows})")
        page = opened.open("/#example0", "ready", "third")
        page.locator("#temperature[placeholder]").wait_for()
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
