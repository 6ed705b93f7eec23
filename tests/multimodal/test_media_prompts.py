"""`LLM` and `AsyncEngine` with media: parts of messages, vLLM's prompts, what the engine gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.fake_media import ROW, FakeMediaModel, NotingEngine, noting_async_engine, run
from support.media_files import clip, picture, png, sound
from test_media_loader import url_of

from mlx_paged import LLM, SamplingParams
from mlx_paged.content import MediaSource, joined
from mlx_paged.engine.chat.messages import messages_of
from mlx_paged.errors import InvalidMediaError, InvalidParameterError
from mlx_paged.multimodal import loader as loading
from mlx_paged.multimodal.marks import marked
from mlx_paged.multimodal.options import IoOptions
from mlx_paged.multimodal.prompt import prepare
from mlx_paged.multimodal.rendering import forms_of, is_complete, rendered

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def media_llm() -> LLM:
    llm = LLM(num_gpu_blocks_override=8, block_size=8)
    llm._client.engine = NotingEngine()
    return llm


@pytest.fixture
def llm(media_llm: LLM) -> Iterator[LLM]:
    media_llm.engine.given.clear()  # type: ignore[attr-defined]
    media_llm.engine.media.calls.clear()  # type: ignore[union-attr]
    yield media_llm


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


# --- LLM.chat -------------------------------------------------------------------------------------


def test_the_parts_of_a_message_in_every_spelling(llm: LLM, tmp_path: Path) -> None:
    content = png()
    (tmp_path / "a.png").write_bytes(content)
    image = Image.open(tmp_path / "a.png")
    parts = [
        {"type": "image_url", "image_url": {"url": url_of(content), "detail": "high"}},
        {"type": "image_url", "image_url": url_of(content)},
        {"type": "input_image", "image_url": url_of(content)},
        {"type": "image", "image": url_of(content)},
        {"type": "image", "url": url_of(content)},
        {"type": "image", "path": tmp_path / "a.png"},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": content},
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": np.asarray(image)},
    ]
    [output] = llm.chat(user(text("look:"), *parts, "what is it?"), SHORT)
    assert output.finished and len(output.outputs[0].token_ids) == 2
    engine: Any = llm.engine
    [(prompt, items)] = engine.media.calls
    assert prompt.count("<image>") == len(parts) == len(items["image"])
    assert prompt.index("look:") < prompt.index("<image>") < prompt.index("what is it?")
    assert all(np.array_equal(item, items["image"][0]) for item in items["image"])
    [prepared] = engine.given
    assert output.prompt_token_ids == prepared.prompt.token_ids
    assert len(prepared.spans) == len(parts)
    for span in prepared.spans:
        assert span.length == span.num_rows == 24 and span.is_atomic
        assert output.prompt_token_ids[span.offset : span.offset + 24] == [ROW] * 24
    # Files and objects have identities of their own; equal ones are equal.
    assert len({span.key for span in prepared.spans[:8]}) == 1
    assert len({span.key for span in prepared.spans[8:]}) == 1


def test_clips_and_sounds(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    audio = url_of(sound(0.4)).partition(",")[2]
    messages = user(
        {"type": "video_url", "video_url": {"url": url_of(clip())}, "num_frames": 3},
        {"type": "video", "video": tmp_path / "clip.mp4", "fps": 1},
        {"type": "video", "video": [picture(), picture()]},
        {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url_of(sound(0.3))}},
        {"type": "audio", "audio": (np.zeros(8000, np.float32), 8000)},
    )
    llm.chat(messages, SHORT)
    [(_, items)] = llm.engine.media.calls  # type: ignore[union-attr]
    assert [len(item.frames) for item in items["video"]] == [3, 2, 2]
    lengths = [len(item.samples) / item.rate for item in items["audio"]]
    assert lengths == pytest.approx([0.4, 0.3, 1.0], abs=0.01)
    [prepared] = llm.engine.given  # type: ignore[attr-defined]
    assert [span.num_rows for span in prepared.spans] == [3, 2, 2, 4, 3, 10]
    assert not any(span.is_atomic for span in prepared.spans)


def test_text_goes_its_old_way(llm: LLM) -> None:
    chats = [{"role": "user", "content": "hello"}]
    plain = LLM(num_gpu_blocks_override=64, block_size=8)
    assert llm.render_chats(chats) == plain.render_chats(chats)
    assert plain.render_chats(user(text("hel"), text("lo"))) == plain.render_chats(
        [{"role": "user", "content": "hel\nlo"}]
    )
    llm.chat(chats, SHORT)
    assert llm.engine.given == [None] and not llm.engine.media.calls  # type: ignore[attr-defined,union-attr]
    with pytest.raises(InvalidMediaError) as caught:
        plain.chat(user(text("a"), {"type": "image", "image": picture()}), SHORT)
    assert caught.value.field == "messages[0].content[1].image"
    assert "reads text only" in caught.value.reason
    assert not plain.engine.intake.media_prompts.has_loaded


@pytest.mark.parametrize(
    ("part", "field", "reason"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url", "missing"),
        ({"type": "image_url", "image_url": {"u": 1}}, "messages[0].content[0].image_url", "URL"),
        ({"type": "image_url", "image_url": {"url": 3}}, "messages[0].content[0].image_url", "URL"),
        (
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "ultra"}},
            "messages[0].content[0].image_url",
            "detail",
        ),
        ({"type": "image_url", "image_url": "x"}, "messages[0].content[0].image_url", "data:"),
        ({"type": "input_image", "file_id": "f"}, "messages[0].content[0].file_id", "not stored"),
        ({"type": "image"}, "messages[0].content[0].image", "missing"),
        ({"type": "image", "image": b"no"}, "messages[0].content[0].image", "not a readable image"),
        ({"type": "input_audio"}, "messages[0].content[0].input_audio", "base64"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "midi"}},
            "messages[0].content[0].input_audio",
            "wav",
        ),
        (
            {"type": "video_url", "video_url": "data:,", "fps": -3},
            "messages[0].content[0].fps",
            "above 0",
        ),
        (
            {"type": "image_url", "image_url": None, "uuid": "first"},
            "messages[0].content[0].uuid",
            "send the content (image_url) again",
        ),
        ({"type": "image", "uuid": "a"}, "messages[0].content[0].uuid", "content (image) again"),
        ({"type": "image", "image": b"", "uuid": 7}, "messages[0].content[0].uuid", "a text of"),
        ({"type": "smell", "smell": 1}, "messages[0].content[0]", "part of type text, image_url"),
        ({"type": "text"}, "messages[0].content[0]", "part of type"),
        ({"type": ["image"]}, "messages[0].content[0]", "part of type"),
        (7, "messages[0].content[0]", "a part with a type"),
        ({"type": "image", "image": Image.new("RGB", (3000, 1))}, "messages[0].content[0].image",
         "too long for the processor"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_wrong_is_named(llm: LLM, part: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.chat(user(part), SHORT)
    # (The processor is given the whole prompt; with one item it is that one.)
    assert caught.value.field == field and reason in str(caught.value)
    assert not llm.engine.given  # type: ignore[attr-defined]


def test_the_item_that_the_processor_refuses_is_named(llm: LLM) -> None:
    good, long = ({"type": "image", "image": Image.new("RGB", (w, 1))} for w in (3, 3000))
    with pytest.raises(InvalidMediaError, match="too long for the processor") as caught:
        llm.chat(user(good, good, long, good), SHORT)
    assert caught.value.field == "messages[0].content[2].image"


def test_the_conversation_is_named_where_there_are_several(llm: LLM) -> None:
    bad = user({"type": "image", "image": b"no"})
    with pytest.raises(InvalidMediaError) as caught:
        llm.chat([user(text("a")), bad], SHORT)
    assert caught.value.field == "messages[1][0].content[0].image"


def test_kinds_that_a_model_lacks_are_named(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine.media, "kinds", ("image",))
    with pytest.raises(InvalidMediaError, match="takes no videos, only images"):
        llm.chat(user({"type": "video", "video": clip()}), SHORT)


def test_a_placeholder_of_the_user_is_text(llm: LLM) -> None:
    [output] = llm.chat(user("see <image>", {"type": "image", "image": picture()}), SHORT)
    [media] = llm.engine.given  # type: ignore[attr-defined]
    assert media is not None and len(media.spans) == 1
    assert "see <image>" in llm.tokenizer.decode(output.prompt_token_ids)


# --- LLM.generate ---------------------------------------------------------------------------------


def test_vllms_prompts(llm: LLM) -> None:
    image, prompt = picture(), "a <image> b"
    outputs = llm.generate(
        [
            {"prompt": prompt, "multi_modal_data": {"image": image}},
            {"prompt": prompt + prompt, "multi_modal_data": {"image": [image, image]}},
            {"prompt": "text"},
            {"prompt_token_ids": [5, 6]},
            "text",
            {"prompt": "<video>", "multi_modal_data": {"video": [image, image], "image": None}},
            {"prompt": "<audio>", "multi_modal_data": {"audio": (np.zeros(1600), 16_000)}},
        ],
        SHORT,
    )
    given = llm.engine.given  # type: ignore[attr-defined]
    assert [0 if m is None else len(m.spans) for m in given] == [1, 2, 0, 0, 0, 1, 1]
    assert outputs[0].prompt == prompt and outputs[3].prompt_token_ids == [5, 6]
    assert outputs[2].prompt_token_ids == outputs[4].prompt_token_ids
    updates = list(llm.stream({"prompt": prompt, "multi_modal_data": {"image": image}}, SHORT))
    assert [u.token_id for u in updates] == outputs[0].outputs[0].token_ids


def test_a_prompt_must_have_as_many_places_as_items(llm: LLM) -> None:
    with pytest.raises(
        InvalidMediaError, match="placeholders for 0 images and there are 1"
    ) as caught:
        llm.generate({"prompt": "none", "multi_modal_data": {"image": picture()}}, SHORT)
    assert caught.value.field == "prompts[0]"


# --- Keys -----------------------------------------------------------------------------------------


def test_keys_are_of_the_content_and_of_how_it_is_seen(llm: LLM) -> None:
    model = FakeMediaModel(llm.tokenizer)
    media = loading.MediaLoader(llm.engine.config.media_options)

    def key(image: Any, prompt: str = "<image>", settings: bytes = b"settings") -> bytes:
        model.settings_digest = settings
        items = media.load([MediaSource("image", image, "part")])
        return prepare(model, prompt, items, "prompt").spans[0].key

    red, blue = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    assert len(key(red)) == 32
    assert key(red) == key(red, "before <image> behind")
    assert len({key(red), key(blue), key(red, settings=b"others"), key(red.resize((5, 4)))}) == 4


def test_a_uuid_names_no_content(llm: LLM) -> None:
    """Whoever reuses another's gets no answer about the other's picture."""
    keys = []
    for color in ("red", "blue", "red"):
        image = Image.new("RGB", (4, 4), color)
        llm.chat(user({"type": "image", "image": image, "uuid": "one"}), SHORT)
        [span] = llm.engine.given[-1].spans  # type: ignore[attr-defined]
        keys.append(span.key)
    assert keys[0] == keys[2] != keys[1]


# --- Templates ------------------------------------------------------------------------------------


class Placeholders:
    def placeholder(self, kind: str, index: int) -> str:
        return f"<{kind}-{index}>"


def template(form: Any) -> str:
    """One that knows lists of parts only, as LLaVA's."""
    counts: dict[str, int] = {}
    out = []
    for message in form:
        for part in message["content"]:
            if isinstance(part, dict) and part["type"] == "text":
                out.append(part["text"])
            elif isinstance(part, dict):
                counts[part["type"]] = counts.get(part["type"], 0) + 1
                out.append(f"<{part['type']}-{counts[part['type']]}>")
    return "".join(out)


