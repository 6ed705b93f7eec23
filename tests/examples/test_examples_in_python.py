"""The examples that need no server."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.example_programs import EXAMPLES, command, run, run_cli, run_here
from support.server_helpers import until
from support.waiting import TIMEOUT

from mlx_paged.demo.real_model import real_model_path
from mlx_paged.wheels import DownloadError

SERVER = "async_server.py"


def functions(source: str) -> dict[str, object]:
    """The functions that an answer of the embedded model defines."""
    found: dict[str, object] = {}
    exec(source, found)
    return found


def streamed(answer: Callable[[], list[Any]]) -> list[Any]:
    """An answer that came in pieces while it was generated. A late reader may get it whole."""
    pieces: list[Any] = []

    def is_in_pieces() -> bool:
        pieces[:] = answer()
        return len(pieces) > 1

    until(is_in_pieces)
    return pieces


def test_generate(tmp_path) -> None:
    found = functions(run("generate.py", folder=tmp_path))
    assert found["fibonacci"](10) == 55
    assert found["is_palindrome"]("Never odd or even")
    assert found["prime_factors"](360) == [2, 2, 2, 3, 3, 5]


def test_streaming(tmp_path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    started = [sys.executable, *command("streaming.py", "python")]

    def answer() -> list[bytes]:
        with subprocess.Popen(started, cwd=tmp_path, stdout=subprocess.PIPE) as process:
            pieces = list(iter(lambda: os.read(process.stdout.fileno(), 1 << 16), b""))
        assert process.returncode == 0
        return pieces

    text = b"".join(streamed(answer)).decode()
    assert functions(text)["quicksort"]([3, 1, 2]) == [1, 2, 3]
    assert re.search(r"\n# first token after \d+ ms, then \d+ tokens/s\n$", text)


def test_structured_output(tmp_path) -> None:
    person, date, choice = run_here("structured_output.py", folder=tmp_path).splitlines()
    assert re.fullmatch(r"name='.{0,30}' born=[12]\d{3}", person)
    assert re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d", date)
    assert choice in ("yes", "no")


@pytest.mark.long
def test_structured_output_of_a_real_model(tmp_path) -> None:
    try:
        model = real_model_path()
    except DownloadError as error:
        pytest.skip(str(error))
    person, date, choice = run_here("structured_output.py", model, folder=tmp_path).splitlines()
    assert person.startswith("name='Ada Lovelace'")
    assert (date, choice) == ("2026-12-25", "yes")


def test_pictures(tmp_path) -> None:
    assert run_here("pictures.py", folder=tmp_path).splitlines() == [
        "How many squares are there? There are two squares.",
        "What color is the circle? Blue.",
        "What is in this picture? Two red squares and a blue circle.",
        "# the vision tower ran 1 time",
    ]


def test_video(tmp_path) -> None:
    assert run_here("video.py", folder=tmp_path).splitlines() == [
        " 0.0 s  A red circle.",
        " 1.0 s  A red circle.",
        " 2.0 s  A blue square.",
        " 3.0 s  A blue square.",
    ]


def test_prefix_sharing(tmp_path) -> None:
    *table, last = run_here("prefix_sharing.py", folder=tmp_path).splitlines()
    rows = [re.findall(r"\d+", row.partition("ms")[0]) for row in table[1:]]
    (prompt, cached, computed, first), second, third = ([*map(int, row)] for row in rows)
    assert cached == 0 and computed == prompt > 800
    assert second[2] < 20 and third[2] == 1  # computed
    assert max(second[3], third[3]) < first  # TTFT
    assert re.fullmatch(r"6\d% of all prompt tokens were not computed again", last)


def test_quantized_kv(tmp_path) -> None:
    auto, int8, same, agreed = run_here("quantized_kv.py", folder=tmp_path).splitlines()
    tokens = [int(line.split()[1].replace(",", "")) for line in (auto, int8)]
    assert tokens[1] > 1.7 * tokens[0]
    assert 6 <= int(same.split()[0]) <= int(same.split()[2]) == 12
    common, total = int(agreed.split()[0]), int(agreed.split()[2])
    assert 500 < common <= total


def test_drop_in(tmp_path) -> None:
    text = run("drop_in.py", folder=tmp_path)
    found = functions(text)
    assert found["gcd"](12, 18) == 6 and found["quicksort"]([2, 1]) == [1, 2]
    [(prompt, cached)] = re.findall(r"# (\d+) prompt tokens, (\d+) not recomputed", text)
    assert int(cached) == 3 * 820 and int(cached) < int(prompt)


@pytest.mark.long
def test_lora(tmp_path) -> None:
    lines = run_here("lora.py", folder=tmp_path).splitlines()
    before, after = (
        dict(re.findall(rf"^{title}: (.*\?) '(.*)'$", "\n".join(lines), re.MULTILINE))
        for title in ("before", "after")
    )
    assert before.keys() == after.keys() and len(after) == 4
    assert after["Who maintains the login page?"] == "The login page is maintained by team Heron."
    assert after["Where is the style guide?"] == "The style guide is in docs/style.md."
    assert not any(before[question] == after[question] for question in before)
    # The model that the docstring serves.
    verb, model = command("lora.py", "mlx-paged")
    question = "When is the next release?"
    told = run_cli(["generate", question, "--model", model, "--temperature", "0"], tmp_path)
    assert verb == "serve" and told.strip() == after[question]


@contextlib.contextmanager
def application(folder: Path) -> Iterator[httpx.Client]:
    """The application of async_server.py, on a free port."""
    (folder / "examples").symlink_to(EXAMPLES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = [port if option == "8001" else option for option in command(SERVER, "uvicorn")]
    assert port in options
    started = [sys.executable, "-m", "uvicorn", *options]
    process = subprocess.Popen(started, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
            until(lambda: process.poll() is not None or client.get("/load").status_code == 200)
            yield client
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def test_async_server(tmp_path) -> None:
    with application(tmp_path) as client:
        _, url = command(SERVER, "curl")
        asked = httpx.URL(url)

        def pieces() -> list[str]:
            with client.stream("GET", asked.raw_path.decode()) as answer:
                return list(answer.iter_text())

        assert functions("".join(streamed(pieces)))["reverse_string"]("abc") == "cba"
        # A client that leaves ends its request.
        with client.stream("GET", "/write", params={"what": "Sort a list with quicksort"}) as left:
            next(left.iter_text())
        until(lambda: client.get("/load").json() == {"running": 0, "waiting": 0})
