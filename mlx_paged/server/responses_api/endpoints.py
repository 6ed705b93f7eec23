"""The endpoints of `/v1/responses`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.server import conversions, requests
from mlx_paged.server.context import Context, context_of, request_log_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.errors import ApiError, bad_request, from_engine, own_name, shorten
from mlx_paged.server.generation import Generation
from mlx_paged.server.responses_api import answers
from mlx_paged.server.responses_api.adapter import Remembered, ResponseAdapter, wants_logprobs
from mlx_paged.server.responses_api.body import (
    INCLUDABLE,
    InputTokensBody,
    PromptBody,
    ResponseBody,
    choice_of,
    names_of,
    template_kwargs_of,
    text_of,
    tools_of,
)
from mlx_paged.server.responses_api.items import (
    Item,
    items_of,
    messages_of,
    num_turns,
    without_oldest,
)
from mlx_paged.server.responses_api.store import LatestResponse, ResponseStore, Segment
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.stream_response import EventStream
from mlx_paged.server.streaming import events_of, json_response, respond
from mlx_paged.server.turn import PreparedTurn, Turn
from mlx_paged.server.turn_preparation import prepare

_MAX_PAGE, _DEFAULT_PAGE = 100, 20  # items
# Names of the engine's fields in this API.
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


async def create(request: Request) -> HttpResponse:
    """Creates a response, whole or streamed."""
    body = await requests.read_body(request, ResponseBody)
    with own_names(request):
        adapter = await adapter_of(request, body)
        if body.background:
            return await _in_background(adapter, stream=bool(body.stream))
        return await respond(request, adapter, stream=bool(body.stream))


async def adapter_of(
    request: Request, body: ResponseBody, latest: LatestResponse | None = None
) -> ResponseAdapter:
    """Prepares the generation for a body without submitting it.

    Args:
        latest: The latest response of the connection, which may not be stored.

    Raises:
        ApiError, InvalidParameterError: The body is invalid. Fields have the engine's names, which
            `own_names` translates.
    """
    context = context_of(request)
    model = context.models.of(body.model)
    conversions.check_logprobs("top_logprobs", body.top_logprobs, context.config)
    params = conversions.sampling_params(
        body,
        context.config,
        model.defaults,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
    )
    new_input, before = _input_of(body, context, latest)
    if body.background:
        _check_background(body, model, new_input, before)
        context.background.check_room()
    turn = await _turn_of(body, request, new_input, before)
    turn = replace(turn, structured_outputs=text_of(body), names=names_of(body))
    prepared = await _prepare(request, model, turn, params, truncates=body.truncation == "auto")
    generation = Generation(
        request,
        model,
        [prepared.prompt],
        prepared.params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        stream_interval=body.stream_interval,
        media=prepared.media,
        names=prepared.names,
    )
    return ResponseAdapter(generation, prepared, body, Remembered(new_input, before))


def _check_background(
    body: ResponseBody, model: ServedModel, new_input: list[Item], before: Segment | None
) -> None:
    """Refuses a background response that its client could not retrieve.

    Raises:
        ApiError: 400, the response would not be stored.
    """
    if body.store is False:
        raise bad_request(
            "background", "background needs store: true, so that the response can be retrieved"
        )
    if not model.response_store.max_responses:
        raise bad_request(
            "background",
            "background needs stored responses: the server was started with "
            "--max-stored-responses 0",
            "unsupported_parameter",
        )
    if not model.response_store.fits(new_input, before):
        raise bad_request(
            "input", "input exceeds the limit for stored responses (--max-stored-bytes)"
        )


async def _in_background(adapter: ResponseAdapter, *, stream: bool) -> HttpResponse:
    """Starts a background response; returns its current state, or a stream of its events."""
    generation = adapter.generation
    await generation.submit()
    run = generation.context.background.start(adapter, events_of(adapter))
    if not stream:
        return await json_response(adapter.now(), adapter.headers)
    return EventStream(
        run.follow(0), generation.trace, generation.context.config, headers=adapter.headers
    )


async def input_tokens(request: Request) -> HttpResponse:
    """Returns the number of tokens of a response's prompt."""
    body = await requests.read_body(request, InputTokensBody)
    with own_names(request):
        new_input, before = _input_of(body, context_of(request))
        turn = await _turn_of(body, request, new_input, before)
        model = context_of(request).models.of(body.model)
        prepared = await prepare(request, model, turn, SamplingParams())
    answer: answers.InputTokens = {
        "object": "response.input_tokens", "input_tokens": len(prepared.prompt),
    }  # fmt: skip
    return JSONResponse(answer)


