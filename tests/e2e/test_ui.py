"""What somebody sees of a sweep who has only Prefect's UI: its pages in a real browser."""

from collections.abc import Iterator, Mapping
from functools import partial
from uuid import UUID

import pytest
from browser import Browser, browser, program
from prefect.client.orchestration import get_client
from prefect.utilities.callables import parameter_schema
from prefect_runs import Swept, artifacts, task_states

from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows import sweep

TALL = (1280, 2400)  # what lies below the window is not there yet
NAME = "tiny@3,4,6bpw"
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def run(swept: Swept) -> UUID:
    task_states(swept.run)  # pages show what has reached the database
    return swept.run


@pytest.fixture(scope="module")
def ui(prefect_env: Mapping[str, str]) -> Iterator[Browser]:
    found = program()
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    url = prefect_env["PREFECT_API_URL"].removesuffix("/api")
    with browser(found, url, size=TALL) as opened:
        yield opened


@pytest.fixture
def deployment(swept: Swept) -> Iterator[UUID]:
    given = swept.config.model_dump(mode="json", include={"source", "out", "bpw"})
    with get_client(sync_client=True) as client:
        found = client.read_flow_by_name("sweep")
        made = client.create_deployment(
            found.id,
            name="form",
            parameters={"config": given},
            parameter_openapi_schema=parameter_schema(sweep).model_dump(),
        )
        yield made
        client.delete_deployment(made)


@pytest.fixture(scope="module")
def pages(run: UUID) -> dict[str, str]:
    """Key of an artifact → the path of its page."""
    return {key: f"/artifacts/artifact/{found.id}" for key, found in artifacts(run).items()}


def test_list_of_runs_shows_name_and_tags(run: UUID, ui: Browser) -> None:
    page = ui.open("/runs", NAME, "Completed")

    for tag in ("tiny", "3bpw", "4bpw", "6bpw", "threads"):
        page.get_by_text(tag, exact=True).filter(visible=True).first.wait_for()


def test_page_of_a_run_leads_to_its_artifacts(run: UUID, ui: Browser) -> None:
    page = ui.open(f"/runs/flow-run/{run}", NAME, "Completed", "Artifacts")

    page.get_by_text("Artifacts", exact=True).first.click()

    for key in ("tiny-comparison", "tiny-bitrates", "tiny-3-0bpw-errors", "tiny-6-0bpw-report"):
        page.get_by_text(key, exact=True).first.wait_for()


@pytest.mark.slow
def test_progress_tells_steps_and_time(pages: dict[str, str], ui: Browser) -> None:
    steps = "5 of 5 · elapsed 0:00:"

    ui.open(pages["tiny-3-0bpw-quantize"], "tiny-3-0bpw-quantize", steps, "100%")


@pytest.mark.slow
def test_bits_of_every_matrix_are_a_table(pages: dict[str, str], ui: Browser) -> None:
    page = ui.open(pages["tiny-3-0bpw-bit-allocation"], "bits per weight in the layers")

    row = page.locator("tr").filter(has_text="1.mlp.down_proj")
    assert 2 <= float(row.locator("td").nth(2).inner_text()) <= 8


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        slow("tiny-3-0bpw-errors", ("estimated KL divergence", "measured cost", "lm_head")),
        slow("tiny-6-0bpw-report", ("Passed", "perplexity", "Sample", "One morning")),
        ("tiny-comparison", ("3.0bpw", "KL divergence falls", "Sample of 6.0bpw")),
    ],
)
def test_pages_show_their_words_and_their_plot(
    key: str, texts: tuple[str, ...], pages: dict[str, str], ui: Browser
) -> None:
    ui.open(pages[key], *texts)

    [(width, height)] = ui.picture_sizes()
    assert min(width, height) > 200


def test_form_of_a_deployment_describes_the_options(deployment: UUID, ui: Browser) -> None:
    fields = SweepConfig.model_fields
    descriptions = [str(fields[name].description) for name in ("bpw", "runner", "quality")]

    page = ui.open(f"/deployments/deployment/{deployment}/run", *descriptions)

    assert page.get_by_role("textbox").filter(visible=True).count() > 2


@pytest.mark.slow
def test_first_ui_opens_and_the_second_shows_the_run_as_well(run: UUID, ui: Browser) -> None:
    page = ui.open("/", "Dashboard", "Switch to V2 UI")
    assert page.url == f"{ui.url}/dashboard"

    ui.open("/v2/runs", NAME, "Switch to V1 UI")
    ui.open(f"/v2/runs/flow-run/{run}", NAME, "Completed")


def test_pages_ask_no_host_but_the_server(ui: Browser) -> None:
    """Those of the second UI try to, and the policy of the server's answers forbids it."""
    ui.open("/v2/dashboard", "Dashboard").wait_for_load_state("networkidle")

    assert ui.asked == []


def test_none_of_these_pages_complained(ui: Browser) -> None:
    assert ui.problems == []