def string_template(form: Any) -> str:
    """One that knows texts only."""
    if not all(isinstance(message["content"], str) for message in form):
        raise TypeError("can only concatenate str")
    return "|".join(message["content"] for message in form)


def conversation() -> list[dict[str, Any]]:
    pictures = [MediaSource("image", None, f"part {i}") for i in range(2)]
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ["what", pictures[0], pictures[1]]},
    ]


def test_templates_get_the_form_that_they_take() -> None:
    model = Placeholders()
    assert rendered(conversation(), model, template) == "be briefwhat<image-1><image-2>"
    found = rendered(conversation(), model, string_template)
    assert found == "be brief|what\n<image-1>\n<image-2>"
    # Text alone: a template of lists would drop it without a word.
    texts = [{"role": "user", "content": "hello"}]
    assert rendered(texts, model, template) == "hello"
    assert rendered(texts, model, string_template) == "hello"


def test_what_users_write_is_no_place_and_a_list_is_no_text() -> None:
    image = MediaSource("image", None, "part")
    messages = marked([{"role": "user", "content": ["see <image-1>", image]}], ["<image-1>"])
    own = marked("see <image-1>", ["<image-1>"])
    assert not is_complete(own, messages, Placeholders())
    assert is_complete(f"{own}\n<image-1>", messages, Placeholders())
    messages = [{"role": "user", "content": ["see", image]}]
    as_python = "[{'type': 'text', 'text': 'see'}, {'type': 'image'}]<image-1>"
    assert not is_complete(as_python, messages, Placeholders())
    assert not is_complete("<image-1>", messages, Placeholders())


