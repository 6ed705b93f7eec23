"""Pictures whose decoding holds the interpreter's lock are decoded in another process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media_files import RED, saved

from mlx_paged.multimodal import decode, picture_process
from mlx_paged.multimodal.items import Deadline, Unusable
from mlx_paged.multimodal.options import IoOptions, MediaLimits
from mlx_paged.multimodal.picture_process import PictureProcesses


@pytest.fixture(scope="module")
def processes() -> Iterator[PictureProcesses]:
    made = PictureProcesses()
    yield made
    made.close()


def image_of(processes: PictureProcesses, content: bytes, **options: Any) -> Image.Image:
    work = Deadline(300, threading.Event(), "it was not decoded")
    return processes.image_of(content, MediaLimits(), IoOptions(), work, **options)


def webp(size: tuple[int, int] = (700, 500)) -> bytes:
    return saved(Image.new("RGB", size, RED), "WEBP", lossless=True, method=0)


def test_a_large_webp_is_decoded_in_another_process(
    processes: PictureProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, before = webp(), processes.num_decoded
    expected = np.array(decode.image_of(content, MediaLimits(), IoOptions()))
    monkeypatch.setattr(decode, "image_of", lambda *_, **__: pytest.fail("decoded here"))
    for _ in range(2):
        assert (np.array(image_of(processes, content)) == expected).all()
    assert processes.num_decoded == before + 2 and processes.num_started == 1


@pytest.mark.parametrize(
    ("form", "size", "expected"),
    [
        ("WEBP", (700, 500), True),
        ("WEBP", (100, 100), False),
        ("PNG", (700, 500), False),
        ("PNG", (4096, 2048), True),
        ("JPEG", (4096, 2048), False),  # (which is decoded at a fraction of its size)
    ],
)
def test_which_pictures_are(form: str, size: tuple[int, int], expected: bool) -> None:
    content = saved(Image.new("RGB", size, RED), form)
    assert picture_process.needs_process(content, MediaLimits()) == expected


def test_a_large_picture_comes_back_as_small_as_the_processor_makes_it(
    processes: PictureProcesses,
) -> None:
    content = saved(Image.new("RGB", (4096, 2048), RED), "PNG")
    found = image_of(processes, content, sufficient_side=lambda: 256)
    assert found.size == (1024, 512) and found.getpixel((10, 10)) == tuple(RED)


def test_a_broken_picture_is_refused_and_its_process_goes_on(processes: PictureProcesses) -> None:
    content = saved(Image.new("RGB", (4096, 2048), RED), "PNG")
    image_of(processes, webp())
    started = processes.num_started
    with pytest.raises(Unusable, match="broken"):
        image_of(processes, content[: len(content) // 2])
    image_of(processes, webp())
    assert processes.num_started == started


def test_a_picture_that_ends_its_process_is_refused_and_the_next_one_starts_another() -> None:
    dies = "import sys; sys.stdin.buffer.read(100)"
    mortal = PictureProcesses((sys.executable, "-c", dies))
    for count in (1, 2):
        with pytest.raises(Unusable, match="the process that decoded it has ended"):
            image_of(mortal, webp())
        assert mortal.num_started == count
    mortal.close()


def test_prints_of_libraries_are_no_answers() -> None:
    prints = "import os; os.write(1, bytes(range(1, 9)))"
    module = "from mlx_paged.multimodal import picture_process; picture_process.main()"
    chatty = PictureProcesses((sys.executable, "-c", f"{prints}; {module}"))
    assert image_of(chatty, webp()).size == (700, 500)
    chatty.close()


def test_a_client_that_has_gone_ends_the_process_that_decodes_for_it() -> None:
    slow = PictureProcesses((sys.executable, "-c", "import sys; sys.stdin.buffer.read()"))
    gone = threading.Event()
    work = Deadline(300, gone, "it was not decoded")
    threading.Timer(0.2, gone.set).start()
    with pytest.raises(CancelledError):
        slow.image_of(webp(), MediaLimits(), IoOptions(), work)
    slow.close()


def test_where_no_process_can_be_started_it_is_decoded_here() -> None:
    none = PictureProcesses(("/no/such/program",))
    for _ in range(3):  # (none keeps a place)
        assert image_of(none, webp()).size == (700, 500)


PARENT = """
import sys, threading
sys.path[:0] = {path!r}
from support.media_files import *
from tests_of_it import image_of, webp
from mlx_paged.multimodal.picture_process import PictureProcesses
processes = PictureProcesses()
image_of(processes, webp())
print(processes._idle[0]._popen.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux's")
def test_no_process_outlives_the_one_that_started_it() -> None:
    code = PARENT.replace("from tests_of_it", f"from {__name__}").format(path=sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    readable, _, _ = select.select([child], [], [], 120)
    assert readable, "it still runs"
    os.close(child)
    parent.stdin.close()
    parent.stdout.close()
