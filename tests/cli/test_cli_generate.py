"""`mlx-paged generate` with prompts: where they come from, and that options reach the engine."""

from __future__ import annotations

import io
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest

import mlx_paged.engine.llm
import mlx_paged.engine.ranks.start
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.engine.llm import LLM
from mlx_paged.errors import MlxPagedError

RAW = ["--ignore-chat-template", "--max-tokens", "8"]


@pytest.fixture
def made(monkeypatch) -> list[LLM]:
    """Every engine that is made."""
    made: list[LLM] = []

    def make(*args: Any, **options: Any) -> LLM:
        made.append(LLM(*args, **options, num_gpu_blocks_override=64))
        return made[-1]

    monkeypatch.setattr(mlx_paged.engine.llm, "LLM", make)
    return made


@pytest.fixture
def prompts(made, monkeypatch) -> list[str]:
    """Every prompt that reaches an engine."""
    seen: list[str] = []
    encode = LLM.stream

    def stream(self: LLM, given: Any, params: Any) -> Any:
        seen.extend(p if isinstance(p, str) else self.tokenizer.decode(p) for p in given)
        return encode(self, given, params)

    monkeypatch.setattr(LLM, "stream", stream)
    return seen


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes, *, is_terminal: bool = False) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: is_terminal)
    monkeypatch.setattr("sys.stdin", stdin)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], True), (["--async-scheduling"], True), (["--no-async-scheduling"], False)],
)
def test_engine_options_reach_the_engine(flags, expected, made, capsys) -> None:
    options = ["--max-num-seqs", "3", "--max-model-len", "100", "--max-step-time-ms", "70", *flags]
    options += ["--kv-offloading-size", "0.5"]
    options += ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 3}']
    assert status_of(app, ["generate", "-p", "def add(a, b):", *RAW, *options]) == 0
    [llm] = made
    assert llm.engine.config.async_scheduling is expected
    assert llm.engine.config.max_num_seqs == 3
    assert llm.engine.config.max_step_time_ms == 70
    assert llm.engine.config.kv_offloading_size == 0.5
    assert llm.engine.config.speculative_config.prompt_lookup_max == 3
    assert llm.engine.max_model_len == 100
    assert capsys.readouterr().out.strip()


def test_sampling_options_reach_the_engine(made, monkeypatch) -> None:
    given: list[Any] = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, p, params: given.append(params) or stream(self, p, params)
    )
    flags = ["--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1",
             "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty",
             "0.3", "--min-tokens", "2", "--seed", "4", "--stop", "X", "--stop", "Y",
             "-n", "2"]  # fmt: skip
    assert status_of(app, ["generate", "-p", "def add(a, b):", *RAW, *flags]) == 0
    [params] = given
    expected = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "n": 2, "seed": 4,
                "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
                "min_tokens": 2, "stop": ("X", "Y"), "max_tokens": 8}  # fmt: skip
    assert {name: getattr(params, name) for name in expected} == expected


def test_structured_outputs_reach_the_engine(made, tmp_path, capsys) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"enum": ["red", 3]}')
    grammar.write_text('root ::= "x" [0-9] "y"')
    for options, fits in (
        (["--json-schema", str(schema)], r'"red"|3'),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--regex", "[ab]{3}"], "[ab]{3}"),
        (["--grammar", str(grammar)], "x[0-9]y"),
    ):
        assert status_of(app, ["generate", "-p", "x = ", *RAW, *options]) == 0
        assert re.fullmatch(fits, capsys.readouterr().out.strip())


def test_a_wrong_grammar_is_said(made, capsys) -> None:
    both = ["--regex", "a", "--json-object"]
    for named, options in (("--regex", ["--regex", "[a"]), ("--json-object", both)):
        assert status_of(app, ["generate", "-p", "x", *RAW, *options]) == ExitCode.USAGE
        assert f"Invalid value for '{named}'" in capsys.readouterr().err


def test_prompts_come_from_options_and_files_in_order(prompts, tmp_path, capsys) -> None:
    (tmp_path / "a").write_text("def second(x):\n")
    files = ["-f", str(tmp_path / "a")]
    given = ["def zeroth(x):", "-p", "def first(x):"]
    assert status_of(app, ["generate", *given, *files, *RAW]) == 0
    expected = ["def zeroth(x):", "def first(x):", "def second(x):\n"]
    assert prompts == expected, "raw prompts are left as they are"
    shown = capsys.readouterr().out
    assert shown.index("zeroth") < shown.index("first") < shown.index("second")


def test_a_text_needs_no_flag(prompts) -> None:
    assert status_of(app, ["generate", "Reverse a string", "--max-tokens", "4"]) == 0
    [prompt] = prompts
    assert "Reverse a string" in prompt


@pytest.mark.parametrize("flags", [[], ["-f", "-"]])
def test_stdin_is_one_prompt(flags, prompts, monkeypatch) -> None:
    pipe(monkeypatch, "Réverse\na string\n".encode())
    assert status_of(app, ["generate", "--max-tokens", "4", *flags]) == 0
    [prompt] = prompts
    assert "Réverse\na string<|im_end|>" in prompt, "through the template, without its last break"


def test_without_a_prompt_at_a_terminal_it_says_what_to_give(monkeypatch, capsys) -> None:
    pipe(monkeypatch, b"", is_terminal=True)
    assert status_of(app, ["generate"]) == ExitCode.USAGE
    assert "give a text, --file or --input, or pipe in a text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "stdin is empty"), (b"\n", "stdin is empty"), (b"\xff\xfe", "stdin must be UTF-8")],
)
def test_a_stdin_that_is_no_prompt(content, told, monkeypatch, capsys) -> None:
    pipe(monkeypatch, content)
    assert status_of(app, ["generate"]) == ExitCode.FAILED
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_read(tmp_path, capsys) -> None:
    assert status_of(app, ["generate", "-f", str(tmp_path)]) == ExitCode.FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"mlx-paged: cannot read {tmp_path}: Is a directory"


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
def test_ctrl_c_ends_answers_between_two_steps(prompts, made, monkeypatch) -> None:
    from mlx_paged.engine.engine import Engine

    step = Engine.step
    seen: list[int] = []

    def interrupted(self: Engine) -> Any:
        seen.append(1)
        if len(seen) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    flags = [word for prompt in prompts for word in ("-p", prompt)]
    arguments = ["generate", *flags, "--ignore-chat-template", "--max-tokens", "500"]
    assert status_of(app, arguments) == ExitCode.INTERRUPTED
    assert len(seen) < 20
    [llm] = made
    assert not llm.engine.has_unfinished and llm.stats().usage.num_used_blocks == 0


@pytest.mark.parametrize(
    "command",
    (["generate", "-p", "x"], ["generate", "-i", "{file}", "-o", "{file}.out"], ["chat"]),
    ids=" ".join,
)
def test_the_data_type_reaches_the_loader(command, monkeypatch, tmp_path, capsys) -> None:
    class LoadedError(MlxPagedError):
        pass

    def load(model: Any, *, dtype: str, **_: Any) -> Any:
        raise LoadedError(f"to be loaded in {dtype}")

    monkeypatch.setattr(mlx_paged.engine.ranks.start, "load", load)
    pipe(monkeypatch, b"x")
    (tmp_path / "lines.jsonl").write_text("{}\n")
    words = [word.format(file=tmp_path / "lines.jsonl") for word in command]
    assert status_of(app, [*words, "--dtype", "float16"]) == 1
    assert "to be loaded in float16" in capsys.readouterr().err
