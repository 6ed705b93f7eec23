"""From sources to items: what is decoded once, what is kept, and objects of Python."""

from __future__ import annotations

import base64
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from support.media_files import RED, clip, picture, png, saved, sound

from mlx_paged.content import MediaSource
from mlx_paged.errors import InvalidMediaError, InvalidParameterError
from mlx_paged.multimodal import decode, loader
from mlx_paged.multimodal.items import (
    AudioClip,
    Deadline,
    OutOfTime,
    Unusable,
    VideoFrames,
)
from mlx_paged.multimodal.loader import MediaLoader
from mlx_paged.multimodal.options import IoOptions, MediaLimits, MediaOptions


def make(**options: Any) -> MediaLoader:
    return MediaLoader(MediaOptions.of(**options))


def url_of(content: bytes) -> str:
    return "data:;base64," + base64.b64encode(content).decode()


def items(media: MediaLoader, *given: Any, kind: Any = "image", **options: Any) -> list[Any]:
    sources = [MediaSource(kind, each, f"part {i}", **options) for i, each in enumerate(given)]
    return media.load(sources)


def refusal(media: MediaLoader, given: Any, kind: Any = "image") -> str:
    with pytest.raises(InvalidMediaError) as caught:
        items(media, given, kind=kind)
    assert caught.value.field == "part 0"
    return caught.value.reason


# --- What is decoded once -------------------------------------------------------------------------


def test_one_file_is_decoded_once_however_it_comes(tmp_path: Path) -> None:
    media, content = make(allowed_local_media_path=tmp_path), png()
    (tmp_path / "a.png").write_bytes(content)
    found = items(
        media, content, url_of(content), tmp_path / "a.png", f"file://{tmp_path}/a.png",
        bytearray(content), memoryview(content),
    )  # fmt: skip
    assert len({item.digest for item in found}) == 1
    assert all(item.data is found[0].data for item in found)
    assert [item.part for item in found] == [f"part {i}" for i in range(6)]
    assert media.num_decoded == 1
    items(media, content)  # the next turn of a conversation
    assert media.num_decoded == 1
    items(media, png(25))
    assert media.num_decoded == 2


def test_what_decides_about_the_data_is_in_its_identity() -> None:
    media, content = make(), saved(Image.new("RGBA", (600, 300), (0, 0, 0, 0)))
    [white] = items(media, content)
    [blue] = items(media, content, io=IoOptions(rgba_background_color=(0, 0, 255)))
    [small] = items(media, content, detail="low")
    [same] = items(media, content, detail="high")
    assert white.data.getpixel((0, 0)) == (255, 255, 255)
    assert blue.data.getpixel((0, 0)) == (0, 0, 255)
    assert small.data.size == (512, 256) and white.data.size == (600, 300)
    assert len({white.digest, blue.digest, small.digest}) == 3 and same.digest == white.digest
    frames = clip()
    [all_of_it] = items(media, frames, kind="video")
    [two] = items(media, frames, kind="video", io=IoOptions(num_frames=2))
    assert (len(all_of_it.data.frames), len(two.data.frames)) == (12, 2)
    assert all_of_it.digest != two.digest


def test_the_kept_items_stay_within_their_bytes() -> None:
    each = 24 * 16 * 3
    media = make(media_limits={"cache_bytes": 2 * each})
    a, b, c = (saved(picture(), quality=q, form="JPEG") for q in (50, 70, 90))
    items(media, a)
    items(media, b)
    items(media, a)  # b is the oldest now
    items(media, c)
    assert media._decoded.num_bytes == 2 * each and media.num_decoded == 3
    items(media, a, c)
    assert media.num_decoded == 3
    items(media, b)
    assert media.num_decoded == 4
    items(media, png(48))  # larger than a half, so one of them goes
    assert media._decoded.num_bytes <= 2 * each
    assert make(media_limits={"cache_bytes": 0})._decoded.num_bytes == 0


