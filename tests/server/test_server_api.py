"""The API: every parameter, both endpoints, streamed and whole; errors name the field."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server_helpers import RunningServer, events, running, validate

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.server import responses
from mlx_paged.server.bodies import Message, Unsupported
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.conversions import template_message

FIBONACCI = [{"role": "user", "content": "Return the n-th Fibonacci number"}]
PROMPT = "def is_even(n: int) -> bool:\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(
        served_model_names=("demo", "other/name"),
        model="./models/demo",
        trust_request_chat_template=True,
    )
    with running(config, max_model_len=512) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The offline engine: what answers must be."""
    return LLM(block_size=8, num_gpu_blocks_override=400)


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    body = {"messages": FIBONACCI, "max_tokens": 24, "temperature": 0, **body}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    validate(responses.ChatAnswer, response.json())
    return response.json()


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    validate(responses.CompletionAnswer, response.json())
    return response.json()


def stream(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": 24, "stream": True, **body}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    kind = responses.ChatChunk if "chat" in path else responses.CompletionAnswer
    for event in found:
        validate(kind, event)
    return found


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    validate(responses.ErrorAnswer, response.json())
    return response.json()["error"]


# Whole answers.


def test_a_chat_is_what_the_offline_engine_says(client, llm) -> None:
    [expected] = llm.chat(FIBONACCI, SamplingParams(max_tokens=200, temperature=0))
    body = chat(client, max_tokens=200)
    [choice] = body["choices"]
    assert choice["message"]["content"] == expected.outputs[0].text
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids)
    assert body["id"].startswith("chatcmpl-") and body["model"] == "demo"


def test_a_completion_is_what_the_offline_engine_says(client, llm) -> None:
    [expected] = llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0))
    assert complete(client, max_tokens=30)["choices"][0]["text"] == expected.outputs[0].text


def test_prompts_of_every_form(client, llm) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    text = complete(client)["choices"][0]["text"]
    assert complete(client, prompt=ids)["choices"][0]["text"] == text
    for prompts in ([PROMPT, "x = "], [ids, llm.tokenizer.encode("x = ")]):
        body = complete(client, prompt=prompts, n=2, temperature=0)
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        texts = [c["text"] for c in body["choices"]]
        assert texts[0] == texts[1] == text and texts[2] == texts[3] != text


def test_content_parts_are_joined(client) -> None:
    parts = [{"type": "text", "text": "Return the n-th"}, {"type": "text", "text": "number"}]
    joined = chat(client, messages=[{"role": "user", "content": "Return the n-th\nnumber"}])
    split = chat(client, messages=[{"role": "user", "content": parts}])
    assert split["choices"] == joined["choices"]


def test_cached_tokens_are_told(client) -> None:
    chat(client)
    usage = chat(client)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.parametrize("length", [31, 63])
def test_tokens_that_fill_no_block_are_cached_too(client, llm, length: int) -> None:
    ids = llm.tokenizer.encode("tail = 1\n" * 40)[:length]
    cached = [
        complete(client, prompt=ids, max_tokens=1, cache_salt=f"tail {length}")["usage"]
        for _ in range(2)
    ]
    told = [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached]
    assert told == [0, length - 1]


def test_cache_salt_separates(client) -> None:
    chat(client, cache_salt="a")
    again = chat(client, cache_salt="b")["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again == 0


def test_seed_repeats_and_n_differs(client) -> None:
    one = chat(client, temperature=5, seed=7, n=4)["choices"]
    two = chat(client, temperature=5, seed=7, n=4)["choices"]
    assert [c["message"] for c in one] == [c["message"] for c in two]
    assert len({c["message"]["content"] for c in one}) > 1


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client, key) -> None:
    body = chat(client, **{"max_tokens": None, key: 5})
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"


