"""Libraries that only some commands need, and how to install them."""

from importlib.metadata import requires

from exl2flow.core.installing import install

PROJECT = "exl2flow"
BRINGS = {"docket": "pydocket", "yaml": "pyyaml", "httpx": "prefect"}  # module → distribution
EXTRAS = ("convert", "prefect")


def how_to_install(module: str) -> str | None:
    """Return what to type where a module of an extra is missing; None: no extra brings it."""
    name = BRINGS.get(module, module)
    for extra in EXTRAS:
        wanted = requirements(extra)
        if any(requirement.startswith(name) for requirement in wanted):
            return f"`{module}` is missing, which the extra `{extra}` brings: `{install(wanted)}`"
    return None


def requirements(extra: str) -> list[str]:
    """Return what an extra asks pip for, `scipy>=1.15` and the like; without a name, the base."""
    wanted = f'extra == "{extra}"' if extra else ""
    pairs = (line.partition(";") for line in requires(PROJECT) or ())
    return sorted(name.strip() for name, _, marker in pairs if marker.strip() == wanted)
