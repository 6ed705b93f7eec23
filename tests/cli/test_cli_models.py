"""`mlx-paged pull`, `list`, `show` and `rm`, with a hub on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.fake_hub import COMMIT, FakeHub

from mlx_paged.child_jobs import Outcome
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.doctor import jobs

LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "quantization": {"bits": 4, "group_size": 64},
}
WEIGHTS = bytes(range(256)) * (12 << 12)  # 12 MiB: the library writes 10 at once
MODELS = {
    "tiny/llama": {
        "config.json": json.dumps(LLAMA).encode(),
        "model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}",
        "notes.pdf": b"not needed",
    },
    "tiny/unknown": {
        "config.json": b'{"model_type": "no_such_family"}',
        "model.safetensors": b"weights",
    },
    "tiny/gguf": {"a.Q4_0.gguf": b"GGUF4", "a.Q8_0.gguf": b"GGUF8"},
    "tiny/sizes": {
        "a-Q2.gguf": bytes(1 << 20),
        "a-Q4.gguf": bytes(9 << 20),
        "b/a-Q8-00001-of-00002.gguf": bytes(10 << 20),
        "b/a-Q8-00002-of-00002.gguf": bytes(10 << 20),
        "mmproj-F16.gguf": bytes(12 << 20),
    },
}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub(MODELS).running() as running:
        yield running


@dataclass
class Done:
    """The output and exit status of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def path(self) -> Path:
        return Path(self.stdout.splitlines()[-1])


