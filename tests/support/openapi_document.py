"""What the OpenAPI document promises, asked of a server path by path.

schemathesis makes thousands of bodies of it. Its own parametrization makes them while tests are
collected, in every worker; here they are made by the test that sends them.
"""

from __future__ import annotations

import json
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.pytest.lazy import get_all_tests

from mlx_paged.server.app import openapi

DOCUMENT = openapi()


def _paths() -> list[str]:
    """One path of those that only differ in name, like ``/tokenize`` and ``/v1/tokenize``."""
    found: dict[str, str] = {}
    for path, methods in DOCUMENT["paths"].items():
        promises = {
            method: {k: v for k, v in operation.items() if k != "operationId"}
            for method, operation in methods.items()
        }
        found.setdefault(json.dumps(promises), path)
    return list(found.values())


PATHS = _paths()
_SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)


def check_path(url: str, path: str, *, max_examples: int) -> None:
    """No 5xx, no undocumented status or type, no answer that breaks its schema."""

    def test(case: Any) -> None:
        response = case.call(base_url=url, timeout=300, session=session)
        case.validate_response(
            response,
            excluded_checks=[
                # A valid body may have words that the tokenizer, model or context refuse.
                schemathesis.checks.positive_data_acceptance,
                # Fields nobody knows are accepted on purpose.
                schemathesis.checks.negative_data_rejection,
                # Keys are off here.
                schemathesis.checks.ignored_auth,
            ],
        )

    few = settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    tests = get_all_tests(
        schema=_SCHEMA.include(path=path), test_func=test, settings=few, given_kwargs={}
    )
    operations = [result.ok() for result in tests]
    assert len(operations) == len(DOCUMENT["paths"][path])
    with requests.Session() as session:
        for _, run in operations:
            run()
