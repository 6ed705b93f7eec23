"""Media in requests: the parts of each API, what the model and the engine get, and refusals."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from support import media_checkpoints
from support.fake_media import ROW, NotingEngine, noting_async_engine
from support.media_files import clip, odd_pictures, picture, png, saved, sound
from support.server_helpers import RunningServer, events, running

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.server.config import MAX_MEDIA_BODY_SIZE

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    make = lambda: noting_async_engine(  # noqa: E731
        limit_mm_per_prompt={"image": 4},
        allowed_media_domains=["127.0.0.1"],
        # (A download does not end by itself.)
        media_limits={"max_image_pixels": 100_000, "fetch_timeout": 100_000},
    )
    with running(make_engine=make) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def engine(server: RunningServer) -> NotingEngine:
    engine: Any = server.engine.engine
    engine.given.clear()
    engine.media.calls.clear()
    return engine


def chat(*content: Any, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0, **options}


def image_part(content: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(content), **options}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(engine: NotingEngine) -> tuple[str, dict[str, list[Any]]]:
    """The only call of the processor; the engine got its result once."""
    [call], [prepared] = engine.media.calls, engine.given  # type: ignore[union-attr]
    assert prepared is not None and len(prepared.spans) == sum(map(len, call[1].values()))
    return call


def test_a_rendered_chat_has_its_media(client) -> None:
    same, other = png(24, 16), png(16, 24)
    body = chat(text("a"), image_part(same), image_part(other), image_part(same))
    rendered = client.post(f"{CHAT}/render", json=body).json()
    features = rendered["features"]
    [first, second, third] = features["mm_hashes"]["image"]
    assert first == third != second and features["kwargs_data"] is None
    places = features["mm_placeholders"]["image"]
    assert [rendered["token_ids"][place["offset"]] for place in places]
    ends = [place["offset"] + place["length"] for place in places]
    assert all(end <= place["offset"] for end, place in zip(ends, places[1:]))
    assert ends[-1] <= len(rendered["token_ids"])


def test_what_the_model_takes_is_told(client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    info = client.get("/server_info").json()
    media = info["media"]
    # The limit in effect, not that it was left to the server: the page reads it.
    assert info["config"]["max_body_size"] == MAX_MEDIA_BODY_SIZE
    assert model["input_modalities"] == ["text", "image", "video", "audio"]
    assert media["max_image_pixels"] == 100_000 and media["reason"] is None
    assert media["kinds"]["image"] == {"max_items": 4, "max_bytes": 32 << 20}
    assert media["kinds"]["audio"] == {"max_items": 999, "max_bytes": 64 << 20}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --- Chat completions -----------------------------------------------------------------------------


def test_a_chat_with_media(client, engine) -> None:
    body = chat(
        text("first"),
        image_part(png(), detail="auto"),
        {"type": "image_url", "image_url": url_of(png(10, 10))},
        {"type": "video_url", "video_url": {"url": url_of(clip(), "video/mp4")}, "num_frames": 3},
        {"type": "input_audio",
         "input_audio": {"data": base64.b64encode(sound(0.4)).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url_of(sound(0.2), "audio/wav")}},
        text("last"),
    )  # fmt: skip
    answer = client.post(CHAT, json=body).json()
    prompt, items = asked(engine)
    order = ["first", "<image>", "<video>", "<audio>", "last"]
    assert sorted(order, key=prompt.index) == order
    assert [image.size for image in items["image"]] == [(24, 16), (10, 10)]
    assert [len(video.frames) for video in items["video"]] == [3]
    assert len(items["audio"]) == 2
    tokens = engine.given[0].prompt.token_ids
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert tokens.count(ROW) >= 24 + 10 + 3 + 4 + 2


def test_a_stream_with_media_is_the_same_answer(client, engine) -> None:
    body = chat(text("what?"), image_part(png()), max_tokens=6)
    whole = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    chunks = events(client.post(CHAT, json={**body, "stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == whole
    assert [len(prepared.spans) for prepared in engine.given] == [1, 1]
    first, second = engine.given
    assert first.spans[0].key == second.spans[0].key


def test_old_pictures_are_not_decoded_again(server, client, engine) -> None:
    """An agent that sends its screenshots with every turn."""
    shots = [png(40 + i, 30) for i in range(3)]
    before = server.engine.media_prompts.loader.num_decoded
    turns: list[Any] = []
    for shot in shots:
        turns += [{"role": "user", "content": [text("next"), image_part(shot)]}]
        body = {"messages": turns, "max_tokens": 1}
        assert client.post(CHAT, json=body).status_code == 200
        turns += [{"role": "assistant", "content": "ok"}]
    assert server.engine.media_prompts.loader.num_decoded == before + 3
    assert [len(prepared.spans) for prepared in engine.given] == [1, 2, 3]


def test_options_of_a_request(client, engine) -> None:
    large = saved(Image.new("RGB", (300, 200)), "PNG")
    video = {"type": "video_url", "video_url": {"url": url_of(clip(), "video/mp4")}}
    client.post(CHAT, json=chat(video, media_io_kwargs={"video": {"num_frames": 2}}))
    client.post(CHAT, json=chat(image_part(large, detail="low")))
    (_, first), (_, second) = engine.media.calls
    assert len(first["video"][0].frames) == 2
    assert second["image"][0].size == (300, 200)  # (512 pixels are few enough)


def test_parts_of_hugging_face(client, engine) -> None:
    video = url_of(clip(), "video/mp4")
    parts = [
        {"type": "image", "image": url_of(png())},
        {"type": "image", "url": url_of(png(10, 10))},
        {"type": "image", "image": {"url": url_of(png(11, 10)), "detail": "low"}},
        {"type": "video", "video": video, "max_frames": 3},
        {"type": "video", "video": video, "nframes": 2},
        {"type": "audio", "audio": url_of(sound(0.2), "audio/wav")},
    ]
    assert client.post(CHAT, json=chat(*parts)).status_code == 200
    _, items = asked(engine)
    assert [image.size for image in items["image"]] == [(24, 16), (10, 10), (11, 10)]
    assert [len(video.frames) for video in items["video"]] == [3, 2]
    assert len(items["audio"]) == 1


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"video_max_frames": 3}, 3),
        ({"max_frames": 2}, 2),
        ({"video_fps": 1.0}, 2),
        ({"video_max_frames": 2, "max_frames": 2}, 2),
        ({"video_max_frames": 4, "media_io_kwargs": {"video": {"num_frames": 4}}}, 4),
    ],
)
def test_videos_of_a_request_are_read_as_it_says(client, engine, path, options, count) -> None:
    video = {"type": "video_url", "video_url": {"url": url_of(clip(), "video/mp4")}}
    other = {**video, "num_frames": 1, "fps": -1}
    body = chat(video, other, **options)
    if path != CHAT:
        body = {"messages": body["messages"], **options}
    assert client.post(path, json=body).status_code == 200
    [(_, items)] = engine.media.calls
    assert [len(video.frames) for video in items["video"]] == [count, 1]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"video_fps": 0}, "video_fps"),
        ({"video_max_frames": 0}, "video_max_frames"),
        ({"max_frames": -2}, "max_frames"),
        ({"video_max_frames": 3, "max_frames": 2}, "max_frames"),
        ({"video_fps": 2, "media_io_kwargs": {"video": {"fps": 3}}}, "video_fps"),
    ],
)
def test_options_of_videos_that_cannot_be(client, options, field) -> None:
    error = error_of(client.post(CHAT, json=chat(text("what?"), **options)))
    assert error["param"] == field


def test_text_is_computed_as_without_media(client, engine) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert client.post(CHAT, json=body).status_code == 200
    assert engine.given == [None] and not engine.media.calls


BAD_PARTS = [
    ({"type": "image_url"}, "image_url", "missing"),
    ({"type": "image_url", "image_url": 7}, "", ""),
    ({"type": "image_url", "image_url": {"link": "x"}}, "image_url", "URL"),
    (image_part(b"no picture"), "image_url", "not a readable image"),
    (image_part(odd_pictures()["svg"]), "image_url", "SVG"),
    (image_part(png(400, 400)), "image_url", "400 x 400 pixels"),
    ({"type": "image_url", "image_url": "file:///etc/passwd"}, "image_url", "may not be named"),
    ({"type": "image_url", "image_url": "/etc/passwd"}, "image_url", "must be a data:"),
    ({"type": "image_url", "image_url": "http://169.254.169.254/"}, "image_url", "domains"),
    ({"type": "video_url", "video_url": url_of(png())}, "video_url", "not a readable clip"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "input_audio", "format"),
    ({"type": "input_audio", "input_audio": {"data": "%", "format": "wav"}}, "input_audio", "64"),
    ({"type": "input_image", "file_id": "file-1"}, "file_id", "not stored"),
    ({"type": "image", "image": "/etc/passwd"}, "image", "must be a data:"),
    ({"type": "image"}, "image", "missing"),
    ({"type": "video", "url": "x"}, "url", "must be a data:"),
    ({"type": "image", "path": "/etc/passwd"}, "image", "missing"),
    ({"type": "image", "image": "data:,", "max_pixels": 99}, "max_pixels", "not supported"),
    (
        {"type": "file", "file": {"file_id": "x"}},
        "file.file_data",
        "files by id or URL are not supported",
    ),
    ({"type": "image_url", "image_url": None, "uuid": "1"}, "uuid", "send the content (image_url)"),
]


@pytest.mark.parametrize(("part", "field", "reason"), BAD_PARTS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_parts_of_chats_are_named(client, engine, part, field, reason, stream) -> None:
    error = error_of(client.post(CHAT, json=chat(text("a"), part, stream=stream)))
    where = "messages[0].content[1]"
    assert error["param"].startswith(f"{where}.{field}".rstrip("."))
    assert error["message"].startswith(error["param"]) and reason in error["message"]
    assert not engine.given


def test_too_many_pictures_are_refused(client, engine) -> None:
    error = error_of(client.post(CHAT, json=chat(*[image_part(png())] * 5)))
    assert error["param"] == "messages[0].content[4].image_url" and "at most 4" in error["message"]


def test_media_cannot_be_cut(client, engine) -> None:
    error = error_of(client.post(CHAT, json=chat(image_part(png()), truncate_prompt_tokens=4)))
    assert error["param"] == "truncate_prompt_tokens"


def test_tokens_of_messages_with_media(client, engine) -> None:
    messages = chat(text("a"), image_part(png()))["messages"]
    found = client.post("/tokenize", json={"messages": messages}).json()
    assert found["tokens"].count(ROW) >= 24 and found["count"] == len(found["tokens"])


# --- Responses ------------------------------------------------------------------------------------


def input_image(content: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(content), **more}


def test_responses_with_pictures_and_what_follows_them(client, engine) -> None:
    content = [{"type": "input_text", "text": "what?"}, input_image(png(), detail="auto")]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    first = client.post(RESPONSES, json=body).json()
    assert asked(engine)[0].count("<image>") == 1
    kept = client.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"][0]["content"][1]
    assert kept["type"] == "input_image" and kept["image_url"] == url_of(png())
    shot = {
        "type": "function_call_output", "call_id": "c", "output": [input_image(png(12, 12))],
    }  # fmt: skip
    call = {"type": "function_call", "call_id": "c", "name": "shoot", "arguments": "{}"}
    body = {"input": [call, shot], "previous_response_id": first["id"], "max_output_tokens": 2}
    assert client.post(RESPONSES, json=body).status_code == 200
    assert [image.size for image in engine.media.calls[1][1]["image"]] == [(24, 16), (12, 12)]


@pytest.mark.parametrize(
    ("part", "where", "reason"),
    [
        ({"type": "input_image", "file_id": "f"}, "input[1].content[0].file_id", "not stored"),
        ({"type": "input_image"}, "input[1].content[0].image_url", "missing"),
        (input_image(b"no"), "input[1].content[0].image_url", "not a readable image"),
        ({"type": "input_file", "file_id": "f"}, "input[1].content[0].file_data", "by id"),
        ({"type": "input_audio"}, "input[1].content[0]", "input_audio"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_parts_of_responses_are_named(client, engine, part, where, reason) -> None:
    messages = [{"role": "user", "content": c} for c in ("a", [part])]
    error = error_of(client.post(RESPONSES, json={"input": messages}))
    assert error["param"] == where and reason in error["message"]


def test_a_picture_of_an_earlier_response_is_named_as_such(client, engine, monkeypatch) -> None:
    body = {"input": [{"role": "user", "content": [input_image(png())]}], "max_output_tokens": 1}
    first = client.post(RESPONSES, json=body).json()
    monkeypatch.setattr(engine.media, "kinds", ("audio",))
    body = {"input": "and?", "previous_response_id": first["id"]}
    error = error_of(client.post(RESPONSES, json=body))
    assert error["param"].startswith("previous_response_id")
    assert "takes no images, only sounds" in error["message"]


def test_the_oldest_pictures_go_where_the_input_is_too_long(client, engine, server) -> None:
    limit = server.context.models.default.renderer.max_model_len
    assert limit is not None
    wide = saved(Image.new("RGB", (limit // 2, 2)))
    messages = [{"role": "user", "content": [input_image(wide)]} for _ in range(3)]
    messages.append({"role": "user", "content": "hello"})
    body = {"input": messages, "truncation": "auto", "max_output_tokens": 2}
    assert client.post(RESPONSES, json=body).status_code == 200
    [prepared] = engine.given
    assert len(prepared.spans) == 1


# --- Messages -------------------------------------------------------------------------------------


def block(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_messages_with_pictures_of_users_and_tools(client, engine) -> None:
    linked = {"type": "image", "source": {"type": "url", "url": url_of(png(10, 10))}}
    use = {"type": "tool_use", "id": "t", "name": "shoot", "input": {}}
    result = {
        "type": "tool_result", "tool_use_id": "t", "content": [text("done"), block(png(12, 12))],
    }  # fmt: skip
    messages = [
        {"role": "user", "content": [text("look"), block(png()), linked]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, text("well?")]},
    ]
    body = {"messages": messages, "max_tokens": 2}
    assert client.post(MESSAGES, json=body).status_code == 200
    prompt, items = asked(engine)
    assert [image.size for image in items["image"]] == [(24, 16), (10, 10), (12, 12)]
    order = ["look", "<image>", "done", "well?"]
    assert sorted(order, key=prompt.index) == order
    counted = client.post(f"{MESSAGES}/count_tokens", json={"messages": messages}).json()
    assert counted["input_tokens"] == len(engine.given[0].prompt.token_ids)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ({"type": "file", "file_id": "f"}, "messages.0.content.0.source.type"),
        ({"type": "base64", "data": "AAAA"}, "messages.0.content.0.source"),
        (
            {"type": "base64", "media_type": "image/png", "data": "AAAA"},
            "messages.0.content.0.source",
        ),
        ({"type": "url"}, "messages.0.content.0.source"),
        ("x", "messages.0.content.0.source"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_blocks_are_named(client, engine, source, where) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    response = client.post(MESSAGES, json={"messages": messages, "max_tokens": 2})
    assert response.json()["type"] == "error"
    assert error_of(response)["message"].startswith(where)
    messages = [{"role": "assistant", "content": [block(png())]}]
    response = client.post(MESSAGES, json={"messages": messages, "max_tokens": 2})
    assert "must be a text block here" in error_of(response)["message"]


# --- The way to the pictures ----------------------------------------------------------------------


def test_a_client_that_goes_is_not_fetched_for(server, client, engine) -> None:
    """The server asks another one for the picture, and hangs up when its client does."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked_for, hung_up = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            asked_for.set()
            while connection.recv(4096):
                pass
            hung_up.set()

    threading.Thread(target=serve, daemon=True).start()
    part = {"type": "image_url", "image_url": f"http://127.0.0.1:{listener.getsockname()[1]}/a"}
    body = json.dumps(chat(part)).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        leaving.sendall(head.encode() + body)
        assert asked_for.wait(300)
        # Others are answered meanwhile, with pictures too.
        assert client.post(CHAT, json=chat(image_part(png()))).status_code == 200
    assert hung_up.wait(300)
    listener.close()
    assert len(engine.given) == 1