def test_stop_strings_and_tokens(client, llm) -> None:
    plain = chat(client, max_tokens=60)["choices"][0]["message"]["content"]
    stop = plain[20:24]
    cut = chat(client, max_tokens=60, stop=stop)["choices"][0]
    assert cut["message"]["content"] == plain[: plain.index(stop)]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    kept = chat(client, max_tokens=60, stop=[stop], include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"].endswith(stop)
    ids = chat(client, max_tokens=60, return_token_ids=True)["choices"][0]["token_ids"]
    ended = chat(client, max_tokens=60, stop_token_ids=[ids[5]])["choices"][0]
    assert ended["stop_reason"] == ids[5]
    late = chat(
        client, max_tokens=60, stop_token_ids=[ids[5]], min_tokens=20, return_token_ids=True
    )
    assert len(late["choices"][0]["token_ids"]) >= 20


def test_the_parameters_of_sampling_arrive(client, llm) -> None:
    """Each against the offline engine, with the same seed."""
    ids = llm.tokenizer.encode(PROMPT)
    for given in (
        {"temperature": 0.9, "top_k": 3},
        {"temperature": 0.9, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": {"300": 100}},
        {"allowed_token_ids": [300, 301, 302]},
        {"bad_words": [" n"]},
        {"ignore_eos": True},
    ):
        params = {"temperature": 0, "max_tokens": 12, "seed": 3, **given}
        asked = complete(client, prompt=ids, return_token_ids=True, **params)
        if "logit_bias" in given:
            params["logit_bias"] = {300: 100}
        [expected] = llm.generate(ids, SamplingParams(**params))
        assert asked["choices"][0]["token_ids"] == expected.outputs[0].token_ids, given


def test_logprobs_of_a_chat(client) -> None:
    body = chat(client, logprobs=True, top_logprobs=3, return_token_ids=True)
    [choice] = body["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert "".join(e["token"] for e in content) == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) >= 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert chat(client)["choices"][0]["logprobs"] is None
    named = chat(client, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    first = named["choices"][0]
    assert first["logprobs"]["content"][0]["token"] == f"token_id:{first['token_ids'][0]}"
    assert first["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_echo_and_prompt_logprobs_of_a_completion(client, llm) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    [choice] = complete(client, logprobs=2, echo=True, max_tokens=4)["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) > len(PROMPT)
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert choice["text"][offset:].startswith(token)
    [scored] = complete(client, logprobs=0, echo=True, max_tokens=0)["choices"]
    assert scored["text"] == PROMPT
    assert scored["logprobs"]["token_logprobs"] == told["token_logprobs"][: len(ids)]
    [whole] = complete(client, prompt_logprobs=1)["choices"]
    assert whole["prompt_logprobs"][0] is None
    scores = [r[str(t)]["logprob"] for r, t in zip(whole["prompt_logprobs"][1:], ids[1:])]
    assert scores == pytest.approx(told["token_logprobs"][1 : len(ids)], abs=1e-4)


def test_best_of_returns_the_likeliest(client, llm) -> None:
    asked = {"temperature": 1.2, "seed": 5, "max_tokens": 10}
    [best] = complete(client, best_of=6, **asked)["choices"]
    [output] = llm.generate(PROMPT, SamplingParams(n=6, logprobs=0, **asked))

    def mean(answer: Any) -> float:
        return answer.cumulative_logprob / len(answer.token_ids)

    assert best["text"] == max(output.outputs, key=mean).text
    assert best["logprobs"] is None
    assert complete(client, best_of=6, **asked)["usage"]["completion_tokens"] == sum(
        len(answer.token_ids) for answer in output.outputs
    )


def test_special_tokens_are_skipped_or_shown(client, llm) -> None:
    [special] = llm.tokenizer.encode("<|im_start|>")
    asked = {"allowed_token_ids": [special], "max_tokens": 2}
    for skip, text in ((None, ""), (True, ""), (False, "<|im_start|>" * 2)):
        body = complete(client, skip_special_tokens=skip, **asked)
        assert body["choices"][0]["text"] == text
        assert body["usage"]["completion_tokens"] == 2


def test_templates(client) -> None:
    plain = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    asked = {"chat_template": plain, "chat_template_kwargs": {"mark": "\n"}, "max_tokens": 8}
    by_template = chat(client, messages=[{"role": "user", "content": PROMPT.strip()}], **asked)
    text = complete(client, max_tokens=8)["choices"][0]["text"]
    assert by_template["choices"][0]["message"]["content"] == text


def test_an_answer_is_continued(client) -> None:
    begun = [*FIBONACCI, {"role": "assistant", "content": "def fib"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    body = chat(client, messages=begun, **options)
    echoed = chat(client, messages=begun, echo=True, **options)
    text = body["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == "def fib" + text
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    raised = client.post("/v1/chat/completions", json=both)
    assert error(raised, 400)["param"] == "continue_final_message"


def test_a_template_is_given_the_names_of_messages() -> None:
    named = Message(role="user", content="hello", name="Ann")
    assert template_message(named, 0) == {"role": "user", "content": "hello", "name": "Ann"}
    assert "name" not in template_message(Message(role="user", content="hello"), 0)


def test_truncation_keeps_the_end(client) -> None:
    ids = list(range(100, 160))
    cut = complete(client, prompt=ids, truncate_prompt_tokens=7, return_token_ids=True)
    assert cut["usage"]["prompt_tokens"] == 7
    assert cut["choices"][0]["prompt_token_ids"] == ids[-7:]
    for room in (1, 40):
        asked = {"truncate_prompt_tokens": -1, "max_tokens": room, "ignore_eos": True}
        long = complete(client, prompt=[100] * 600, **asked)
        assert long["usage"]["prompt_tokens"] == 512 - room
        assert long["usage"]["completion_tokens"] == room
    assert complete(client, prompt=ids, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 60
    # A chat without a limit has a quarter of the context for its answer.
    words = [{"role": "user", "content": "word " * 900}]
    asked = {"max_tokens": None, "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = chat(client, messages=words, **asked)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (384, 128)


# Streams.


def test_a_streamed_chat_is_the_whole_one(client) -> None:
    whole = chat(client, n=2, temperature=1, seed=3, logprobs=True, top_logprobs=1)
    found = stream(
        client, "/v1/chat/completions", messages=FIBONACCI, n=2, temperature=1, seed=3,
        logprobs=True, top_logprobs=1, stream_options={"include_usage": True},
    )  # fmt: skip
    assert [e["choices"][0]["delta"]["role"] for e in found[:2]] == ["assistant"] * 2
    *parts, last = found
    assert last["choices"] == [] and all(e["usage"] is None for e in parts)
    # (What is cached depends on who came first.)
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [c for e in parts for c in e["choices"] if c["index"] == choice["index"]]
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"
        entries = [e for c in mine for e in (c["logprobs"] or {"content": ()})["content"]]
        assert [e["token"] for e in entries] == [e["token"] for e in choice["logprobs"]["content"]]
    assert len({e["id"] for e in found}) == 1


def test_a_streamed_completion_is_the_whole_one(client) -> None:
    asked = {"prompt": [PROMPT, "x"], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 9}
    whole = complete(client, **asked)
    found = stream(client, "/v1/completions", **asked)
    for choice in whole["choices"]:
        mine = [c for e in found for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key in ("tokens", "text_offset"):
            joined = [x for c in mine if c["logprobs"] for x in c["logprobs"][key]]
            assert joined == choice["logprobs"][key]


def test_continuous_usage(client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(
        client,
        "/v1/chat/completions",
        messages=FIBONACCI,
        stream_options=options,
        return_token_ids=True,
    )
    # An event has several tokens where the server was slower than the engine.
    counts = [e["usage"]["completion_tokens"] for e in found]
    pieces = [c.get("token_ids") or [] for e in found for c in e["choices"]]
    assert counts[:-1] == list(accumulate(map(len, pieces)))
    assert counts[0] == 0 and counts[-1] == counts[-2] == 24


def test_no_character_is_split_and_no_stop_string_leaks(client, llm) -> None:
    # Only tokens of single bytes: every character beyond ASCII takes several of them.
    tokens = {t: i for t, i in llm.tokenizer.get_vocab().items() if len(t) == 1}
    asked = {"temperature": 3, "seed": 1, "max_tokens": 120, "ignore_eos": True,
             "allowed_token_ids": [tokens[t] for t in "ÃÂ©¨ðŁİĢab" if t in tokens]}  # fmt: skip
    whole = complete(client, **asked)["choices"][0]["text"]
    assert any(ord(c) > 127 for c in whole)
    found = stream(client, "/v1/completions", prompt=PROMPT, **asked)
    assert "".join(c["text"] for e in found for c in e["choices"]) == whole
    plain = complete(client, max_tokens=30)["choices"][0]["text"]
    stop = plain[10:16]
    found = stream(client, "/v1/completions", prompt=PROMPT, max_tokens=30, stop=[stop])
    pieces = [c["text"] for e in found for c in e["choices"]]
    assert "".join(pieces) == plain[: plain.index(stop)]


def test_stream_interval() -> None:
    with running(ServerConfig(stream_interval=8)) as server, server.client() as client:
        found = stream(client, "/v1/completions", prompt=PROMPT, max_tokens=17, ignore_eos=True)
        # The first token, then 8 and 8; fewer where the server was slower than the engine.
        assert 1 <= len(found) <= 3
        whole = complete(client, max_tokens=17, ignore_eos=True)["choices"][0]["text"]
        assert "".join(e["choices"][0]["text"] for e in found) == whole


# Errors.

BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 257}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1 << 30]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"seed": 1 << 70}, "seed"),
    ({"min_tokens": 50, "max_tokens": 3}, "min_tokens"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"priority": 3}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"metadata": {"k": "v" * 600}}, "metadata.k"),
    ({"user": 5}, "user"),
    ({"request_id": "a b"}, "request_id"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -5}, "truncate_prompt_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ({"guided_choice": []}, "guided_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"verbosity": 1}, "verbosity"),
    ({"watermarking": True}, "watermarking"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"model": 7}, "model"),
]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CHAT_BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning_effort"),
    ({"documents": [], "chat_template_kwargs": {"documents": [1]}}, "documents"),
    ({"verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}, "verbosity"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template": "{{ raise_exception('no') }}"}, "messages"),
    ({"chat_template": "{% if %}"}, "messages"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
]  # fmt: skip
COMPLETION_BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1] * 600}, "prompt"),
    ({"prompt": "a" * 200_000}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 100}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        *(("/v1/chat/completions", *case) for case in BAD + CHAT_BAD),
        *(("/v1/completions", *case) for case in BAD + COMPLETION_BAD),
    ],
)
def test_a_bad_field_is_named(client, path, change, param) -> None:
    base = {"messages": FIBONACCI} if "chat" in path else {"prompt": PROMPT}
    found = error(client.post(path, json={**base, "max_tokens": 2, **change}), 400)
    assert found["type"] == "invalid_request_error"
    assert (found["param"] or "").startswith(param), found
    assert len(found["message"]) < 500


