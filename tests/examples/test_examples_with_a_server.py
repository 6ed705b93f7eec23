"""The examples that need `mlx-paged serve`, and what configuration files expect of it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.example_programs import EXAMPLES, commands, run_cli, run_here, serve_options
from support.server_helpers import process

CHATS = ("openai_chat.py", "anthropic_chat.py", "structured_output_api.py", "tools.py", "batch.py")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the options of all these examples, and of those that reach it from Docker."""
    options = [option for name in CHATS for option in serve_options(name)]
    folder = str(tmp_path_factory.mktemp("batches"))
    options = [folder if option == "batches" else option for option in options]
    hosts = re.search(
        r"serve (--allowed-hosts \S+)", (EXAMPLES / "open-webui/README.md").read_text()
    )
    with process(*options, *shlex.split(hosts[1])) as (server, url):
        assert server.poll() is None
        yield url


def run_with(url: str, name: str, folder: Path) -> str:
    return run_here(name, folder=folder, OPENAI_BASE_URL=f"{url}/v1", ANTHROPIC_BASE_URL=url)


def test_openai_chat(url, tmp_path) -> None:
    text = run_with(url, "openai_chat.py", tmp_path)
    assert "def fibonacci(" in text and "def is_palindrome(" in text
    (first, cached), (second, reused) = re.findall(r"# (\d+) prompt tokens, (\d+) from", text)
    # The second turn computes neither the first question nor its answer again.
    assert int(reused) > int(first) > int(cached) and int(second) - int(reused) < 30


def test_anthropic_chat(url, tmp_path) -> None:
    text = run_with(url, "anthropic_chat.py", tmp_path)
    assert "def fibonacci(" in text
    [(tokens, reason)] = re.findall(r"# (\d+) tokens, (\w+)", text)
    [total] = re.findall(r"the conversation has (\d+) tokens", text)
    assert reason == "end_turn" and int(total) > int(tokens) > 20


def test_structured_output_api(url, tmp_path) -> None:
    review, time = run_with(url, "structured_output_api.py", tmp_path).splitlines()
    assert re.fullmatch("(positive|neutral|negative), [1-5] of 5", review)
    assert re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", time)


def test_tools(url, tmp_path) -> None:
    before = httpx.get(f"{url}/metrics").text
    text = run_with(url, "tools.py", tmp_path)
    [(city, result)] = re.findall(r"^LocalTime\(city='(.*)'\) -> (.*)$", text, re.MULTILINE)
    assert city in ("Europe/Oslo", "America/Lima", "Asia/Tokyo")
    now = datetime.fromisoformat(result)
    assert abs(datetime.now(now.tzinfo) - now) < timedelta(minutes=5)
    after = httpx.get(f"{url}/metrics").text
    assert chats(after) - chats(before) == 2  # one that calls, one that has the result


def chats(metrics: str) -> float:
    """Answered prompts, from /metrics."""
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    return sum(sample.value for sample in families["vllm:request_success"].samples)


def test_batch(url, tmp_path) -> None:
    text = run_with(url, "batch.py", tmp_path)
    requests = (EXAMPLES / "requests.jsonl").read_text().splitlines()
    ids = {json.loads(line)["custom_id"] for line in requests}
    assert text.startswith(f"# completed: {len(ids)} of {len(ids)}\n")
    assert set(re.findall(r"^# (\w+)$", text, re.MULTILINE)) == ids
    assert text.count("\ndef ") == len(ids)


def test_a_batch_without_a_server_goes_on_where_it_was(tmp_path) -> None:
    [generate] = [found[1:] for found in commands("batch.py") if found[1] == "generate"]
    lines = (EXAMPLES / "requests.jsonl").read_text().splitlines(keepends=True)
    begun = tmp_path / "begun.jsonl"
    begun.write_text("".join(lines[:2]))
    source = generate.index("-i") + 1
    run_cli([*generate[:source], str(begun), *generate[source + 1 :]], tmp_path)
    answers = tmp_path / "answers.jsonl"
    first = answers.read_text()
    answers.write_text(first[:-20])  # as an interruption leaves it
    run_cli(generate, tmp_path)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert answers.read_text().startswith(first.splitlines(keepends=True)[0])
    ids = sorted(json.loads(line)["custom_id"] for line in lines)
    assert sorted(answer["custom_id"] for answer in found) == ids
    assert {answer["response"]["status_code"] for answer in found} == {200}


def test_containers_reach_the_server(url) -> None:
    compose = yaml.safe_load((EXAMPLES / "open-webui/compose.yaml").read_text())
    environment = compose["services"]["open-webui"]["environment"]
    asked = httpx.URL(environment["OPENAI_API_BASE_URL"])
    answer = httpx.get(f"{url}{asked.path}/models", headers={"Host": asked.netloc.decode()})
    assert answer.status_code == 200 and answer.json()["data"]
    [scrape] = yaml.safe_load((EXAMPLES / "monitoring/prometheus.yml").read_text())[
        "scrape_configs"
    ]
    [[target]] = [group["targets"] for group in scrape["static_configs"]]
    path = scrape.get("metrics_path", "/metrics")
    answer = httpx.get(f"{url}{path}", headers={"Host": target})
    assert answer.status_code == 200 and "vllm:num_requests_running" in answer.text


def test_the_server_has_the_metrics_of_the_dashboard(url) -> None:
    compose = yaml.safe_load((EXAMPLES / "monitoring/compose.yaml").read_text())
    volumes = compose["services"]["grafana"]["volumes"]
    [mounted] = [volume.split(":")[0] for volume in volumes if "grafana-dashboard.json" in volume]
    dashboard = json.loads((EXAMPLES / "monitoring" / mounted).read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    names = set(re.findall(r"(?:vllm|mlx_paged|process)[:_]\w+", " ".join(asked)))
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    known = {sample.name for family in families for sample in family.samples}
    assert len(names) > 10 and names <= known, names - known


def test_embeddings_and_rerank(tmp_path) -> None:
    name = "embeddings_and_rerank.py"
    with process(*serve_options(name)) as (_, url):
        text = run_with(url, name, tmp_path)
    size, *lines = text.splitlines()
    assert size == "384 numbers a text"
    found = [(float(line.split()[0]), line.split(maxsplit=1)[1]) for line in lines]
    cosines, ranked = found[:4], found[4:]
    assert max(cosines)[1] == "def read(path):"
    best = sorted(cosines, reverse=True)[:2]
    assert [(score, f"{text}  (reranked)") for score, text in best] == ranked
