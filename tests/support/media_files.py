"""Generates image, video and audio files, valid and broken."""

from __future__ import annotations

import io
import random
import struct
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

RED, WHITE = (255, 0, 0), (255, 255, 255)


def picture(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    """Red on the left, white on the right."""
    image = Image.new("RGB", (width, height), WHITE)
    ImageDraw.Draw(image).rectangle((0, 0, max(0, width // 2 - 1), height - 1), fill=RED)
    return image.convert(mode)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int = 24, height: int = 16) -> bytes:
    return saved(picture(width, height))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims a large size but has almost no data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + png_chunk(b"IDAT", data)
        + png_chunk(b"IEND", b"")
    )


def png_with_text_bomb(megabytes: int = 80) -> bytes:
    """A small PNG with a compressed comment that unpacks to many bytes."""
    good = png()
    packed = zlib.compress(b"a" * (megabytes << 20))
    chunk = png_chunk(b"zTXt", b"Comment\0\0" + packed)
    return good[:33] + chunk + good[33:]


def gif(num_frames: int = 3, size: tuple[int, int] = (8, 8)) -> bytes:
    """Red first, then other colors."""
    colors = [RED, *[(0, i % 256, 255) for i in range(1, num_frames)]]
    frames = [Image.new("RGB", size, color) for color in colors]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


def clip(
    num_frames: int = 12,
    fps: int = 6,
    size: tuple[int, int] = (32, 16),
    form: str = "mp4",
    codec: str = "mpeg4",
) -> bytes:
    """Gray frames of increasing brightness: frame i has level 16 + 8 * i."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(num_frames):
            level = np.full((size[1], size[0], 3), min(255, 16 + 8 * i), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(level, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def sound(seconds: float = 0.5, rate: int = 8000, channels: int = 2) -> bytes:
    """A 200 Hz tone, as WAV."""
    times = np.arange(int(seconds * rate)) / rate
    wave_of = np.sin(2 * np.pi * 200 * times)
    samples = np.repeat((wave_of * 20000).astype("<i2")[:, None], channels, axis=1)
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(channels)
        target.setsampwidth(2)
        target.setframerate(rate)
        target.writeframes(samples.tobytes())
    return file.getvalue()


class _Files(Mapping[str, bytes]):
    """Files by name, each made when it is first read."""

    def __init__(self, makers: Mapping[str, Callable[[], bytes]]) -> None:
        self._makers = makers
        self._made: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _of_mode(mode: str, form: str) -> bytes:
    """An image of one of Pillow's modes in a format of files."""
    if mode == "I;16":
        levels = np.linspace(0, 65535, 24 * 16).reshape(16, 24).astype(np.uint16)
        return saved(Image.fromarray(levels), form)
    return saved(picture(mode=mode), form)


@cache
def odd_pictures() -> Mapping[str, bytes]:
    """Images of every mode, and other files with an image's name, each made when it is read."""
    makers: dict[str, Callable[[], bytes]] = {
        f"{mode} {form}": partial(_of_mode, mode, form)
        for mode, form in (
            ("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"),
            ("I;16", "PNG"), ("I", "TIFF"), ("F", "TIFF"), ("CMYK", "JPEG"), ("CMYK", "TIFF"),
            ("YCbCr", "JPEG"), ("LAB", "TIFF"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("RGB", "BMP"),
            ("RGB", "PPM"), ("RGB", "JPEG2000"), ("P", "GIF"), ("RGBA", "ICO"), ("RGB", "AVIF"),
        )
    }  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = 6
    svg = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>'
    makers |= {
        "EXIF": lambda: saved(picture(), "JPEG", exif=exif),
        "EXIF broken": lambda: saved(picture(), "JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 40),
        "1 pixel": partial(png, 1, 1),
        "1 x 4000": partial(png, 1, 4000),
        "animated": gif,
        "many frames": partial(gif, 400, (2, 2)),
        "bomb": partial(png_of_size, 60000, 60000),
        "bomb of Pillow's": partial(png_of_size, 10000, 10000),
        "text bomb": partial(png_with_text_bomb, 2),
        "svg": lambda: svg,
        "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage",
        "html": lambda: b"<!DOCTYPE html><html>404</html>",
        "zip": lambda: b"PK\x03\x04" + bytes(60),
        "empty": lambda: b"",
        "zeros": lambda: bytes(500),
        "clip": partial(clip, 4),
        "sound": partial(sound, 0.1),
    }
    return _Files(makers)


@cache
def odd_clips() -> dict[str, bytes]:
    """Videos of several kinds, and other files with a video's name."""
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    concat = b"ffconcat version 1.0\nfile /etc/passwd\n"
    return {
        "mp4": clip(),
        "matroska": clip(form="matroska"),
        "avi": clip(form="avi"),
        "one frame": clip(1),
        "gif": gif(),
        "sound": sound(),
        "picture": png(),
        "playlist": playlist,
        "concat": concat,
        "svg": b"<svg/>",
        "empty": b"",
    }


def mutated(files: Mapping[str, bytes], count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yields `count` files: the given ones, then truncated, flipped, filled, doubled ones."""
    chance = random.Random(seed)
    names = list(files)
    for i in range(count):
        name = names[i % len(names)]
        data = files[name]
        if i < len(names) or len(data) < 8:
            yield name, data
            continue
        change = chance.choice(("cut", "flip", "flip", "fill", "splice", "grow", "head"))
        place = chance.randrange(len(data))
        found = bytearray(data)
        if change == "cut":
            found = found[:place]
        elif change == "flip":
            for _ in range(chance.randrange(1, 20)):
                found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        elif change == "fill":
            size = chance.randrange(1, 64)
            found[place : place + size] = bytes([chance.choice((0, 255))]) * size
        elif change == "splice":
            other = files[chance.choice(names)]
            found[place:] = other[min(place, len(other)) :]
        elif change == "head":
            other = files[chance.choice(names)]
            found[:16] = other[:16]
        else:
            found += chance.randbytes(200)
        yield f"{name} {change} {i}", bytes(found)
