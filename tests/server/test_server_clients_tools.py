"""Tools and structured outputs as people use them: the OpenAI SDK, LangChain, LlamaIndex."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running

from mlx_paged.server.config import ServerConfig

MODEL = "mlx-paged-demo"
QUESTION = "What is the weather in Oslo?"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CITIES = ("Oslo", "Rome")


class Forecast(pydantic.BaseModel):
    """A forecast for a city."""

    # (The embedded model would write other properties until it is cut.)
    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    sky: Literal["clear", "cloudy"] | None
    warm: bool


FORECAST = '{"city": "Oslo", "sky": null, "warm": false}'


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]


def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def get_time(zone: Literal["CET", "UTC"]) -> str:
    """The time of day."""
    return f"Noon, {zone}."


def _function(name: str, key: str, values: tuple[str, ...], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string", "enum": list(values)}},
              "required": [key], "additionalProperties": False}  # fmt: skip
    return {"name": name, "parameters": schema, **more}


WEATHER = _function("get_weather", "city", CITIES)
TIME = _function("get_time", "zone", ("CET", "UTC"))
TOOLS: list[Any] = [{"type": "function", "function": f} for f in (WEATHER, TIME)]


def _running(**engine: Any) -> Any:
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048, **engine}
    config = ServerConfig(tool_template=True, api_keys=("secret",))
    return running(config, lambda: ScriptedEngine.from_model(**options))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with _running() as server:
        yield server


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    """One whose model reasons."""
    with _running(reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    yield server.engine
    assert not server.engine.script  # All of it was said.


def _sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with _sdk(server) as sdk:
        yield sdk


# OpenAI's SDK.


def test_a_loop_of_calls_and_results(thinker) -> None:
    """The answer's own message goes back, as programs do it."""
    sdk, engine = _sdk(thinker), thinker.engine
    engine.says(f"<think>A call.</think>\n\nOne moment.\n{CALL}", "It rains.")
    messages = list(ASK)
    while True:
        answer = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "One moment." and message.reasoning == "A call."
        for call in message.tool_calls:
            assert call.function.name == "get_weather"
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == "It rains." and len(messages) == 4
    prompt = engine.prompts[-1]
    assert prompt.index('"city": "Oslo"') < prompt.index("It rains in Oslo.")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]
        }}, {"get_weather"}),
    ],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_forced_calls(sdk, choice, names) -> None:
    for seed in range(3):
        options: dict[str, Any] = {
            "model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice, "seed": seed,
            "parallel_tool_calls": False,
        }  # fmt: skip
        whole = sdk.chat.completions.create(**options).choices[0]
        [call] = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments in (
            [{"city": c} for c in CITIES] if call.function.name == "get_weather"
            else [{"zone": "CET"}, {"zone": "UTC"}]
        )  # fmt: skip
        with sdk.chat.completions.stream(**options) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
            again = stream.get_final_completion().choices[0]
        assert [(e.name, e.arguments) for e in done] == [
            (call.function.name, call.function.arguments)
        ]
        assert again.finish_reason == "tool_calls" and again.message.content is None


def test_none_is_text(sdk, engine) -> None:
    engine.says("It rains.")
    [choice] = sdk.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none"
    ).choices
    assert choice.message.tool_calls is None and choice.message.content == "It rains."
    assert choice.finish_reason == "stop"


def test_the_stream_helper_joins_text_reasoning_and_calls(thinker) -> None:
    sdk, engine = _sdk(thinker), thinker.engine
    engine.says(f"<think>Two calls.</think>\n\nOne moment.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}")
    seen: dict[str, int] = {}
    with sdk.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(
            GetWeather, name="get_weather")], stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for event in stream:
            seen[event.type] = seen.get(event.type, 0) + 1
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "One moment." and message.reasoning == "Two calls."
    cities = [call.function.parsed_arguments for call in message.tool_calls or ()]
    assert cities == [GetWeather(city="Oslo"), GetWeather(city="Rome")]
    assert len({call.id for call in message.tool_calls or ()}) == 2
    assert seen["tool_calls.function.arguments.done"] == 2
    assert seen["tool_calls.function.arguments.delta"] > 4 and seen["content.done"] == 1
    assert final.usage and final.usage.completion_tokens_details
    assert final.usage.completion_tokens_details.reasoning_tokens


def test_what_is_cut_raises(sdk, engine) -> None:
    engine.says(CALL)
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        sdk.chat.completions.parse(
            model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(
                GetWeather, name="get_weather")],
            max_tokens=30,
        )  # fmt: skip
    assert cut.value.completion.choices[0].message.tool_calls
    engine.says(FORECAST)
    with (
        pytest.raises(openai.LengthFinishReasonError),
        sdk.chat.completions.stream(
            model=MODEL, messages=ASK, response_format=Forecast, max_tokens=6
        ) as stream,
    ):
        stream.until_done()


