"""Checks a server against its OpenAPI document, path by path.

schemathesis generates thousands of bodies. Its own parametrization generates them at collection
time, in every worker; here, the test that sends them does.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, settings

from mlx_paged.server.app import openapi

DOCUMENT = openapi()


def _paths() -> list[str]:
    """Selects one of the paths that are aliases, like ``/tokenize`` and ``/v1/tokenize``."""
    found: dict[str, str] = {}
    for path, methods in DOCUMENT["paths"].items():
        promises = {
            method: {k: v for k, v in operation.items() if k != "operationId"}
            for method, operation in methods.items()
        }
        found.setdefault(json.dumps(promises), path)
    return list(found.values())


PATHS = _paths()


def check_path(url: str, path: str, *, max_examples: int) -> None:
    """Checks for 5xx, undocumented statuses or types, and answers that violate their schema."""
    # A second of imports, for the few processes that run such a test. pyproject.toml keeps pytest
    # from loading schemathesis as a plugin in all.
    import requests
    import schemathesis
    from schemathesis.pytest.lazy import get_all_tests

    schema = schemathesis.openapi.from_dict(DOCUMENT)

    def test(case: Any) -> None:
        response = case.call(base_url=url, timeout=300, session=session)
        case.validate_response(
            response,
            excluded_checks=[
                # A valid body may have words that the tokenizer, model or context reject.
                schemathesis.checks.positive_data_acceptance,
                # Unknown fields are accepted on purpose.
                schemathesis.checks.negative_data_rejection,
                # API keys are disabled here.
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
        schema=schema.include(path=path), test_func=test, settings=few, given_kwargs={}
    )
    operations = [result.ok() for result in tests]
    assert len(operations) == len(DOCUMENT["paths"][path])
    with requests.Session() as session:
        session.trust_env = False  # It would look for proxies and passwords before every request.
        for _, run in operations:
            run()
