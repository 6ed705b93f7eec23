"""A server with speculation: usage and metrics tell what was drafted."""

from __future__ import annotations

import pytest
from support.server_helpers import ENGINE, running

from mlx_paged.demo import model_path

BODY = {"prompt": "def add(a, b):\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
OPTIONS = {
    "suffix": {"method": "suffix", "adaptive": False},
    "draft_model": {"model": str(model_path()), "adaptive": False},
}


@pytest.mark.parametrize("method", list(OPTIONS))
def test_usage_and_metrics(method: str) -> None:
    with running(**ENGINE) as server, server.client() as client:
        plain = client.post("/v1/completions", json=BODY).json()
        assert "completion_tokens_details" not in plain["usage"]
        assert "spec_decode" not in client.get("/metrics").text
    with running(**ENGINE, speculative_config=OPTIONS[method]) as server, server.client() as client:
        accepted = num_drafts = 0
        for _ in range(2):  # The second answer is drafted from the first one.
            drafted = client.post("/v1/completions", json=BODY).json()
            assert drafted["choices"] == plain["choices"]
            details = drafted["usage"].get("completion_tokens_details", {})
            accepted += details.get("accepted_prediction_tokens", 0)
            num_drafts += details.get("accepted_prediction_tokens", 0)
            num_drafts += details.get("rejected_prediction_tokens", 0)
        assert accepted > 10
        metrics = {
            line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2])
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("vllm:spec_decode") and "per_pos" not in line
        }
        assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == accepted
        assert metrics["vllm:spec_decode_num_draft_tokens_total"] == num_drafts
        assert 0 < metrics["vllm:spec_decode_num_drafts_total"] <= num_drafts
        first = 'spec_decode_num_accepted_tokens_per_pos_total{engine="0"'
        assert first in client.get("/metrics").text
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            text = "".join(stream.iter_text())
        assert text.count("data: ") < 40, "accepted drafts come in one event"


def test_a_predicted_answer_is_drafted() -> None:
    chat = {
        "messages": [{"role": "user", "content": "Write add."}],
        "max_tokens": 40, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    options = {"method": "suffix", "adaptive": False, "suffix_decoding_max_cached_requests": 0}
    with running(**ENGINE, speculative_config=options) as server, server.client() as client:
        plain = client.post("/v1/chat/completions", json=chat).json()
        text = plain["choices"][0]["message"]["content"]
        parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        accepted = []
        for content in ("?", text, parts):
            asked = chat | {"prediction": {"type": "content", "content": content}}
            answer = client.post("/v1/chat/completions", json=asked).json()
            assert answer["choices"] == plain["choices"]
            details = answer["usage"].get("completion_tokens_details", {})
            accepted.append(details.get("accepted_prediction_tokens", 0))
        assert accepted[1] > accepted[0] + 10 and accepted[2] == accepted[1]
        for wrong in ("x", {"type": "content"}, {"type": "other", "content": "x"}):
            refused = client.post("/v1/chat/completions", json=chat | {"prediction": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith("prediction")
