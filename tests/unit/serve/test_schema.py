"""Requests drawn from the OpenAPI document: no 5xx, and answers fit their schema."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance
from serving import Served, serving

CHECKS = [not_a_server_error, response_schema_conformance]
FEW, MANY = 5, 1000  # requests for each operation
ERROR = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--format", "chatml", "--max-answer", "4", "--waiting", "1000")
    with serving(*flags) as server:
        yield server


def check(case: Any) -> None:
    """Send a request, and check its answer, errors in the form of OpenAI's or Anthropic's."""
    answer = case.call(timeout=60)
    case.validate_response(answer, checks=CHECKS)
    if answer.status_code >= 400:
        is_messages = "/messages" in case.path
        assert set(answer.json()["error"]) == ({"type", "message"} if is_messages else ERROR)


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_operations_bear_any_request(served: Served, examples: int) -> None:
    schema, count = schemathesis.openapi.from_url(f"{served.url}/openapi.json", timeout=60), 0
    checks = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
    bounded = settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=checks
    )
    for operation in schema.get_all_operations():
        bounded(given(case=operation.ok().as_strategy())(check))()
        with served.http() as client:  # it may have been unloaded
            client.post("/v1/model/load", json={"name": "model"}).raise_for_status()
        count += 1

    assert count > 8
