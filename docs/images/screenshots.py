"""Take the pictures of `docs/how-to/watch-a-run.md`: pages of Prefect's UI with runs of the demo.

    PYTHONPATH=tests python docs/images/screenshots.py     # about ten minutes on two cores

It starts a server of its own, as `exl2flow server up` does, and ends it. It needs Debian's
`chromium`.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from browser import Browser, browser, program
from prefect_runs import artifacts, run_state
from servers import FINAL, LastingServer, wait_for

FOLDER = Path(__file__).parent
DEMO = FOLDER.parents[1] / "demo" / "model"
MODEL = "demo-llama"  # what it is called in the pictures
WIDTH = 1280
MOST_SECONDS = 1200.0  # of a run
LITTLE_WORK = {
    "source": MODEL,
    "device": "cpu",
    "calibration": {"rows": 16, "row_tokens": 256, "measure_rows": 4, "measure_row_tokens": 256},
}


@contextmanager
def running_server(folder: Path) -> Iterator[LastingServer]:
    """Run a server whose runs start in the folder, with one worker."""
    server = LastingServer(home=folder / "home", folder=folder)
    try:
        server.up()
        with server.used():
            yield server
    finally:
        server.call("down")


class Camera:
    """Photographs pages of the UI."""

    def __init__(self, opened: Browser) -> None:
        self.opened = opened

    def take(self, name: str, path: str, *texts: str, height: int, tab: str = "") -> None:
        """Save `ui-name.png` of a page, when all the texts are to be seen on it."""
        self.opened.page.set_viewport_size({"width": WIDTH, "height": height})
        page = self.opened.open(path, *([] if tab else texts))
        if tab:
            page.get_by_text(tab, exact=True).first.click()
            for text in texts:
                page.get_by_text(text).filter(visible=True).first.wait_for()
        self.opened.picture_sizes()
        page.wait_for_timeout(2000)  # the graph and lists move to their places
        page.screenshot(path=FOLDER / f"ui-{name}.png")


def page_of(run: UUID, key: str) -> str:
    """Return the path of an artifact's page."""
    return f"/artifacts/artifact/{artifacts(run)[f'{MODEL}-{key}'].id}"


def is_under_way(run: UUID, stage: str) -> bool:
    """Tell whether a stage has moved far enough to know how long it will take."""
    found = artifacts(run).get(f"{MODEL}-{stage}")
    return found is not None and "remaining" in str(found.description)


def completed(run: UUID) -> None:
    """Return when a run ended well."""
    wait_for(lambda: run_state(run) in FINAL, MOST_SECONDS)
    assert run_state(run) == "Completed"


def main() -> None:
    """Write all pictures beside this file."""
    chromium = program()
    if chromium is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "models"
        shutil.copytree(DEMO, folder / MODEL)
        with (
            running_server(folder) as server,
            browser(chromium, server.api_url.removesuffix("/api")) as opened,
        ):
            password = f"localStorage.setItem('prefect-password', btoa('{server.auth}'))"
            opened.page.add_init_script(password)  # as the login page does
            photograph(server, Camera(opened))


def photograph(server: LastingServer, camera: Camera) -> None:
    """Run a sweep and a conversion, and take pictures while and when they run."""
    several = {"out": "sweep", "bpw": [2.5, 3, 4, 6], "quality": "fast"}
    swept = server.submit("sweep/sweep", {**LITTLE_WORK, **several})
    completed(swept)
    converted = server.submit("convert/convert", {**LITTLE_WORK, "out": "3.5bpw", "bpw": 3.5})
    wait_for(lambda: is_under_way(converted, "quantize"), MOST_SECONDS)
    camera.take(
        "run",
        f"/runs/flow-run/{converted}",
        f"{MODEL}-bit-allocation",
        "remaining",
        tab="Artifacts",
        height=1200,
    )
    camera.take("runs", "/runs", f"{MODEL}@3.5bpw", height=1000)
    completed(converted)
    camera.take("allocation", page_of(converted, "bit-allocation"), "down_proj", height=760)
    camera.take("errors", page_of(converted, "errors"), "lm_head", height=1180)
    camera.take("sweep", page_of(swept, "comparison"), "What 3.0bpw writes", height=1100)
    with server.client() as client:
        form = client.read_deployment_by_name("sweep/sweep").id
    camera.take("form", f"/deployments/deployment/{form}/run", "bits per weight", height=1100)


if __name__ == "__main__":
    main()
