"""`mlx-paged eval`: a task of one's own, in process and at a URL, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jsonschema_rs
import pytest
from support.server_helpers import running

from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.server.config import ServerConfig

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")

SCHEMA = Path(__file__).resolve().parents[2] / "bench" / "results.schema.json"
TASK = """
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {questions}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS = [
    {"start": "def add(a, b):\n    return", "ends": [" a + b", " 日本"], "right": 0},
    {"start": "for i in", "ends": [" ???", " range(10):"], "right": 1},
    {"start": "import", "ends": [" os", " ]]"], "right": 1},
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    path = tmp_path / "endings.yaml"
    path.write_text(TASK.format(questions=questions))
    return path


def test_a_task_of_ones_own_in_process_and_at_a_url(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local, remote = tmp_path / "local.json", tmp_path / "remote.json"
    verb = ["eval", "--tasks", str(task), "--output-json"]
    assert status_of(app, [*verb, str(local), "--kv-cache-memory", str(1 << 26)]) == 0
    shown = capsys.readouterr().out
    assert "endings" in shown and "0.667" in shown
    with running(ServerConfig()) as server:
        assert status_of(app, [*verb, str(remote), "--server", server.url]) == 0
    found = [json.loads(path.read_text()) for path in (local, remote)]
    for each in found:
        jsonschema_rs.validator_for(json.loads(SCHEMA.read_text())).validate(each)
        assert each["tasks"]["endings"]["num_questions"] == 3
        assert each["tasks"]["endings"]["metrics"] == {"acc": pytest.approx(2 / 3)}


def test_a_limit_asks_fewer_questions(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    verb = ["eval", "--tasks", str(task), "--limit", "2", "--output-json", str(file)]
    assert status_of(app, [*verb, "--kv-cache-memory", str(1 << 26)]) == 0
    endings = json.loads(file.read_text())["tasks"]["endings"]
    assert endings["num_questions"] == 2 and endings["metrics"] == {"acc": 1.0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "no-such-task.yaml"], "a YAML file that exists"),
        (["--tasks", "tool-calls:all"], "simple_python"),
        (["--tasks", "a,a"], "different names"),
        (["--tasks", "x", "--server", "http://127.0.0.1:9"], "does not list its models"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(app, ["eval", *arguments]) in (1, 2)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert told in line


def test_a_task_that_does_not_exist_is_refused_with_those_that_do(
    task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of one task stands for lm_eval's own, whose thousands of files take ten seconds."""
    from lm_eval import tasks  # most of a second

    small = partial(tasks.TaskManager, include_path=str(task.parent), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", small)
    assert status_of(app, ["eval", "--tasks", "no-such-task"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "gsm8k-sample" in line and "no-such-task" in line


def test_engine_options_are_refused_for_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    verb = ["eval", "--tasks", "x", "--server", "http://127.0.0.1:9", "--dtype", "float32"]
    assert status_of(app, verb) == 2
    assert "--server" in capsys.readouterr().err