def test_pictures_are_fetched_from_hosts_that_are_named(client, engine) -> None:
    content = png(30, 30)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content
            )

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
    parts = [{"type": "image_url", "image_url": {"url": url}}] * 2  # (asked for once)
    assert client.post(CHAT, json=chat(*parts)).status_code == 200
    listener.close()
    assert [image.size for image in asked(engine)[1]["image"]] == [(30, 30)] * 2


def test_a_uuid_is_taken_and_names_nothing(client, engine) -> None:
    part = {**image_part(png(5, 4)), "uuid": "one"}
    assert client.post(CHAT, json=chat(part)).status_code == 200
    again = {"type": "image_url", "image_url": None, "uuid": "one"}
    assert error_of(client.post(CHAT, json=chat(again)))["param"] == "messages[0].content[0].uuid"


def refused_size(server: RunningServer, size: int) -> bytes:
    """The answer to the head of a request with a body of so many bytes."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(300)
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n".encode()
        )
        found = b""
        while chunk := sock.recv(1 << 16):
            found += chunk
        return found


def test_bodies_may_be_larger_where_there_are_media(server) -> None:
    found = refused_size(server, (48 << 20) + 1)
    assert found.startswith(b"HTTP/1.1 413 ") and b"at most 50331648 bytes" in found


# --- Text models ----------------------------------------------------------------------------------


def test_a_model_of_text_takes_no_pictures() -> None:
    with running() as server, server.client() as client:
        error = error_of(client.post(CHAT, json=chat(text("a"), image_part(png()))))
        assert error["param"] == "messages[0].content[1].image_url"
        assert error["message"].endswith("this model takes no images: it reads text only")
        assert error["code"] == "invalid_media"
        items = [{"role": "user", "content": [input_image(png())]}]
        error = error_of(client.post(RESPONSES, json={"input": items}))
        assert error["param"] == "input[0].content[0].image_url"
        error = error_of(
            client.post(
                MESSAGES,
                json={"messages": [{"role": "user", "content": [block(png())]}], "max_tokens": 2},
            )
        )
        assert "takes no images" in error["message"]
        assert not server.engine.engine.intake.media_prompts.has_loaded
        assert b"at most 16777216 bytes" in refused_size(server, (16 << 20) + 1)


def test_pictures_of_every_mode_are_answered(client, engine) -> None:
    sizes = {"CMYK JPEG": (24, 16), "EXIF": (16, 24), "animated": (8, 8), "I;16 PNG": (24, 16)}
    for name, size in sizes.items():
        response = client.post(CHAT, json=chat(image_part(odd_pictures()[name])))
        assert response.status_code == 200, name
        assert engine.media.calls[-1][1]["image"][0].size == size
    assert client.post(CHAT, json=chat(image_part(saved(picture(mode="LA"))))).status_code == 200


def test_a_model_of_mlx_vlm_answers_as_it_does_in_python(tmp_path) -> None:
    """From the parts of a request to the tokens of an answer, with everything in between."""
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed")
    path = media_checkpoints.write(tmp_path / "model", media_checkpoints.checkpoint("smolvlm"))
    options: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 200}
    red, blue = png(60, 60), saved(Image.new("RGB", (60, 60), (0, 0, 255)))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def messages(content: bytes) -> list[dict[str, Any]]:
        return chat(text("what?"), image_part(content))["messages"]

    llm = LLM(path, **options)
    expected = [llm.chat(messages(content), params)[0] for content in (red, blue)]
    assert expected[0].outputs[0].token_ids != expected[1].outputs[0].token_ids
    make = lambda: AsyncEngine.from_model(path, **options)  # noqa: E731
    with running(make_engine=make) as server, server.client() as client:
        for content, output in [*zip((red, blue), expected), (red, expected[0])]:
            body = {"messages": messages(content), "max_tokens": 6, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = client.post(CHAT, json=body).json()
            assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
            assert answer["prompt_token_ids"] == output.prompt_token_ids
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(output.prompt_token_ids) - 1  # (the last token is computed)
        assert server.engine.media_prompts.loader.num_decoded == 2
        error = error_of(client.post(CHAT, json=chat({"type": "video_url", "video_url": "data:,"})))
        assert "takes no videos, only images" in error["message"]


def test_what_the_tower_rejects_is_an_error_of_the_request(tmp_path, monkeypatch) -> None:
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed")
    path = media_checkpoints.write(tmp_path / "model", media_checkpoints.checkpoint("smolvlm"))
    options: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 200}
    make = lambda: AsyncEngine.from_model(path, **options)  # noqa: E731
    calls = []

    def encode(item: Any) -> Any:
        calls.append(item)
        raise ValueError("[broadcast_shapes] Shapes (504,16) and (1,64,16) cannot be broadcast.")

    with running(make_engine=make) as server, server.client() as client:
        body = chat(text("what?"), image_part(png(60, 60)))
        assert client.post(CHAT, json=body).status_code == 200
        store: Any = server.engine.engine._runner.media.store
        monkeypatch.setattr(store, "_encode", encode)
        body = chat(text("what?"), image_part(png(50, 60)))
        error = error_of(client.post(CHAT, json=body))
        assert (error["code"], error["param"]) == (
            "invalid_media",
            "messages[0].content[1].image_url",
        )
        assert "tower does not take this image: [broadcast_shapes]" in error["message"]
        assert len(calls) <= 2  # (when the step is launched, and when its requests are told apart)
        last = events(client.post(CHAT, json={**body, "stream": True}))[-1]
        assert last["error"]["code"] == "invalid_media"
        monkeypatch.undo()
        assert client.post(CHAT, json=body).status_code == 200