def test_a_template_that_takes_nothing_says_why() -> None:
    def refuses(form: Any) -> str:
        raise ValueError("roles must alternate")

    with pytest.raises(ValueError, match="roles must alternate"):
        rendered(conversation(), Placeholders(), refuses)


def test_pictures_of_tools_can_be_the_users() -> None:
    image = MediaSource("image", None, "part")
    messages = [
        {"role": "user", "content": "look"},
        {"role": "tool", "tool_call_id": "c", "content": ["shot", image]},
        {"role": "user", "content": "and?"},
    ]
    forms = list(forms_of(messages, Placeholders()))
    assert forms[-1][1:] == [
        {"role": "tool", "tool_call_id": "c", "content": "shot"},
        {"role": "user", "content": "<image-1>\nand?"},
    ]

    def without_tools(form: Any) -> str:
        if any("<image-1>" in m["content"] for m in form if m["role"] == "tool"):
            raise ValueError("no pictures of tools")
        return string_template(form)

    lost: list[str] = []
    text = rendered(messages, Placeholders(), without_tools, log_losses=lost.extend)
    assert text == "look|shot|<image-1>\nand?"
    assert lost == ["media in tool results are moved to a user message"]


def test_contents_are_joined_at_their_texts() -> None:
    image = MediaSource("image", None, "part")
    assert joined("a", "b", "\n") == "a\nb"
    assert joined("a", None, "\n") == "a" and joined("", "b", "\n") == "b"
    assert joined("a", [image], "\n") == ["a", image]
    assert joined([image, "a"], ["b", image], "\n") == [image, "a\nb", image]
    message = {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}
    assert messages_of([message], "messages", IoOptions())[0]["content"] == ["a", "b"]