def test_numbers_of_an_overflow(client) -> None:
    found = error(client.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 20}), 400)
    assert found["code"] == "context_length_exceeded"
    assert found["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 "
        "in the prompt, 20 in the completion). Please reduce the length of the prompt or "
        "completion."
    )
    text = error(client.post("/v1/completions", json={"prompt": "a " * 60_000}), 400)
    assert text["code"] == "context_length_exceeded" and text["param"] == "prompt"
    assert text["message"].startswith("This model's maximum context length is 512 tokens. However,")


def test_the_context_is_what_the_pool_can_serve(caplog) -> None:
    """Ten blocks of eight tokens; the last token of an answer needs no slot."""
    caplog.set_level("INFO", "mlx_paged.server")
    with running(num_gpu_blocks_override=11, max_num_seqs=4) as server, server.client() as client:
        found = error(
            client.post("/v1/completions", json={"prompt": [5] * 90, "max_tokens": 20}), 400
        )
        assert "KV cache" in found["message"] and "110" in found["message"]
        assert found["message"].startswith("This model's maximum context length is 81 tokens.")
        [model] = client.get("/v1/models").json()["data"]
        assert model["max_model_len"] == 81
        assert client.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"] == 81
        for length, status in ((81, 200), (82, 400)):
            body = {"prompt": [5] * 40, "max_tokens": length - 40, "ignore_eos": True}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
    assert "KV cache size: 80 tokens" in caplog.messages
    assert "Maximum concurrency for 81 tokens per request: 1.00x" in caplog.messages
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "at most 81 tokens, not 4,096" in warning