def test_legacy_functions(sdk, engine) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "functions": [WEATHER, TIME],
        "function_call": {"name": "get_time"},
    }  # fmt: skip
    [choice] = sdk.chat.completions.create(**options).choices
    function = choice.message.function_call
    assert function.name == "get_time" and choice.finish_reason == "function_call"
    assert json.loads(function.arguments)["zone"] in ("CET", "UTC")
    assert choice.message.tool_calls is None
    name, arguments, reasons = "", "", []
    for chunk in sdk.chat.completions.create(**options, stream=True):
        for part in chunk.choices:
            reasons.append(part.finish_reason)
            if part.delta.function_call:
                name += part.delta.function_call.name or ""
                arguments += part.delta.function_call.arguments or ""
    assert name == "get_time" and json.loads(arguments)["zone"] in ("CET", "UTC")
    assert reasons[-1] == "function_call"
    engine.says(CALL)
    none = sdk.chat.completions.create(**{**options, "function_call": "none"})
    assert none.choices[0].message.function_call is None
    engine.says("Noon.")
    history = [*ASK, choice.message, {"role": "function", "name": "get_time", "content": "12:00"}]
    auto = sdk.chat.completions.create(**{**options, "messages": history, "function_call": "auto"})
    assert auto.choices[0].message.content == "Noon." and "12:00" in engine.prompts[-1]


def test_json_mode_and_a_schema_without_strict(sdk) -> None:
    form: Any = {"type": "json_object"}
    options: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 200}
    for seed in range(3):
        [choice] = sdk.chat.completions.create(**options, response_format=form, seed=seed).choices
        text = choice.message.content
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    form = {"type": "json_schema", "json_schema": {"name": "f",
            "schema": Forecast.model_json_schema()}}  # fmt: skip
    raw = sdk.chat.completions.with_raw_response.create(**options, response_format=form)
    Forecast.model_validate_json(raw.parse().choices[0].message.content or "")
    assert "x-structured-outputs-relaxed" not in raw.headers


def test_many_at_once_with_the_async_sdk(server) -> None:
    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as sdk:
            forced = (
                sdk.chat.completions.parse(
                    model=MODEL, messages=ASK, seed=seed, tool_choice="required",
                    tools=[openai.pydantic_function_tool(Forecast)], parallel_tool_calls=False,
                ) for seed in range(4)
            )  # fmt: skip
            parsed = (
                sdk.chat.completions.parse(
                    model=MODEL, messages=ASK, seed=seed, response_format=Forecast, n=2
                ) for seed in range(4)
            )  # fmt: skip
            return await asyncio.gather(*forced, *parsed)

    answers = asyncio.run(main())
    for answer in answers[:4]:
        assert isinstance(
            answer.choices[0].message.tool_calls[0].function.parsed_arguments, Forecast
        )
    for answer in answers[4:]:
        assert [type(choice.message.parsed) for choice in answer.choices] == [Forecast, Forecast]


# LangChain.


@pytest.fixture(params=["chat", "responses"])
def langchain(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="secret", model=MODEL, max_retries=0,
        use_responses_api=request.param == "responses",
    )  # fmt: skip


def test_langchain_bind_tools(langchain, engine) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.bind_tools([get_weather, get_time])
    engine.says(f"One moment.\n{CALL}")
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = model.invoke(messages)
    assert answer.text == "One moment." and answer.invalid_tool_calls == []
    [call] = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Oslo"}
    messages += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    engine.says("It rains.")
    assert model.invoke(messages).text == "It rains."
    assert "It rains in Oslo." in engine.prompts[-1]
    assert '"city": "Oslo"' in engine.prompts[-1]


@pytest.mark.parametrize("strict", [None, True])
def test_langchain_forces_calls(langchain, strict) -> None:
    for choice, names in (("any", {"get_weather", "get_time"}), ("get_time", {"get_time"})):
        model = langchain.bind_tools(
            [get_weather, get_time], tool_choice=choice, strict=strict, parallel_tool_calls=False
        )
        [call] = model.invoke(QUESTION).tool_calls
        assert call["name"] in names
        assert call["args"].get("city", "Oslo") in CITIES
        assert call["args"].get("zone", "UTC") in ("CET", "UTC")


