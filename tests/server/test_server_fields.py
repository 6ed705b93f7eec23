"""No field is ignored in silence: what is known is honoured or refused, what is not is logged."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from support.server_helpers import RunningServer, events, running

import mlx_paged
from mlx_paged.server import conversions, tool_requests
from mlx_paged.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from mlx_paged.server.errors import ApiError
from mlx_paged.server.request_fields import HINTS, REFUSED, WORKS
from mlx_paged.server.responses_api import body as response_body
from mlx_paged.server.responses_api.body import InputTokensBody, ResponseBody

SERVER = Path(mlx_paged.__file__).parent / "server"
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}
# They ask for nothing: there are no tools to call in parallel, and one cache.
NO_MEANING = {"parallel_tool_calls", "store", "client_metadata", "personality"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatBody),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
        (response_create_params.ResponseCreateParamsStreaming, ResponseBody),
        (input_token_count_params.InputTokenCountParams, InputTokensBody),
    ],
    ids=["chat", "completion", "response", "input tokens"],
)
def test_every_parameter_of_the_sdk_is_known(asked, body) -> None:
    assert typing.get_type_hints(asked).keys() <= body.model_fields.keys()


@pytest.mark.parametrize(
    "body",
    [ChatBody, CompletionBody, ResponseBody, InputTokensBody, TokenizeBody, DetokenizeBody],
)
def test_every_known_field_is_looked_at(body) -> None:
    below = "responses_api" if body in (ResponseBody, InputTokensBody) else "."
    code = "".join(
        path.read_text() for path in (*SERVER.glob("*.py"), *(SERVER / below).glob("*.py"))
    )
    refused = {*CompletionBody.refused, *(row.name for row in REFUSED)}
    assert refused <= ChatBody.model_fields.keys()
    named = {"stream_options", *tool_requests.GUIDED}  # by methods
    if body is CompletionBody:
        named |= {"tool_choice", "function_call"}  # only what asks for nothing
    named.add("verbosity")  # (one value, or with other names)
    passed_on = conversions._SAMPLING if issubclass(body, GenerationBody) else set()
    hints = NO_MEANING | {row.name for row in HINTS}
    for name in body.model_fields.keys() - refused - named - hints - passed_on:
        assert f"body.{name}" in code or f'"{name}"' in code, name


# vLLM's fields of 2026-11; those of OpenAI are read from its SDK.
VLLM_ALL = """
    model frequency_penalty logit_bias presence_penalty seed stop stream stream_options temperature
    top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_special_tokens structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval response_format logprobs max_tokens n
"""
VLLM = {
    "chat": VLLM_ALL
    + """
        messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    "completion": VLLM_ALL + " prompt suffix prompt_embeds",
    "response": """
        background include input instructions max_output_tokens max_tool_calls metadata model
        logit_bias parallel_tool_calls previous_response_id prompt reasoning service_tier store
        stream temperature text tool_choice tools top_logprobs top_p top_k truncation user
        skip_special_tokens include_stop_str_in_output prompt_cache_key request_id
        mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
        previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs
    """,
}
OPENAI: dict[str, Any] = {
    "chat": chat_create_params.CompletionCreateParamsStreaming,
    "completion": completion_create_params.CompletionCreateParamsStreaming,
    "response": response_create_params.ResponseCreateParamsStreaming,
}
BODIES: dict[str, Any] = {"chat": ChatBody, "completion": CompletionBody, "response": ResponseBody}


@pytest.mark.parametrize("api", BODIES)
def test_the_table_of_fields_is_complete_and_true(api) -> None:
    body = BODIES[api]
    hints, refused = {row.name for row in HINTS}, {row.name for row in REFUSED}
    works = {*WORKS["all"].split(), *WORKS[api].split()}
    if api == "response":  # (with fields of its own)
        refused |= {name for name, _, _ in response_body._ONLY}
        works -= refused
    refused |= set(body.refused)
    assert works | hints | refused <= body.model_fields.keys()
    assert not works & hints and not works & refused and not hints & refused
    known = works | hints | refused | NO_MEANING
    # It has one value only, which a test below gives.
    known |= {"completion": {"suffix", "tool_choice", "function_call", "verbosity"},
              "response": {"max_tool_calls", "background"}}.get(api, set())  # fmt: skip
    assert typing.get_type_hints(OPENAI[api]).keys() <= known
    assert set(VLLM[api].split()) <= known