class Shell:
    """Runs `mlx-paged` in this process, with a cache of its own."""

    def __init__(self, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.cache = cache
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Done:
        self._capfd.readouterr()
        status = status_of(app, arguments)
        return Done(status, *self._capfd.readouterr())

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.status == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Shell:
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("COLUMNS", "200")
    memory = {"on_gpu": True, "device_bytes": 20 << 20, "utilization": 0.9}
    monkeypatch.setattr(jobs, "run_in_child", lambda names: {jobs.MEMORY: Outcome(memory)})
    return Shell(tmp_path / "cache", capfd)


def test_a_model_is_pulled_listed_shown_and_removed(shell: Shell) -> None:
    done = shell("pull", "tiny/llama")
    assert done.status == 0, done.stderr
    path = done.path
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert "fetching 12.0 MiB of tiny/llama, 3 files" in done.stderr
    [listed] = shell.json("list")
    assert (listed["model"], listed["revision"]) == ("tiny/llama", COMMIT)
    assert listed["path"] == str(path)
    assert listed["weights"] == len(WEIGHTS) and listed["complete"] is True
    assert re.search(r"^tiny/llama +main 5f5f5f5 +12.0 MiB +just now", shell("list").stdout, re.M)
    shown = shell.json("show", "tiny/llama")
    assert (shown["family"], shown["served"], shown["bits"]) == ("llama", "yes", 4)
    assert (shown["context"], shown["fits"]) == (4096, True)
    done = shell("rm", "--yes", "tiny/llama@5f5f")
    assert "12.0 MiB freed" in done.stdout and shell.json("list") == []


def test_a_connection_that_ends_is_made_again(shell: Shell, hub: FakeHub) -> None:
    hub.breaks_after, hub.sent = 11 << 20, 0
    done = shell("pull", "tiny/llama")
    assert done.status == 0, done.stderr
    assert (done.path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent < (11 << 20) + len(WEIGHTS)


def test_an_interrupted_download_keeps_files_that_are_whole(shell: Shell, hub: FakeHub) -> None:
    assert shell("pull", "tiny/llama", "--include", "*.json").status == 0
    hub.breaks_after, hub.is_gone = 11 << 20, True
    try:
        done = shell("pull", "tiny/llama")
    finally:
        hub.is_gone = False
    assert done.status == 1 and len(done.stderr.splitlines()) == 2
    hub.sent = 0
    again = shell("pull", "tiny/llama")
    assert again.status == 0, again.stderr
    assert "fetching 12.0 MiB" in again.stderr and hub.sent == len(WEIGHTS)


def test_what_a_killed_download_left_is_listed_and_removed(shell: Shell) -> None:
    blobs = shell.cache / "models--tiny--llama" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "5f5f.1234abcd.incomplete").write_bytes(bytes(3 << 20))
    [listed] = shell.json("list")
    assert (listed["model"], listed["revision"], listed["complete"]) == ("tiny/llama", "", False)
    assert "tiny/llama (incomplete)" in shell("list").stdout and shell.json("list", "--fits") == []
    assert "3.0 MiB freed" in shell("rm", "-y", "tiny/llama").stdout
    assert shell.json("list") == []


def test_files_by_pattern_and_a_pinned_revision(shell: Shell) -> None:
    done = shell("pull", "tiny/gguf", "--include", "*Q4_0*", "--revision", COMMIT)
    assert done.status == 0, done.stderr
    path = done.path
    assert [file.name for file in path.iterdir()] == ["a.Q4_0.gguf"]
    assert shell.json("show", "tiny/gguf")["served"] == "yes, each GGUF file by its path"


def test_what_is_not_served_or_does_not_fit_says_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny/unknown", "tiny/llama"):
        assert shell("pull", name).status == 0
    assert shell.json("show", "tiny/unknown")["served"].startswith("no: ")
    assert len(shell.json("list", "--fits")) == 2
    little = {"on_gpu": False, "device_bytes": 1 << 20, "utilization": 0.9}
    monkeypatch.setattr(jobs, "run_in_child", lambda names: {jobs.MEMORY: Outcome(little)})
    assert [each["model"] for each in shell.json("list", "--fits")] == ["tiny/unknown"]
    assert shell.json("show", "tiny/llama")["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull", "tiny/missing"), "cannot load model 'tiny/missing': the download"),
        (
            ("pull", "tiny/llama", "--revision", "v9"),
            "the download from the Hugging Face hub failed",
        ),
        (("pull", "a/b/c"), "must be a hub id ('owner/model') but got 'a/b/c'"),
        (("pull", "tiny/llama", "--include", "*.onnx"), "the name or pattern of a file"),
        (("show", "tiny/llama"), "`mlx-paged pull tiny/llama` fetches it"),
        (("rm", "--yes", "tiny/llama"), "a model in "),
    ],
)
def test_errors_are_one_line(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    done = shell(*arguments)
    assert done.status in (1, 2) and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_without_a_network(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = shell("pull", "tiny/llama")
    assert done.status == 1 and len(done.stderr.splitlines()) == 1
    assert "the download from the Hugging Face hub failed (ConnectError" in done.stderr
    done = shell("list")
    assert done.status == 0 and "no models in" in done.stderr


def test_a_full_disk_is_noticed_before(shell: Shell, hub: FakeHub) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    try:
        done = shell("pull", "tiny/llama")
    finally:
        hub.sizes.clear()
    assert done.status == 1 and "the download needs " in done.stderr
    assert not list(shell.cache.rglob("*.incomplete"))


def test_pull_takes_the_largest_gguf_file_that_fits(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(18 MiB fit.)"""
    done = shell("pull", "tiny/sizes", "--fits")
    assert done.status == 0, done.stderr
    assert [file.name for file in done.path.glob("**/*.gguf")] == ["a-Q4.gguf"]
    large = {"on_gpu": False, "device_bytes": 20 << 20, "utilization": 0.9}
    monkeypatch.setattr(jobs, "run_in_child", lambda names: {jobs.MEMORY: Outcome(large)})
    done = shell("pull", "tiny/sizes", "--fits")
    assert len(list((done.path / "b").iterdir())) == 2
    little = {**large, "device_bytes": 1000}
    monkeypatch.setattr(jobs, "run_in_child", lambda names: {jobs.MEMORY: Outcome(little)})
    done = shell("pull", "tiny/sizes", "--fits")
    assert done.status == 1 and "the smallest of its GGUF files would take 1 MiB" in done.stderr


def test_pull_refuses_weights_that_do_not_fit(
    shell: Shell, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = jobs.run_in_child
    little = {"on_gpu": True, "device_bytes": 13 << 20, "utilization": 0.9}
    monkeypatch.setattr(jobs, "run_in_child", lambda names: {jobs.MEMORY: Outcome(little)})
    hub.sent = 0
    for options in ([], ["--include", "*.safetensors"]):
        done = shell("pull", "tiny/llama", "--fits", *options)
        assert done.status == 1 and "its weights would take 12 MiB" in done.stderr
        assert "11 MiB for weights" in done.stderr and hub.sent == 0
    monkeypatch.setattr(jobs, "run_in_child", enough)
    assert shell("pull", "tiny/llama", "--fits").status == 0 and hub.sent > 0