def test_langchain_streams_calls(langchain, engine) -> None:
    engine.says(f"One moment.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}")
    chunks = list(langchain.bind_tools([get_weather]).stream(QUESTION))
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 4
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.text == "One moment." and joined.invalid_tool_calls == []
    assert [call["args"] for call in joined.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert len({call["id"] for call in joined.tool_calls}) == 2


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("kind", ["pydantic", "schema"])
def test_langchain_structured_output(langchain, engine, method, kind) -> None:
    wanted: Any = Forecast if kind == "pydantic" else Forecast.model_json_schema()
    if method == "json_mode":  # (any object: which one is the model's, so the script's)
        engine.says(FORECAST)
    model = langchain.with_structured_output(wanted, method=method, include_raw=True)
    answer = model.invoke(QUESTION)
    assert answer["parsing_error"] is None
    assert Forecast.model_validate(answer["parsed"])
    assert isinstance(answer["parsed"], Forecast if kind == "pydantic" else dict)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_streams_structured_output(langchain, engine, method) -> None:
    if method == "json_mode":
        engine.says(FORECAST)
    model = langchain.with_structured_output(Forecast, method=method)
    found = list(model.stream(QUESTION))
    assert isinstance(found[-1], Forecast)


def test_langchain_strict_in_company_of_tools(langchain) -> None:
    """A format and tools at once: langchain parses whichever it gets."""
    model = langchain.bind_tools(
        [GetWeather], response_format=Forecast, strict=True, parallel_tool_calls=False
    )
    for seed in range(2):
        options = {} if langchain.use_responses_api else {"seed": seed}
        answer = model.invoke(QUESTION, **options)
        if answer.tool_calls:
            GetWeather.model_validate(answer.tool_calls[0]["args"])
        else:
            assert isinstance(answer.additional_kwargs["parsed"], Forecast)


# LlamaIndex.


@pytest.fixture
def llama_index(server: RunningServer) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        api_base=f"{server.url}/v1", api_key="secret", model=MODEL, is_chat_model=True,
        is_function_calling_model=True, context_window=2048, max_retries=0,
    )  # fmt: skip


def _llama_tools() -> list[Any]:
    from llama_index.core.tools import FunctionTool

    return [FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)]


def test_llama_index_tools(llama_index, engine) -> None:
    forced = llama_index.chat_with_tools(
        _llama_tools(), QUESTION, tool_required=True, allow_parallel_tool_calls=False
    )
    [call] = llama_index.get_tool_calls_from_response(forced)
    assert call.tool_name in ("get_weather", "get_time") and call.tool_kwargs
    engine.says(f"One moment.\n{CALL}")
    free = llama_index.chat_with_tools(_llama_tools(), QUESTION, allow_parallel_tool_calls=True)
    [call] = llama_index.get_tool_calls_from_response(free)
    assert free.message.content == "One moment." and call.tool_kwargs == {"city": "Oslo"}
    engine.says(CALL)
    assert llama_index.predict_and_call(_llama_tools(), QUESTION).response == "It rains in Oslo."


def test_llama_index_streams_tools(llama_index, engine) -> None:
    engine.says(CALL)
    *_, last = llama_index.stream_chat_with_tools(_llama_tools(), QUESTION)
    [call] = llama_index.get_tool_calls_from_response(last)
    assert call.tool_name == "get_weather" and call.tool_kwargs == {"city": "Oslo"}


def test_llama_index_structured_predict(llama_index, server, engine) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    prompt = PromptTemplate("Describe {what}.")
    assert isinstance(llama_index.structured_predict(Forecast, prompt, what="it"), Forecast)
    # (Its stream leaves the choice to the model.)
    engine.says(f'<tool_call>\n{{"name": "Forecast", "arguments": {FORECAST}}}\n</tool_call>')
    *_, last = llama_index.stream_structured_predict(Forecast, prompt, what="it")
    assert Forecast.model_validate(last.model_dump()) == Forecast.model_validate_json(FORECAST)
    message = ChatMessage(role="user", content=QUESTION)
    answer = llama_index.as_structured_llm(Forecast).chat([message])
    assert isinstance(answer.raw, Forecast)
    by_format = OpenAILike(
        api_base=f"{server.url}/v1", api_key="secret", model=MODEL, is_chat_model=True,
        should_use_structured_outputs=True, context_window=2048, max_retries=0,
    )  # fmt: skip
    assert isinstance(by_format.structured_predict(Forecast, prompt, what="it"), Forecast)


def test_llama_index_agent(llama_index, engine) -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    engine.says(f"One moment.\n{CALL}", "It rains.")

    async def main() -> Any:
        agent = FunctionAgent(tools=[get_weather, get_time], llm=llama_index)
        return await agent.run(QUESTION)

    answer = asyncio.run(main())
    assert str(answer) == "It rains."
    assert [call.tool_name for call in answer.tool_calls] == ["get_weather"]
    assert "It rains in Oslo." in engine.prompts[-1]
