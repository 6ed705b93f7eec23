"""Pictures, clips and sounds from files: what is decoded, and what is refused and why."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from support.media_files import (
    RED,
    WHITE,
    clip,
    gif,
    mutated,
    odd_clips,
    odd_pictures,
    picture,
    png,
    png_of_size,
    png_with_text_bomb,
    saved,
    sound,
)

from mlx_paged.content import MediaSource
from mlx_paged.errors import InvalidMediaError
from mlx_paged.multimodal import decode
from mlx_paged.multimodal.items import Deadline, Unusable
from mlx_paged.multimodal.loader import MediaLoader
from mlx_paged.multimodal.options import IoOptions, MediaLimits, MediaOptions

# Files that are broken on purpose, of each kind; by hand 1,000.
NUM_MUTATED = int(os.environ.get("MLX_PAGED_MUTATED_MEDIA", "60"))

PICTURES = odd_pictures()
BROKEN = {
    "bomb": "more than 67108864 pixels",
    "bomb of Pillow's": "10000 x 10000 pixels, which is more than 67108864",
    "text bomb": "its picture is broken",
    "svg": "it looks like XML or SVG",
    "eps": "it looks like PostScript",
    "html": "it looks like HTML",
    "zip": "it looks like ZIP",
    "empty": "it is empty",
    "zeros": "500 bytes of an unknown kind",
    "clip": "a kind of MP4",
    "sound": "it looks like RIFF",
}


def work(seconds: float = 300) -> Deadline:
    return Deadline(seconds, threading.Event(), "it was not decoded")


def image_of(content: bytes, **limits: Any) -> Image.Image:
    return decode.image_of(content, MediaLimits(**limits), IoOptions())


def video_of(content: bytes, limits: dict[str, Any] | None = None, **options: Any) -> Any:
    return decode.video_of(content, MediaLimits(**limits or {}), IoOptions(**options), work())


def audio_of(content: bytes, rate: int = 16_000, **limits: Any) -> Any:
    return decode.audio_of(content, MediaLimits(**limits), rate, work())


def loaded(loader: MediaLoader, kind: Any, content: bytes) -> Any:
    return loader.load([MediaSource(kind, content, "part")])[0].data


@pytest.fixture(scope="module")
def loader() -> Any:
    loader = MediaLoader(MediaOptions())
    yield loader
    loader.close()


# --- Pictures -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("name", sorted(PICTURES.keys() - BROKEN.keys()))
def test_pictures_of_every_mode_are_rgb(name: str) -> None:
    found = image_of(PICTURES[name])
    assert found.mode == "RGB" and found.width >= 1
    if name.startswith(("I;16", "1 ", "EXIF", "many")):
        return
    grey = name.split()[0] in ("1", "L", "LA", "I", "F")
    left = (0, 0, 0) if name == "1 PNG" else (76, 76, 76) if grey else RED
    assert np.abs(np.subtract(found.getpixel((0, 0)), left)).max() <= 8
    if name != "animated":
        assert np.abs(np.subtract(found.getpixel((found.width - 1, 0)), WHITE)).max() <= 8


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_what_is_no_picture_is_refused_with_the_reason(loader: MediaLoader, name: str) -> None:
    with pytest.raises(InvalidMediaError) as caught:
        loaded(loader, "image", PICTURES[name])
    assert caught.value.field == "part" and BROKEN[name] in caught.value.reason


def test_a_comment_that_unpacks_to_80_mb_is_not_unpacked() -> None:
    content = png_with_text_bomb(80)
    assert len(content) < 100_000
    with pytest.raises(Unusable, match="broken"):
        image_of(content)


def test_exif_turns_a_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    found = image_of(saved(picture(), "JPEG", exif=exif))
    assert found.size == (16, 24)
    top, bottom = found.getpixel((8, 2)), found.getpixel((8, 21))
    assert top[1] < 60 < 200 < bottom[1]  # red is above now


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_turns_nothing() -> None:
    assert image_of(PICTURES["EXIF broken"]).size == (24, 16)


def test_sixteen_bits_keep_their_levels() -> None:
    levels = np.array([[0, 257, 32896, 65535]], np.uint16)
    found = image_of(saved(Image.fromarray(levels)))
    assert np.asarray(found)[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_shows_the_background(mode: str) -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0)).convert(mode)
    if mode == "P":
        clear.info["transparency"] = clear.getpixel((0, 0))
    content = saved(clear, "PNG")
    assert image_of(content).getpixel((0, 0)) == WHITE
    blue = IoOptions(rgba_background_color=(0, 0, 255))
    assert decode.image_of(content, MediaLimits(), blue).getpixel((1, 1)) == (0, 0, 255)


def test_half_of_the_alpha_is_half_of_the_background() -> None:
    found = image_of(saved(Image.new("RGBA", (1, 1), (0, 0, 0, 128))))
    assert found.getpixel((0, 0)) == (127, 127, 127)


def test_the_first_frame_of_what_moves() -> None:
    assert image_of(gif(5)).getpixel((0, 0)) == RED


def test_pixels_are_counted_before_they_are_decoded() -> None:
    """The file has next to no data: were it decoded, it would be called truncated."""
    with pytest.raises(Unusable, match="40 x 50 pixels, which is more than 1999"):
        image_of(png_of_size(40, 50), max_image_pixels=1999)
    with pytest.raises(Unusable, match=r"truncated|broken"):
        image_of(png_of_size(40, 50), max_image_pixels=2000)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((1, 8_000_000), "no side may have more than 32768"),
        ((67_108_864, 1), "no side may have more than 32768"),
        ((32_769, 200), "no side may have more than 32768"),
        ((4097, 1), "one side is more than 4096 times the other"),
        ((2, 8193), "one side is more than 4096 times the other"),
    ],
)
def test_extreme_sides_are_refused_by_the_header(size: tuple[int, int], said: str) -> None:
    with pytest.raises(Unusable, match=said):
        image_of(png_of_size(*size))


def test_sides_up_to_the_limits_are_decoded() -> None:
    content = saved(Image.new("RGB", (200, 1)))
    assert image_of(content).size == (200, 1)
    assert image_of(content, max_image_side=200, max_image_aspect_ratio=200).size == (200, 1)
    for limit in ({"max_image_side": 199}, {"max_image_aspect_ratio": 199}):
        with pytest.raises(Unusable, match="200 x 1 pixels"):
            image_of(content, **limit)


def test_programs_may_not_give_extreme_sides_either() -> None:
    loader = MediaLoader(MediaOptions())
    for given in (Image.new("RGB", (4097, 1)), np.zeros((1, 4097, 3), np.uint8)):
        with pytest.raises(InvalidMediaError, match="one side is more than 4096 times"):
            loader.load([MediaSource("image", given, "image")])
    loader.close()


def test_a_jpeg_of_low_detail_is_decoded_at_a_fraction_of_its_size() -> None:
    content = saved(Image.new("RGB", (4096, 2048), RED), "JPEG")
    loaded = []
    with pytest.MonkeyPatch.context() as patch:
        load = JpegImageFile.load

        def seen(image: Any) -> Any:
            loaded.append(image.size)
            return load(image)

        patch.setattr(JpegImageFile, "load", seen)
        found = decode.image_of(content, MediaLimits(), IoOptions(), is_low=True)
    assert found.size == (512, 256) and set(loaded) == {(1024, 512)}
    assert np.abs(np.array(found)[10, 10].astype(int) - RED).max() < 4


@pytest.mark.parametrize(
    ("form", "size", "side", "expected"),
    [
        ("JPEG", (4096, 4096), 512, (1024, 1024)),
        ("JPEG", (8192, 2048), 512, (4096, 1024)),  # (the shorter side counts)
        ("JPEG", (4096, 4096), 2048, (4096, 4096)),
        ("JPEG", (4096, 4096), None, (4096, 4096)),
        ("JPEG", (2048, 2048), 512, (2048, 2048)),  # (which takes no time)
        ("PNG", (4096, 4096), 512, (1024, 1024)),
    ],
)
def test_a_large_picture_is_decoded_at_a_fraction_that_the_processor_makes_smaller(
    form: str, size: tuple[int, int], side: int | None, expected: tuple[int, int]
) -> None:
    media = MediaLoader(MediaOptions(), sufficient_side=lambda: side)
    content = saved(Image.new("RGB", size, RED), form)
    [item] = media.load([MediaSource("image", content, "image")])
    media.close()
    assert item.data.size == expected
    assert np.abs(np.array(item.data)[10, 10].astype(int) - RED).max() < 4


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_that_was_cut_is_refused(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    content = saved(Image.fromarray(noise), form)
    with pytest.raises(Unusable):
        image_of(content[: len(content) // 2])


# --- Clips ----------------------------------------------------------------------------------------


def levels(found: Any) -> list[int]:
    """The numbers of frames."""
    return [round((int(frame[0, 0, 0]) - 16) / 8) for frame in found.frames]


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_all_frames_of_a_short_clip(form: str) -> None:
    found = video_of(clip(form=form))
    assert found.frames.shape == (12, 16, 32, 3) and found.frames.dtype == np.uint8
    assert levels(found) == list(range(12))
    assert found.fps == pytest.approx(6, rel=0.01)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_frames": 1}, [0]),
        ({"num_frames": 4}, [0, 3, 7, 11]),
        ({"num_frames": -1}, list(range(12))),
        ({"fps": 2}, [0, 3, 7, 11]),  # the clip has two seconds
        ({"fps": 2, "num_frames": 2}, [0, 11]),
        ({"fps": 0.1}, [0]),
        ({"fps": 100}, list(range(12))),
    ],
)
def test_frames_are_taken_as_vllm_takes_them(options: Any, expected: list[int]) -> None:
    assert decode.sampled_indices(12, 2.0, IoOptions(**options)) == expected
    found = video_of(clip(), **options)
    assert levels(found) == expected
    if len(expected) > 1:
        assert found.fps == pytest.approx((len(expected) - 1) / (11 / 6), rel=0.01)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_video_seconds": 1.5}, "longer than 1.5 s"),
        ({"max_video_pixels": 12 * 16 * 32 - 1}, "12 frames of 32 x 16 pixels are more than 6143"),
        ({"max_image_pixels": 16 * 32 - 1}, "32 x 16 pixels, which is more than 511"),
    ],
)
def test_a_clip_that_is_too_much_is_refused(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        video_of(clip(), limits)


def test_a_clip_takes_no_longer_than_it_may() -> None:
    late = Deadline(1e-9, threading.Event(), "it was not decoded")
    with pytest.raises(Unusable, match="not decoded within 1e-09 s"):
        decode.video_of(clip(), MediaLimits(), IoOptions(), late)


def test_a_cut_clip_gives_the_frames_that_are_there() -> None:
    content = clip(40, form="matroska", size=(64, 64))
    found = video_of(content[: len(content) * 2 // 3], num_frames=-1)
    assert 5 < len(found.frames) < 40
    assert levels(found)[:3] == [0, 1, 2]


@pytest.mark.parametrize("name", ["playlist", "concat", "picture", "svg", "sound"])
def test_what_is_no_clip_is_refused(name: str) -> None:
    with pytest.raises(Unusable, match="not a readable clip"):
        video_of(odd_clips()[name])


def test_no_other_file_is_opened_for_a_clip(tmp_path, monkeypatch) -> None:
    """A playlist reaches its files only if its format is allowed and files may be opened."""
    (tmp_path / "secret.mp4").write_bytes(clip())
    playlist = f"ffconcat version 1.0\nfile {tmp_path}/secret.mp4\n".encode()
    for formats in (decode._CONTAINERS["video"], decode._CONTAINERS["video"] + ",concat,hls"):
        monkeypatch.setitem(decode._CONTAINERS, "video", formats)
        with pytest.raises(Unusable):
            video_of(playlist)


# --- Sounds ---------------------------------------------------------------------------------------


def test_a_sound_has_one_channel_and_the_models_rate() -> None:
    found = audio_of(sound(0.5, rate=8000, channels=2))
    assert found.rate == 16_000 and found.samples.dtype == np.float32
    assert len(found.samples) == pytest.approx(8000, abs=64)
    # 200 Hz still: twice as many passes through zero as periods.
    passes = np.count_nonzero(np.diff(np.signbit(found.samples[200:-200])))
    assert passes == pytest.approx(2 * 200 * (len(found.samples) - 400) / 16_000, abs=2)
    assert 0.4 < np.abs(found.samples).max() <= 1


def test_a_sound_that_is_too_long_is_refused() -> None:
    with pytest.raises(Unusable, match=r"longer than 0\.4 s"):
        audio_of(sound(0.5), max_audio_seconds=0.4)


def test_a_clip_without_sound_has_none() -> None:
    with pytest.raises(Unusable, match="it has no audio"):
        audio_of(clip())


# --- Hostile files --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_broken_files_are_decoded_or_refused(loader: MediaLoader, kind: str, recwarn) -> None:
    files = {
        "image": PICTURES,
        "video": odd_clips(),
        "audio": {"wav": sound(), "clip": odd_clips()["matroska"]},
    }[kind]
    ends = {"decoded": 0, "refused": 0}
    for _, content in mutated(files, NUM_MUTATED):
        try:
            loaded(loader, kind, content)
            ends["decoded"] += 1
        except InvalidMediaError as error:
            assert error.field == "part" and 5 < len(error.reason) < 300
            assert "/tmp" not in error.reason and "/root" not in error.reason
            ends["refused"] += 1
    assert sum(ends.values()) == NUM_MUTATED and min(ends.values()) > 0


# --- What is not installed, and what is not imported ----------------------------------------------


@pytest.mark.parametrize(("kind", "package"), [("image", "PIL"), ("video", "av"), ("audio", "av")])
def test_a_missing_package_is_named(loader, monkeypatch, kind: str, package: str) -> None:
    content = {"image": png(2, 2), "video": clip(3), "audio": sound(0.2)}[kind]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidMediaError, match=r"pip install 'mlx-paged\[vision\]'"):
        loaded(loader, kind, content)