def test_what_one_thread_decodes_no_other_one_does(monkeypatch) -> None:
    """Eight prompts about one picture at once."""
    entered, go_on = threading.Event(), threading.Event()
    real = decode.decode

    def slow(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(300)
        return real(*args)

    monkeypatch.setattr(loader.decode, "decode", slow)
    media, found = make(), []
    threads = [threading.Thread(target=lambda: found.extend(items(media, png()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert entered.wait(300)
    go_on.set()
    for thread in threads:
        thread.join(300)
    assert len(found) == 8 and media.num_decoded == 1
    assert all(item.data is found[0].data for item in found)


def test_another_prompt_whose_time_is_up_fails_alone() -> None:
    """One that waits for the same picture makes it itself."""
    kept, digest = loader._DecodedItems(1 << 20), b"digest"
    begun, waits = threading.Event(), threading.Event()
    picture, failures = Image.new("RGB", (3, 3)), []

    class Watched:
        def __init__(self, future: Future[Any]) -> None:
            self.future = future

        def result(self) -> Any:
            waits.set()
            return self.future.result()

    def out_of_time() -> Any:
        kept._pending[digest] = Watched(kept._pending[digest])  # type: ignore[assignment]
        begun.set()
        assert waits.wait(300)
        raise OutOfTime("it was not decoded within 60 s")

    def first() -> None:
        try:
            kept.get(digest, out_of_time, Deadline(300, threading.Event(), ""))
        except Unusable as error:
            failures.append(f"{error}")

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(300)
    assert kept.get(digest, lambda: picture, Deadline(300, threading.Event(), "")) is picture
    thread.join(300)
    assert failures == ["it was not decoded within 60 s"]


def test_a_failure_is_not_kept(monkeypatch) -> None:
    media = make()
    for _ in range(2):
        assert "not a readable image" in refusal(media, b"not a picture")
    assert media._decoded.num_bytes == 0


def test_one_url_is_fetched_once_in_a_prompt(monkeypatch) -> None:
    fetched = []

    def read_url(url: str, **_: Any) -> bytes:
        fetched.append(url)
        return png()

    monkeypatch.setattr(loader, "read_url", read_url)
    media = make()
    a, b = "https://example.com/a.png", "https://example.com/b.png"
    found = items(media, a, b, a, a)
    assert sorted(fetched) == [a, b] and len(found) == 4
    items(media, a)  # (it may have changed since)
    assert sorted(fetched) == [a, a, b] and media.num_decoded == 1


# --- Limits ---------------------------------------------------------------------------------------


def test_the_first_item_that_is_too_many_is_named() -> None:
    media = make(limit_mm_per_prompt={"image": 2, "video": {"count": 0}})
    assert len(items(media, png(), png())) == 2
    with pytest.raises(InvalidMediaError, match=r"part 2: .* at most 2 .* has 4"):
        items(media, png(), png(), png(), png())
    assert "at most 0" in refusal(media, clip(), kind="video")


def test_bytes_pixels_and_seconds_are_limited_by_kind() -> None:
    limits = {"max_image_bytes": 50, "max_image_pixels": 10_000, "max_audio_bytes": 100}
    media = make(media_limits=limits)
    for given in (png(), url_of(png())):
        assert "more than 50 bytes" in refusal(media, given)
    assert "more than 100 bytes" in refusal(media, sound(), kind="audio")
    media = make(media_limits={"max_image_pixels": 100})
    assert "more than 100" in refusal(media, png())
    assert "from 1 to 100 pixels" in refusal(media, picture())


def test_a_prompts_items_together_are_limited() -> None:
    media = make(media_limits={"max_prompt_bytes": 3 * 24 * 16 * 3})
    contents = [saved(picture(), "JPEG", quality=q) for q in (50, 60, 70, 80)]
    assert len(items(media, *contents[:3])) == 3
    with pytest.raises(InvalidMediaError, match="have more than 3456 bytes"):
        items(media, *contents)


def test_many_slow_items_take_no_longer_than_one(monkeypatch) -> None:
    """Each of them would be done in time; together they would hold the threads for long."""

    def slow(kind: Any, content: bytes, *_: Any) -> Any:
        time.sleep(0.01)
        return picture()

    monkeypatch.setattr(loader.decode, "decode", slow)
    media = make(media_limits={"decode_timeout": 0.05})
    assert items(media, b"one")
    with pytest.raises(InvalidMediaError, match=r"not decoded within 0\.05 s"):
        items(media, *[b"%d" % i for i in range(400)])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit_mm_per_prompt": {"smell": 1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt.image"),
        ({"limit_mm_per_prompt": {"image": True}}, "limit_mm_per_prompt.image"),
        ({"limit_mm_per_prompt": [1]}, "limit_mm_per_prompt"),
        ({"allowed_local_media_path": "/does/not/exist"}, "allowed_local_media_path"),
        ({"allowed_local_media_path": 3}, "allowed_local_media_path"),
        ({"allowed_local_media_path": __file__}, "allowed_local_media_path"),
        ({"allowed_media_domains": "example.com"}, "allowed_media_domains"),
        ({"allowed_media_domains": ["http://example.com"]}, "allowed_media_domains"),
        ({"allowed_media_domains": ["*.example.com"]}, "allowed_media_domains"),
        ({"media_io_kwargs": {"smell": {}}}, "media_io_kwargs"),
        ({"media_io_kwargs": {"video": {"frames": 3}}}, "media_io_kwargs.video"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"fps": float("nan")}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"audio": {"rate": 3}}}, "media_io_kwargs.audio"),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0]}}},
            "media_io_kwargs.image.rgba_background_color",
        ),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
        ({"media_limits": {"max_smell": 1}}, "media_limits"),
        ({"media_limits": {"max_image_bytes": 0}}, "media_limits.max_image_bytes"),
        ({"media_limits": {"fetch_timeout": "5"}}, "media_limits.fetch_timeout"),
        ({"media_limits": {"fetch_timeout": float("inf")}}, "media_limits.fetch_timeout"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    from mlx_paged.engine.config import EngineConfig

    for refuses in (MediaOptions.of, EngineConfig):
        with pytest.raises(InvalidParameterError) as caught:
            refuses(**options)
        assert caught.value.field == field


# --- Objects of Python ----------------------------------------------------------------------------

ARRAY = np.asarray(picture())


@pytest.mark.parametrize(
    "given",
    [
        picture(), ARRAY, ARRAY.astype(np.int64), ARRAY / 255, (ARRAY / 255).astype(np.float16),
        ARRAY.transpose(2, 0, 1), np.dstack([ARRAY, np.full((16, 24, 1), 255, np.uint8)]),
        mx.array(ARRAY), (mx.array(ARRAY) / 255).astype(mx.bfloat16), picture(mode="RGBA"),
    ],
    ids=["Pillow", "uint8", "int64", "real", "half", "channels first", "alpha", "mlx", "bfloat16",
         "RGBA"],
)  # fmt: skip
def test_pictures_as_objects(given: Any) -> None:
    [item] = items(make(), given)
    assert item.data.mode == "RGB" and item.data.size == (24, 16)
    assert item.data.getpixel((0, 0)) == RED
    [same] = items(make(), picture())
    assert item.digest == same.digest


def test_pictures_as_objects_that_differ_are_told_apart() -> None:
    media = make()
    sizes = [(4, 6), (6, 4), (8, 3)]  # of as many bytes
    found = items(media, *[Image.new("RGB", size, RED) for size in sizes])
    assert len({item.digest for item in found}) == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "not NoneType"),
        (7, "not int"),
        ({"url": "x"}, "not dict"),
        (np.zeros((2, 2, 2)), "must be of shape"),
        (np.zeros((0, 4, 3), np.uint8), "must be of shape"),
        (np.full((2, 2), 2.0), "in [0, 1]"),
        (np.full((2, 2), np.nan), "in [0, 1]"),
        (np.full((2, 2), 300), "in [0, 255]"),
        (np.full((2, 2), "a"), "must hold numbers"),
        (Path("/does/not/exist.png"), "cannot be read: No such file"),
        (Path("nul\0l"), "cannot be read"),
        (Path("/"), "cannot be read: Is a directory"),
    ],
    ids=lambda value: str(type(value).__name__)[:20],
)
def test_objects_that_are_no_pictures(given: Any, reason: str) -> None:
    assert reason in refusal(make(), given)


