"""What is refused by its headers, and what is the same request in another spelling."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from hosts import make_host, models_of

from exl2flow.inference import LoadedModel
from exl2flow.serve.hosts.keys import Keys
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.http.app import create_app
from exl2flow.serve.http.listening import own_address, url_of

PAGE, KEY = "http://app.example", "a-key"
Ask = Callable[..., Coroutine[Any, Any, httpx.Response]]


def asked(
    model: LoadedModel, *requests: dict[str, Any], key: str | None = None, **options: Any
) -> list[httpx.Response]:
    """Return the answers of a server in this process."""
    host = make_host(model, **options)
    app = create_app(models_of(host), Keys(own=key))

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [await client.request(**one) for one in requests]
        await host.close()
        return answers

    return asyncio.run(run())


SDK = (
    "authorization,content-type,x-stainless-os,x-stainless-retry-count,x-stainless-helper-method",
    "x-api-key,anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access",
    "openai-organization,openai-beta,openai-project,idempotency-key,x-title,http-referer",
)


def test_a_page_may_send_the_headers_that_it_asks_for(model: LoadedModel) -> None:
    requests = [
        {
            "method": "OPTIONS",
            "url": "/v1/chat/completions",
            "headers": {"origin": PAGE, "access-control-request-headers": names},
        }
        for names in (
            *SDK,
            " X-Upper ,a b,(c),,x-" + "y" * 90,
            ",".join(f"x-{i}" for i in range(999)),
        )
    ]

    answers = asked(model, *requests, origin=[PAGE])

    allowed = [{*a.headers["access-control-allow-headers"].split(", ")} for a in answers]
    for names, found in zip(SDK, allowed, strict=False):
        assert {*names.split(",")} <= found
    assert allowed[-2] - allowed[0] == {"x-upper"}
    assert len(allowed[-1]) < 100
    assert all(a.status_code == 204 for a in answers)
    assert all("access-control-request-headers" in a.headers["vary"] for a in answers)


def test_other_pages_are_refused(model: LoadedModel) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-headers": "x-a"}
    [answer] = asked(model, {"method": "OPTIONS", "url": "/v1/models", "headers": headers})

    assert answer.status_code == 403
    assert "access-control-allow-headers" not in answer.headers


PLACES = {
    "192.168.1.5:5000": True,
    "10.0.0.7": True,
    "[fd00::1]:5000": True,
    "localhost": True,
    "gpu.lan": False,
    "192.168.1.5.evil.example": False,
    "0x7f.1": False,
    "": False,
}


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("0.0.0.0", True), ("192.168.1.5", True), ("127.0.0.1", False), ("unix:/x", False)],
)
def test_an_address_is_ours_if_others_reach_it(
    model: LoadedModel, host: str, is_open: bool
) -> None:
    """A page can have its own name lead to this machine, but not an address."""
    requests = [{"method": "GET", "url": "/health", "headers": {"host": h}} for h in PLACES]

    statuses = [answer.status_code for answer in asked(model, *requests, key=KEY, host=host)]

    expected = [ours and (is_open or h == "localhost") for h, ours in PLACES.items()]
    assert statuses == [200 if ours else 403 for ours in expected]


SPELLINGS = ("/v1/models", "//v1/models", "/v1//models", "/v1/models/", "///v1///models//")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_spellings_of_a_path_are_one(model: LoadedModel, method: str) -> None:
    paths = (*SPELLINGS, "/health", "/v1/health/", "/", "/metrics", "/v1/status", "/openapi.json")
    url = "http://localhost"
    answers = asked(model, *({"method": method, "url": url + path} for path in paths))

    assert [answer.status_code for answer in answers] == [200] * len(paths)


def test_keys_hold_for_all_spellings(model: LoadedModel) -> None:
    requests = [
        {"method": m, "url": "http://localhost" + p} for m in ("GET", "HEAD") for p in SPELLINGS
    ]
    requests += [{"method": "GET", "url": "http://localhost//health/"}]

    statuses = [answer.status_code for answer in asked(model, *requests, key=KEY)]

    assert statuses == [401] * 2 * len(SPELLINGS) + [200]


def test_what_only_posts_is_no_head(model: LoadedModel) -> None:
    answers = asked(
        model,
        {"method": "HEAD", "url": "/v1/completions"},
        {"method": "HEAD", "url": "/v1/nothing"},
        {"method": "POST", "url": "/v1/completions/", "json": {"prompt": "a", "max_tokens": 0}},
    )

    assert [answer.status_code for answer in answers] == [405, 404, 400]


@pytest.mark.parametrize(
    "sent", [{}, {"json": {}}, {"data": {}}, {"headers": {"content-type": "text/plain"}}], ids=str
)
def test_a_model_is_unloaded_without_a_body(model: LoadedModel, sent: dict[str, Any]) -> None:
    paths = ("/v1/model/unload", "/model/unload")
    answers = asked(model, *({"method": "POST", "url": path, **sent} for path in paths))

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["state"] == "unloaded"


def test_a_body_that_is_needed_has_a_type(model: LoadedModel) -> None:
    answers = asked(
        model,
        {"method": "POST", "url": "/v1/completions"},
        {"method": "POST", "url": "/v1/model/unload", "content": b"x=1"},
    )

    assert [answer.status_code for answer in answers] == [415, 415]


def test_a_defect_is_counted_and_has_the_headers_of_answers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Models, "folders", property(defect))

    defective, metrics = asked(
        model,
        {"method": "GET", "url": "/v1/model/list", "headers": {"origin": PAGE}},
        {"method": "GET", "url": "/metrics"},
        origin=[PAGE],
    )

    assert defective.status_code == 500
    assert defective.headers["x-request-id"] in defective.text
    assert defective.headers["access-control-allow-origin"] == PAGE
    assert "secret" not in defective.text
    series = f'exl2flow_http_requests_total{{code="500",model_name="{model.spec.source_dir.name}",'
    assert f'{series}path="/model/list"}} 1.0' in metrics.text


def test_addresses_for_other_machines_are_shown() -> None:
    assert url_of("::1", 5000) == "http://[::1]:5000/v1"
    assert url_of("10.0.0.7", 5000) == "http://10.0.0.7:5000/v1"
    assert own_address("10.0.0.7") is None
    assert own_address("0.0.0.0") != "0.0.0.0"