def test_a_pool_that_is_large_enough_is_no_reason_to_warn(caplog) -> None:
    caplog.set_level("INFO", "mlx_paged.server")
    options = {"num_gpu_blocks_override": 101, "max_model_len": 161, "max_step_time_ms": 70}
    with running(**options) as server, server.client() as client:
        [model] = client.get("/v1/models").json()["data"]
        assert model["max_model_len"] == 161
    assert "KV cache size: 800 tokens" in caplog.messages
    assert "Steps with prompts: at most about 70 ms (--max-step-time-ms)" in caplog.messages
    assert "Maximum concurrency for 161 tokens per request: 5.00x" in caplog.messages
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


NO_BODY = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{'a': 1}", b"[" * 100_000,
           b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']  # fmt: skip


@pytest.mark.parametrize("body", NO_BODY)
def test_what_is_no_body(client, body) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        found = client.post(path, content=body, headers={"content-type": "application/json"})
        error(found, 400)


def test_other_types_and_methods_and_paths(client) -> None:
    error(client.post("/v1/completions", data={"prompt": "x"}), 415)
    error(client.get("/v1/completions"), 405)
    error(client.post("/v1/models", json={}), 405)
    error(client.get("/v2"), 404)
    error(client.get("/v1/models/none"), 404)
    for path in ("/v1/completions", "/v1/chat/completions"):
        base = {"messages": FIBONACCI} if "chat" in path else {"prompt": PROMPT}
        found = error(client.post(path, json={**base, "model": "gpt-9"}), 404)
        assert found["code"] == "model_not_found" and found["param"] == "model"


def test_unknown_fields_are_taken_or_refused(client, caplog) -> None:
    assert complete(client, nobody_knows_this=1)
    assert "nobody_knows_this" in caplog.text
    with running(ServerConfig(strict_requests=True)) as server, server.client() as strict:
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert strict.post("/v1/completions", json=body).status_code == 200
        found = error(strict.post("/v1/completions", json={**body, "nobody": 1}), 400)
        assert found["param"] == "nobody"
        options = {"stream": True, "stream_options": {"x": 1}}
        found = error(strict.post("/v1/completions", json={**body, **options}), 400)
        assert found["param"] == "stream_options.x"


def test_templates_of_requests_need_trust() -> None:
    with running() as server, server.client() as client:
        body = {"messages": FIBONACCI, "chat_template": "x"}
        found = error(client.post("/v1/chat/completions", json=body), 400)
        assert found["param"] == "chat_template"


def test_priority_where_it_is_heeded() -> None:
    config = ServerConfig(priority_scheduling=True)
    with running(config, policy="priority") as server, server.client() as client:
        assert complete(client, priority=-3)["usage"]["completion_tokens"] == 12


# The rest of the API.


def test_models(client) -> None:
    listed = client.get("/v1/models").json()
    validate(responses.ModelList, listed)
    assert [m["id"] for m in listed["data"]] == ["demo", "other/name"]
    assert client.get("/v1/models/other/name").json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == 512
    assert listed["data"][0]["input_modalities"] == ["text"]
    assert complete(client, model="other/name")["model"] == "other/name"
    # Clients that know no name give "default", or what they gave to `serve`.
    for name in ("default", "./models/demo", str(Path("models/demo").resolve())):
        assert complete(client, model=name)["model"] == "demo"
    assert client.get("/v1/models/default").json() == listed["data"][0]
    error(client.get("/v1/models/demo2"), 404)


def test_paths_without_their_prefix(client, server) -> None:
    """Base URLs of clients often lack /v1."""
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/models/other/name").json()["id"] == "other/name"
    for path, body in (
        ("/chat/completions", {"messages": FIBONACCI, "max_tokens": 2}),
        ("/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("/responses", {"input": "a", "max_output_tokens": 2}),
        ("/messages", {"messages": FIBONACCI, "max_tokens": 2}),
        ("/messages/count_tokens", {"messages": FIBONACCI}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    error(client.get("/v1x/models"), 404)
    error(client.get("/model"), 404)
    assert 'path="/models"' not in client.get("/metrics").text


def test_tokenize_and_back(client, llm) -> None:
    found = client.post("/tokenize", json={"prompt": "def f(x):", "return_token_strs": True}).json()
    validate(responses.Tokens, found)
    assert found["tokens"] == llm.tokenizer.encode("def f(x):")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": "def f(x):"}
    chat_tokens = client.post("/tokenize", json={"messages": FIBONACCI}).json()["tokens"]
    assert chat_tokens == llm.render_chats(FIBONACCI)[0]
    error(client.post("/tokenize", json={}), 400)
    error(client.post("/detokenize", json={"tokens": [1 << 20]}), 400)


def test_health_version_and_info(client) -> None:
    for path in ("/health", "/live", "/ready"):
        assert client.get(path).json() == {"status": "ready"}
    validate(responses.Version, client.get("/version").json())
    info = client.get("/server_info").json()
    validate(responses.ServerInfo, info)
    assert info["stats"]["pool_copies"] == ops.pool_copies()  # (of this process, so far)
    assert info["engine_config"]["block_size"] == 8
    media = info["media"]
    assert (media["kinds"], media["max_image_pixels"], media["reason"]) == ({}, 64 << 20, None)
    assert "image/png" in media["image_types"]


def test_reset_prefix_cache(client) -> None:
    chat(client)
    assert client.post("/reset_prefix_cache").json()["num_blocks"] > 0
    assert chat(client)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_openapi_document_knows_every_path(client) -> None:
    from mlx_paged.server.api import API

    document = client.get("/openapi.json").json()
    described = {(p, m.upper()) for p, item in document["paths"].items() for m in item}
    assert described == {(o.path.replace(":path", ""), o.method) for o in API}
    assert client.get("/docs").status_code == 200


def test_what_works_comes_first_in_the_document(client) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for name, first in (("ChatBody", "messages"), ("CompletionBody", "prompt")):
        fields = list(schemas[name]["properties"])
        refused = [f for f in fields if f in Unsupported.model_fields]
        assert fields[-len(refused) :] == refused and refused
        assert {first, "temperature", "max_tokens", "stream"} <= set(fields[: -len(refused)])
