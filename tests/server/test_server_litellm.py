"""litellm's own mapping of errors: an overlong prompt falls back to a model of longer context.

litellm holds huggingface_hub and filelock a major version behind what users get, and takes 300 MB,
so it is no part of the extra `dev`: pip install 'mlx-paged[litellm]'.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_helpers import RunningServer, running

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
litellm = pytest.importorskip("litellm", reason="pip install 'mlx-paged[litellm]'")

PROMPT = "a number " * 200


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(max_model_len=128) as server:
        yield server


def asked(server: RunningServer, **change: Any) -> dict[str, Any]:
    return {"model": "openai/mlx-paged-demo", "api_base": f"{server.url}/v1", "api_key": "none",
            "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4,
            **change}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500},
        {"messages": [{"role": "user", "content": PROMPT * 100}]},
        {"stream": True},
    ],
    ids=["prompt", "answer", "characters", "stream"],
)
def test_an_overlong_request_is_litellms_context_window_error(server, change) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(server, **change), max_retries=0)


def test_any_other_wrong_request_is_not(server) -> None:
    with pytest.raises(litellm.BadRequestError) as error:
        litellm.completion(**asked(server, temperature=-1), max_retries=0)
    assert not isinstance(error.value, litellm.ContextWindowExceededError)


def test_context_window_fallbacks(server) -> None:
    with running(max_model_len=1024) as other:
        models = [
            {"model_name": name, "litellm_params": {
                "model": "openai/mlx-paged-demo", "api_base": f"{each.url}/v1", "api_key": "none"}}
            for name, each in (("short", server), ("long", other))
        ]  # fmt: skip
        router = litellm.Router(
            models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0
        )
        answer = router.completion("short", asked(server)["messages"], max_tokens=4)
        assert answer.usage.prompt_tokens > 128