async def retrieve(request: Request) -> HttpResponse:
    """Returns a stored or background response, or streams the events of a background one."""
    query = _check_query(request, "include", "stream", "starting_after", "include_obfuscation")
    response_id = _id_of(request)
    first = _first_event(query)
    context = context_of(request)
    running = context.background.running(response_id)
    found: Mapping[str, Any] | None = _store_of(request).get(response_id)
    if running is not None and running.adapter is not None:
        found = running.adapter.now()
    if found is None:
        raise _unknown(response_id)
    if first is None:
        return await json_response(found)
    run = context.background.find(response_id)
    if run is None:
        reason = "its events are no longer kept (--max-stored-bytes)"
        if not found["background"]:
            reason = "it is not a background response"
        raise bad_request("stream", f"stream must be false for {response_id}: {reason}")
    run.check_has(first)
    return EventStream(run.follow(first), request_log_of(request), context.config)


def _first_event(query: Mapping[str, str]) -> int | None:
    """Returns the first sequence number that a query asks for; None without a stream.

    Raises:
        ApiError: 400 for invalid values.
    """
    for name, allowed in (("stream", ("true", "false")), ("include_obfuscation", ("false",))):
        if query.get(name, "false") not in allowed:
            expected = " or ".join(allowed)
            raise bad_request(name, f"{name} must be {expected} but got {shorten(query[name])!r}")
    after = query.get("starting_after")
    if query.get("stream") != "true":
        if after is not None:
            raise bad_request("starting_after", "starting_after needs stream=true")
        return None
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise bad_request(
            "starting_after",
            f"starting_after must be the sequence number of an event but got {shorten(after)!r}",
        )
    return int(after) + 1


async def compact(_: Request) -> HttpResponse:
    """Returns 404: compaction needs a model that was trained for it.

    Has a route of its own, because "compact" would be taken for the id of a response.
    """
    raise ApiError(
        404,
        "this server does not compact conversations: send fewer items, or let truncation 'auto' "
        "drop the oldest",
        code="not_found",
    )


async def delete(request: Request) -> HttpResponse:
    """Deletes a stored response; stops it first if it is running in the background."""
    response_id = _id_of(request)
    await context_of(request).background.forget(response_id)
    if not _store_of(request).delete(response_id):
        raise _unknown(response_id)
    answer: answers.Deleted = {"id": response_id, "object": "response", "deleted": True}
    return JSONResponse(answer)


async def cancel(request: Request) -> HttpResponse:
    """Cancels a background response; returns a finished one unchanged."""
    response_id = _id_of(request)
    run = context_of(request).background.running(response_id)
    if run is not None:
        await run.stop()
    found = _store_of(request).get(response_id)
    if found is None:
        raise _unknown(response_id)
    if not found["background"]:
        raise ApiError(
            400,
            "only background responses can be cancelled; to end another one, close its connection",
            code="unsupported_operation",
        )
    return await json_response(found)