def test_clips_as_objects() -> None:
    frames = np.stack([np.full((4, 6, 3), 20 * i, np.uint8) for i in range(5)])
    media = make()
    found = items(
        media, frames, list(frames), [Image.fromarray(f) for f in frames], mx.array(frames),
        (frames, {"fps": 1.0}), VideoFrames(frames, 1.0), kind="video",
    )  # fmt: skip
    assert len({item.digest for item in found}) == 1
    assert (found[0].data.frames == frames).all() and found[0].data.fps == 1.0
    [faster] = items(media, (frames, {"fps": 2}), kind="video")
    assert faster.data.fps == 2.0 and faster.digest != found[0].digest
    assert "not all of one size" in refusal(media, [frames[0], frames[0][:2]], kind="video")
    for wrong in ([], 3, (frames, {"fps": 0}), np.zeros((2, 2, 3))):
        assert refusal(media, wrong, kind="video")


def test_sounds_as_objects() -> None:
    samples = np.sin(np.arange(1600) / 20).astype(np.float32)
    media = make()
    found = items(
        media, samples, (samples, 16_000), AudioClip(samples, 16_000), mx.array(samples),
        np.stack([samples, samples]), kind="audio",
    )  # fmt: skip
    assert len({item.digest for item in found}) == 1
    assert np.allclose(found[0].data.samples, samples)
    [slower] = items(media, (samples, 8000), kind="audio")
    assert len(slower.data.samples) == pytest.approx(3200, abs=64) and slower.data.rate == 16_000
    [integers] = items(media, (samples * 32767).astype(np.int16), kind="audio")
    assert np.allclose(integers.data.samples, samples, atol=1e-3)
    for wrong in (np.array([np.nan]), np.zeros((0,)), (samples, 0), (samples, 0.5), ["a"], 3):
        assert refusal(media, wrong, kind="audio")


def test_the_page_has_the_limits_that_hold() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/media.md").read_text()
    rows = [f"| `{name}` | {default} |" for name, default in asdict(MediaLimits()).items()]
    assert [row for row in rows if row not in page] == []


def test_the_page_has_the_errors_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/media.md").read_text()
    reasons = [
        refusal(make(), url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
        MediaLimits().problem_of_size(60_000, 60_000),
        refusal(make(), "http://127.0.0.1/a.mp4", kind="video"),
    ]
    assert [reason for reason in reasons if f": {reason}\n" not in page] == []


def test_the_example_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")
    page = (Path(__file__).resolve().parents[2] / "docs/media.md").read_text()
    example, output = re.findall(
        r"```(?:python)?\n(.*?)```", page.partition("Or in Python")[2], re.DOTALL
    )[:2]
    exec(compile(example, "docs/media.md", "exec"), {})
    assert capsys.readouterr().out == output