# (field, a value that asks for something).
ASKING: list[tuple[str, Any]] = [
    *(
        (row.name, {"a": 1}) for row in REFUSED if ChatBody.model_fields[row.name].annotation is Any
    ),
    ("modalities", ["text", "audio"]), ("use_beam_search", True), ("length_penalty", 1.5),
    ("guided_decoding_backend", "outlines"), ("watermarking", True), ("web_search_options", {}),
    ("routed_experts_prompt_start", 1), ("return_prompt_text", True),
]  # fmt: skip
assert {name for name, _ in ASKING} == {row.name for row in REFUSED}


@pytest.mark.parametrize("path", PATHS)
def test_what_there_is_not_is_refused_by_name(client, path) -> None:
    for name, value in ASKING:
        response = client.post(path, json={**PATHS[path], "max_tokens": 1, name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name), response.text
        assert error["code"] == "unsupported_parameter" and name in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_nothing_special_is_taken(client, path) -> None:
    harmless = {
        "tools": [], "tool_choice": "auto", "functions": [], "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "service_tier": "auto", "use_beam_search": False,
        "length_penalty": 1, "verbosity": "medium", "web_search_options": None,
        "watermarking": False, "mm_processor_kwargs": {}, "routed_experts_prompt_start": 0,
        "include_reasoning": True, "parallel_tool_calls": True, "prompt_cache_key": "k",
        "function_call": "none", "max_completion_tokens": 1,
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    for body in (harmless, dict.fromkeys(harmless), {**harmless, "store": True}):
        response = client.post(path, json={**PATHS[path], "max_tokens": 1, **body})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PATHS)
def test_hints_change_no_answer(client, path) -> None:
    hints = {
        "service_tier": "flex", "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h", "session_id": "s", "return_token_offsets": True,
        "return_mm_kwargs": False,
    }  # fmt: skip
    assert hints.keys() == {row.name for row in HINTS}
    body = {**PATHS[path], "max_tokens": 8, "temperature": 0}
    plain, hinted = (client.post(path, json=asked).json() for asked in (body, {**body, **hints}))
    assert plain["choices"] == hinted["choices"]


@pytest.mark.parametrize("path", PATHS)
def test_prompts_are_cut_on_either_side(client, path) -> None:
    def prompt(**asked: Any) -> list[int]:
        body = {**PATHS[path], "max_tokens": 1, "return_token_ids": True, **asked}
        if path == "/v1/completions":
            body["prompt"] = "def is_even(n: int) -> bool:"
        answer = client.post(path, json=body).json()
        found: list[int] = (
            answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        )
        return found

    whole = prompt()
    assert len(whole) > 5 and prompt(truncation_side="right") == whole
    for side in (None, "left"):
        assert prompt(truncate_prompt_tokens=5, truncation_side=side) == whole[-5:]
    assert prompt(truncate_prompt_tokens=5, truncation_side="right") == whole[:5]


def test_listed_tokens_are_the_alternatives(client) -> None:
    listed = [300, 7, 11]
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True,
            "logprob_token_ids": listed, "return_tokens_as_token_ids": True}  # fmt: skip
    choice = client.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"][0]
    found = choice["logprobs"]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert list(top) == list(dict.fromkeys([token, *(f"token_id:{i}" for i in listed)]))
    chat = {**PATHS["/v1/chat/completions"], **body, "logprobs": True}
    del chat["prompt"]
    for asked in (chat, {**chat, "stream": True}):
        answer = client.post("/v1/chat/completions", json=asked)
        choices = events(answer) if "stream" in asked else [answer.json()]
        entries = [
            entry
            for chunk in choices
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert len(entries) == 2
        for entry in entries:
            tops = entry["top_logprobs"]
            assert [top["token"] for top in tops] == [f"token_id:{i}" for i in listed]
    for wrong in ({**body}, {**body, "logprobs": 1, "logprob_token_ids": [10**6]}):
        error = client.post("/v1/completions", json=wrong).json()["error"]
        assert error["param"] == "logprob_token_ids"


def test_a_request_may_ask_for_longer_chunks(client) -> None:
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stream": True, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    found = events(client.post("/v1/completions", json={**body, "stream_interval": 4}))
    sizes = [len(e["choices"][0]["token_ids"]) for e in found]
    # (A busy machine sends more at once, in the first one too.)
    assert sum(sizes) == 9 and len(sizes) <= 3 and all(size >= 4 for size in sizes[1:-1])


def test_reasoning_of_a_chat_is_another_form_of_other_fields() -> None:
    base = PATHS["/v1/chat/completions"]

    def kwargs(**asked: Any) -> dict[str, Any]:
        body = ChatBody.model_validate({**base, **asked})
        return dict(conversions.conversation_of(body).template_kwargs)

    high = {"reasoning_effort": "high", "enable_thinking": True}
    assert kwargs(reasoning={"effort": "high"}) == kwargs(reasoning_effort="high") == high
    assert kwargs(reasoning={"effort": "none"})["enable_thinking"] is False
    assert kwargs(reasoning={"enabled": False}) == {"enable_thinking": False}
    given = {"enable_thinking": False}  # the client's word counts
    assert not kwargs(reasoning_effort="high", chat_template_kwargs=given)["enable_thinking"]
    body = ChatBody.model_validate({**base, "reasoning": {"max_tokens": 5, "exclude": True}})
    assert body.thinking_token_budget == 5 and body.include_reasoning is False
    with pytest.raises(ApiError) as refused:
        kwargs(reasoning={"effort": "high"}, reasoning_effort="low")
    assert refused.value.param == "reasoning.effort"


@pytest.mark.parametrize("path", PATHS)
def test_both_names_of_a_limit_mean_the_same(client, path) -> None:
    for limits in (
        {"max_tokens": 3, "max_completion_tokens": 3}, {"max_completion_tokens": 3},
        {"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": None},
    ):  # fmt: skip
        body = {**PATHS[path], "ignore_eos": True, **limits}
        usage = client.post(path, json=body).json()["usage"]
        assert usage["completion_tokens"] == 3, limits
    body = {**PATHS[path], "max_tokens": 3, "max_completion_tokens": 4}
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == "max_completion_tokens" and "max_tokens" in error["message"]


def test_no_alternatives_need_no_logprobs(client) -> None:
    body = {**PATHS["/v1/chat/completions"], "max_tokens": 1, "top_logprobs": 0}
    for asked in (body, {**body, "logprobs": False}):
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None


def test_hints_reach_the_template() -> None:
    body = ChatBody.model_validate(
        {**PATHS["/v1/chat/completions"], "verbosity": "low", "reasoning_effort": "high",
         "chat_template_kwargs": {"verbosity": "low", "x": 1}}
    )  # fmt: skip
    kwargs = conversions.conversation_of(body).template_kwargs
    assert kwargs == {
        "verbosity": "low", "reasoning_effort": "high", "enable_thinking": True, "x": 1,
    }  # fmt: skip


def test_a_plain_completion_has_no_template_for_a_hint(client) -> None:
    error = client.post("/v1/completions", json={"prompt": "x", "verbosity": "low"}).json()["error"]
    assert error["param"] == "verbosity"


def test_special_tokens_are_shown_without_spaces_or_not_at_all(client, server) -> None:
    [special] = server.engine.engine.tokenizer.encode("<|im_start|>")
    asked = {"prompt": "x", "allowed_token_ids": [special], "max_tokens": 2,
             "skip_special_tokens": False}  # fmt: skip
    for spaces in (None, False):
        body = {**asked, "spaces_between_special_tokens": spaces}
        told = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert told == "<|im_start|>" * 2
    refused = client.post("/v1/completions", json={**asked, "spaces_between_special_tokens": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "spaces_between_special_tokens"


@pytest.mark.parametrize("path", PATHS)
def test_continuous_usage_needs_nothing_else(client, path) -> None:
    body = {**PATHS[path], "max_tokens": 5, "ignore_eos": True, "stream": True, "temperature": 0,
            "stream_options": {"continuous_usage_stats": True}}  # fmt: skip
    found = events(client.post(path, json=body))
    assert [e["usage"]["completion_tokens"] for e in found][-1] == 5
    assert all(e["choices"] for e in found)  # no chunk of usage alone: that is include_usage


def test_fields_of_messages_mean_nothing_to_a_prompt(client) -> None:
    for name, value in (
        ("add_generation_prompt", True), ("continue_final_message", False),
        ("chat_template_kwargs", {"a": 1}), ("chat_template", "x"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ):  # fmt: skip
        response = client.post("/tokenize", json={"prompt": "x", name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