async def input_items(request: Request) -> HttpResponse:
    """Lists the input items of a stored response, in pages."""
    query = _check_query(request, "include", "after", "limit", "order")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order", f"order must be 'asc' or 'desc' but got {shorten(order)!r}")
    limit = query.get("limit", str(_DEFAULT_PAGE))
    if not (
        limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_PAGE
    ):
        raise bad_request(
            "limit", f"limit must be a number from 1 to {_MAX_PAGE} but got {shorten(limit)!r}"
        )
    response_id = _id_of(request)
    run = context_of(request).background.running(response_id)
    segment = _store_of(request).segment(response_id)
    if run is not None and run.adapter is not None:
        remembered = run.adapter.remembered
        items = [*await _items_before(remembered.before), *remembered.new_input]
    elif segment is not None:
        items = await _items_before(segment.before)
        items += from_json(segment.input)
    else:
        raise _unknown(response_id)
    if order == "desc":
        items.reverse()
    begin = 0
    if "after" in query:
        found = [i for i, item in enumerate(items) if item["id"] == query["after"]]
        if not found:
            raise bad_request("after", f"after must be the id of an item of {response_id}")
        begin = found[0] + 1
    page = items[begin : begin + int(limit)]
    answer: answers.ItemList = {
        "object": "list",
        "data": cast(Any, page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(items),
    }
    return await json_response(answer)


def _store_of(request: Request) -> ResponseStore:
    """Finds the store that holds the response in the path, or uses the default model's."""
    models, response_id = context_of(request).models, _id_of(request)
    stores = (model.response_store for model in models)
    found = (store for store in stores if store.status(response_id) is not None)
    return next(found, models.default.response_store)


def _id_of(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {shorten(response_id, 64)!r} here: it was not stored, or has been "
        "forgotten",
        code="not_found",
    )


def _check_query(request: Request, *known: str) -> dict[str, str]:
    """Returns the query parameters.

    Raises:
        ApiError: 400 for an unknown parameter or an invalid value of `include`.
    """
    query = request.query_params
    for name in query:
        if name.removesuffix("[]") == "include":
            for value in query.getlist(name):
                if value not in INCLUDABLE:
                    raise bad_request(
                        "include",
                        f"include must be one of {', '.join(INCLUDABLE)} but got "
                        f"{shorten(value)!r}",
                    )
        elif name not in known:
            raise bad_request(
                shorten(name, 64),
                f"{shorten(name, 64)} is not supported here",
                "unsupported_parameter",
            )
    return dict(query)


# From a body to a turn.


def _input_of(
    body: PromptBody, context: Context, latest: LatestResponse | None = None
) -> tuple[list[Item], Segment | None]:
    """Returns the new items of a body, and the conversation that they continue.

    Args:
        latest: See `adapter_of`.

    Raises:
        ApiError: 400 for an invalid item, or a response that cannot be continued.
    """
    store = context.models.of(body.model).response_store
    stores = (store,) if latest is None else (latest, store)
    new_input = [_dereferenced(item, i, stores) for i, item in enumerate(items_of(body.input))]
    before = None
    if body.previous_response_id is not None and latest is not None:
        before = latest.segment(body.previous_response_id)
    if body.previous_response_id is not None and before is None:
        before = store.segment(body.previous_response_id)
        status = store.status(body.previous_response_id)
        if context.background.running(body.previous_response_id) is not None:
            status = "in progress"
        if status in ("failed", "cancelled", "in progress"):
            raise bad_request(
                "previous_response_id",
                f"previous_response_id {shorten(body.previous_response_id, 64)!r} is {status}: "
                "only a response that was completed can be continued",
                "previous_response_not_completed",
            )
        if before is None and not store.max_responses:
            raise bad_request(
                "previous_response_id",
                "previous_response_id needs stored responses: the server was started with "
                "--max-stored-responses 0",
                "previous_response_not_found",
            )
        if before is None:
            raise bad_request(
                "previous_response_id",
                f"previous_response_id {shorten(body.previous_response_id, 64)!r} is not here: it "
                "was not stored, or has been forgotten",
                "previous_response_not_found",
            )
    return new_input, before


def _dereferenced(item: Item, index: int, stores: Sequence[ResponseStore | LatestResponse]) -> Item:
    """Returns an item, or the stored item that an item_reference refers to."""
    if item["type"] != "item_reference":
        return item
    found = next((found for store in stores if (found := store.item(item["id"]))), None)
    if found is None:
        raise bad_request(
            f"input[{index}].id",
            f"input[{index}].id {shorten(item['id'], 64)!r} is not an item of a stored response",
            "item_not_found",
        )
    return found


async def _items_before(segment: Segment | None) -> list[Item]:
    """Returns the items of a conversation; lets other tasks run in between."""
    items: list[Item] = []
    for each in segment.chain() if segment else ():
        items += from_json(each.input)
        items += from_json(each.output)
        await asyncio.sleep(0)
    return items


async def _turn_of(
    body: PromptBody, request: Request, new_input: list[Item], before: Segment | None
) -> Turn:
    """Converts a body to a turn, without the format of the text.

    Raises:
        ApiError: 400 for an invalid body.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = await _items_before(before)
    messages += messages_of([*items, *new_input], num_before=len(items))
    if not messages:
        raise bad_request("input", "input must have at least one message")
    tools = tools_of(body, request)
    conversation = Conversation(
        messages,
        tools=tools,
        chat_template=body.chat_template,
        template_kwargs=template_kwargs_of(body),
    )
    return Turn(conversation, tools, choice_of(body, tools))


async def _prepare(
    request: Request, model: ServedModel, turn: Turn, params: SamplingParams, *, truncates: bool
) -> PreparedTurn:
    """Prepares a turn; if `truncates`, drops the oldest messages of one that is too long."""
    if not truncates:
        return await prepare(request, model, turn, params)

    async def without(count: int) -> PreparedTurn | None:
        """Prepares the turn without its `count` oldest; returns None if it is still too long."""
        messages = without_oldest(turn.conversation.messages, count)
        shorter = replace(turn, conversation=replace(turn.conversation, messages=messages))
        try:
            prepared = await prepare(request, model, shorter, params)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        kept = renderer.truncate(prepared.prompt, -1, params.max_tokens)
        return prepared if len(kept) == len(prepared.prompt) else None

    renderer = model.renderer
    num_all = num_turns(turn.conversation.messages)
    fits = await without(0) if num_all else None
    if fits is not None or num_all < 2:
        return fits or await prepare(request, model, turn, params)
    # Binary search for the minimum to drop: `low` turns are not enough, `high` are.
    low, high = 0, num_all - 1
    fits = await without(high)
    if fits is None:
        return await prepare(request, model, turn, params)  # Too long, as the engine will say.
    while high - low > 1:
        middle = (low + high) // 2
        shorter = await without(middle)
        if shorter is None:
            low = middle
        else:
            high, fits = middle, shorter
    return fits


@contextlib.contextmanager
def own_names(request: Request) -> Iterator[None]:
    """Translates the engine's field names in errors to those of this API."""
    try:
        try:
            yield
        except InvalidParameterError as error:
            raise from_engine(error, request_log_of(request).request_id) from error
    except ApiError as error:
        if error.param is not None:
            param = own_name(error.param, _NAMES)
            error.message = error.message.replace(error.param, param, 1)
            error.param = param
        raise
