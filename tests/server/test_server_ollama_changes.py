"""Ollama's `pull` and `delete`, with a hub on this machine and models that are loaded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import ollama
import psutil
import pytest
from huggingface_hub import constants
from support.fake_hub import COMMIT, FakeHub
from support.routers import Router, running_router
from support.server_helpers import until

from mlx_paged import hub as hub_module
from mlx_paged.cli.serve import access
from mlx_paged.cli.serve.server_options import ServerOptions
from mlx_paged.demo import model_path
from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.catalog import OneModelCatalog
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError

FILES = {path.name: path.read_bytes() for path in model_path().iterdir() if path.is_file()}
NEEDED = sum(len(data) for name, data in FILES.items() if name != "README.md")
OPTIONS = {"num_predict": 2}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """The hub of this process and of those that it starts."""
    cache = tmp_path_factory.mktemp("hub")
    models = {"tiny/demo": FILES, "tiny/other": {"model.safetensors": b"weights"}}
    with FakeHub(models).running() as hub, pytest.MonkeyPatch.context() as patch:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


@pytest.fixture(scope="module")
def router(hub: FakeHub) -> Iterator[Router]:
    models = (f"--model=first={model_path()}", "--model=fetched=tiny/demo")
    with running_router(*models) as router:
        yield router


@pytest.fixture
def client(router: Router, hub: FakeHub) -> Iterator[ollama.Client]:
    hub.sent = 0
    with ollama.Client(host=router.url, timeout=300) as client:
        yield client


def stored() -> list[str]:
    return [model.name for model in hub_module.models()]


def test_a_model_is_fetched_used_unloaded_and_removed(
    router: Router, client: ollama.Client, hub: FakeHub
) -> None:
    told = list(client.pull("fetched", stream=True))
    assert [each.status for each in told[:2]] == ["pulling manifest", f"pulling {COMMIT[:12]}"]
    assert told[-1].status == "success"
    amounts = [each for each in told if each.total is not None]
    assert {each.total for each in amounts} == {NEEDED}
    completed = [each.completed for each in amounts]
    assert (completed[0], completed[-1]) == (0, NEEDED) and completed == sorted(completed)
    assert stored() == ["tiny/demo"] and hub.sent == amounts[0].total
    assert client.pull("hf.co/tiny/demo:latest").status == "success"
    assert hub.sent == amounts[0].total, "it was all here"
    ask: Any = [{"role": "user", "content": "hello"}]
    assert client.chat("fetched", ask, options=OPTIONS).done
    assert [each.model for each in client.ps().models][-1] == "fetched"
    assert client.delete("fetched").status == "success"
    assert "fetched" not in [each.model for each in client.ps().models] and stored() == []
    with pytest.raises(ollama.ResponseError, match="no model 'tiny/demo' in") as missing:
        client.delete("tiny/demo")
    assert missing.value.status_code == 404


def test_a_client_that_leaves_ends_its_download(
    router: Router, client: ollama.Client, hub: FakeHub
) -> None:
    hub.goes_on.clear()
    before = set(psutil.Process().children())
    with httpx.stream("POST", f"{router.url}/api/pull", json={"model": "tiny/demo"}) as answer:
        lines = answer.iter_lines()
        assert '"completed":0' in [next(lines), next(lines)][1]
        until(lambda: hub.sent)
        [process] = set(psutil.Process().children()) - before
        until(stored)
        with pytest.raises(ollama.ResponseError, match="'tiny/demo' is being fetched"):
            client.delete("tiny/demo")
    until(lambda: not process.is_running())
    hub.goes_on.set()
    assert client.pull("tiny/demo").status == "success"
    client.delete("tiny/demo")


def test_errors(router: Router, client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for call, status, said in (
        (lambda: client.pull("tiny/none"), 404, "RepositoryNotFoundError"),
        (lambda: client.pull("llama3"), 400, "must be a hub id without a tag"),
        (lambda: client.pull("tiny/demo:q4"), 400, "must be a hub id without a tag"),
        (lambda: client.pull("../../etc"), 400, "must be a hub id without a tag"),
        (lambda: client.delete("first"), 400, "is outside the hub's cache"),
        (lambda: client.delete("tiny/none"), 404, "no model 'tiny/none' in"),
        (lambda: client.copy("first", "second"), 400, "does not copy models"),
    ):
        with pytest.raises(ollama.ResponseError, match=said) as refused:
            call()
        assert refused.value.status_code == status
    assert client.pull("first").status == "success", "it is on this machine"
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ollama.ResponseError, match="leaves 1 GiB free") as full:
        client.pull("tiny/other")
    assert full.value.status_code == 507
    assert httpx.post(f"{router.url}/api/pull", content="{}").status_code == 415, "any site's page"


def test_a_stream_that_fails_ends_with_an_error(
    client: ollama.Client, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "breaks_after", 1000)
    monkeypatch.setattr(hub, "is_gone", True)
    with pytest.raises(ollama.ResponseError, match="the download from the Hugging Face hub failed"):
        list(client.pull("tiny/demo", stream=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"model_changes": False}, False),
        ({"host": "0.0.0.0"}, False),
        ({"allowed_hosts": ["example.com"]}, False),
        ({"host": "0.0.0.0", "api_keys": ["k"]}, False),
        ({"host": "0.0.0.0", "api_keys": ["k"], "model_changes": True}, True),
        ({"root_path": "/llm", "model_changes": True}, None),
    ],
    ids=str,
)
def test_who_may_change_models(options: dict[str, Any], expected: bool | None) -> None:
    given = ServerOptions(page_mcp=False, **options)
    if expected is None:
        with pytest.raises(InvalidParameterError, match="model_changes"):
            access.config_fields(given)
    else:
        assert access.config_fields(given)["model_changes"] is expected


def test_the_only_model_of_a_server_stays() -> None:
    async def remove() -> None:
        async with OneModelCatalog(mock.Mock(), ServerConfig()).unloaded(["demo"]):
            raise AssertionError("it was unloaded")

    with pytest.raises(ApiError, match="only one model, which stays loaded"):
        asyncio.run(remove())
