"""How values are written for people."""


def printable(text: str) -> str:
    """Replace what could move the cursor or command the terminal; models may generate anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def size(count: float) -> str:
    """Return bytes for people: decimal kB, MB or GB."""
    for unit, width in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= width:
            return f"{count / width:.2f} {unit}"
    return f"{count:.0f} B"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number, or a dash for one that is unknown."""
    return "–" if value is None else f"{value:.{digits}f}"


def brief(value: float | None) -> str:
    """Return the first two digits of a number that may be very small, or a dash."""
    return "–" if value is None else f"{value:#.2g}"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share of 1 in percent, or a dash for one that is unknown."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def short(text: str) -> str:
    """Return a text with sublayers and matrices named without what all names have in common."""
    return text.replace("model.layers.", "")