# --- AsyncEngine ----------------------------------------------------------------------------------


def test_an_async_engine_takes_vllms_prompts() -> None:
    async def main() -> None:
        async with noting_async_engine() as engine:
            prompt = {"prompt": "a <image>", "multi_modal_data": {"image": png()}}
            both = await asyncio.gather(engine.generate(prompt, SHORT), engine.generate("a", SHORT))
            assert all(output.finished for output in both)
            given: Any = engine.engine.given  # type: ignore[attr-defined]
            assert sorted(0 if m is None else len(m.spans) for m in given) == [0, 1]
            assert engine.media_prompts.loader.num_decoded == 1
            with pytest.raises(InvalidMediaError, match=r"prompt\.multi_modal_data\.image: .*no"):
                await engine.generate({**prompt, "multi_modal_data": {"image": b"no"}}, SHORT)

    run(main())


def test_a_cancelled_caller_leaves_nothing_in_work(monkeypatch) -> None:
    entered, ended = threading.Event(), threading.Event()

    def read_url(url: str, *, deadline: Any, **_: Any) -> bytes:
        entered.set()
        try:
            while True:
                deadline.check()
        finally:
            ended.set()

    monkeypatch.setattr(loading, "read_url", read_url)
    # (It does not end by itself.)
    media = loading.MediaLoader(loading.MediaOptions.of(media_limits={"fetch_timeout": 100_000}))

    async def main() -> None:
        source = MediaSource("image", "https://example.com/a.png", "part")
        task = asyncio.create_task(media.load_async([source]))
        assert await asyncio.to_thread(entered.wait, 300)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 300)

    run(main())
    media.close()
