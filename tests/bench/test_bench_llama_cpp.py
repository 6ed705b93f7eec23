"""`bench/llama_cpp.py` and its helpers: files of shapes, what they read of llama.cpp, and tables.

Neither builds nor runs llama.cpp.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlx_paged

BENCH = Path(__file__).resolve().parents[2] / "bench"
# The output of the programs, shortened.
BENCH_LINE = (
    '{"n_kv_max": 1024, "flash_attn": 1, "pp": 64, "tg": 8, "pl": 4, "t_pp": 0.105, '
    '"speed_pp": 607.5, "t_tg": 0.233, "speed_tg": 137.04, "t": 0.339, "speed": 849.5}'
)
COMPLETION = """\
0.00.008.538 I llama_completion: load the model and apply lora adapter, if any
1.02.208.042 I cmn          init: llama threadpool init, n_threads = 4
1.02.212.554 I generate: n_ctx = 1280, n_batch = 2048, n_predict = 1, n_keep = 0
"""


@pytest.fixture(scope="module")
def bench() -> Any:
    """The modules of the bench folder."""
    names = ("llama_cpp", "llama_models", "llama_peer", "llama_report")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(BENCH))
    try:
        yield argparse.Namespace(
            **{name.removeprefix("llama_"): importlib.import_module(name) for name in names}
        )
    finally:
        sys.path.remove(str(BENCH))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


# --- Files of the shapes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"), [("135m", 134_515_008), ("1b", 1_235_814_400)], ids=str
)
def test_shapes_have_the_models_parameters(bench, name, parameters) -> None:
    shape = bench.models.SHAPES[name]
    sizes = [rows[0] * (rows[1] if len(rows) > 1 else 1) for _, rows in shape.gguf_tensors()]
    assert sum(sizes) == parameters


@pytest.mark.parametrize(
    ("format", "bytes_of_64"), [("f32", 256), ("bf16", 128), ("q8_0", 68), ("q4_0", 36)]
)
def test_gguf_files_have_the_shape_and_the_format(bench, tmp_path, format, bytes_of_64) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    shape = bench.models.SHAPES["tiny"]
    path = bench.models.write_gguf(shape, format, tmp_path / "models" / "tiny.gguf")
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == [name for name, _ in shape.gguf_tensors()]
    for name, dims in shape.gguf_tensors():
        assert tuple(int(n) for n in found[name].shape[::-1]) == dims
        matrix = len(dims) == 2
        assert found[name].tensor_type.name == (format.upper() if matrix else "F32")
        assert found[name].n_bytes == (
            dims[0] * dims[1] * bytes_of_64 // 64 if matrix else dims[0] * 4
        )
    assert len(set(reader.get_field("tokenizer.ggml.tokens").contents())) == shape.vocab
    assert reader.get_field("llama.attention.head_count_kv").contents() == shape.kv_heads
    values = gguf.dequantize(
        found["blk.0.ffn_up.weight"].data, found["blk.0.ffn_up.weight"].tensor_type
    )
    assert 0.015 < float(values.std()) < 0.025


def test_a_file_that_exists_is_kept(bench, tmp_path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    (tmp_path / "m").mkdir()
    shape = bench.models.SHAPES["tiny"]
    assert bench.models.write_gguf(shape, "f32", tmp_path / "m.gguf").read_text() == "mine"
    assert list(bench.models.write_mlx(shape, "4bit", tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("writer", ["write_gguf", "write_mlx"])
def test_unknown_formats_are_refused(bench, tmp_path, writer) -> None:
    with pytest.raises(ValueError, match=r"format must be one of .* but got 'q5_7'"):
        getattr(bench.models, writer)(bench.models.SHAPES["tiny"], "q5_7", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["float32", "4bit"])
def test_mlx_checkpoints_generate(bench, tmp_path, format) -> None:
    folder = bench.models.write_mlx(bench.models.SHAPES["tiny"], format, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    assert config.get("quantization") == (
        {"group_size": 64, "bits": 4} if format == "4bit" else None
    )
    stored = (folder / "model.safetensors").stat().st_size
    assert stored < 0.6e6 if format == "4bit" else stored > 3e6
    llm = mlx_paged.LLM(str(folder), num_gpu_blocks_override=8)
    params = mlx_paged.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [output] = llm.generate([[300, 301]], params)
    assert len(output.outputs[0].token_ids) == 3


# --- What is read of llama.cpp --------------------------------------------------------------------


def test_figures_of_batched_bench(bench) -> None:
    assert bench.peer.parse_bench(f"\nload\n{BENCH_LINE}\n\n")["speed_tg"] == 137.04
    for out in ("", "no figures\n", f"{BENCH_LINE}\n{BENCH_LINE}\n"):
        with pytest.raises(ValueError, match="expected one line of JSON"):
            bench.peer.parse_bench(out)


def test_load_time_in_the_log_of_completion(bench) -> None:
    assert bench.peer.parse_load_seconds(COMPLETION) == pytest.approx(62.208042)
    with pytest.raises(ValueError, match="no time of loading"):
        bench.peer.parse_load_seconds("error: failed to load model")


def test_contexts_hold_what_is_asked(bench) -> None:
    """llama-batched-bench leaves out what does not fit, and says nothing."""
    command = bench.peer.bench_command(Path("bin"), Path("m.gguf"), 2, 128, 32, 8)
    assert int(command[command.index("-c") + 1]) == 8 * 256
    command = bench.peer.bench_command(Path("bin"), Path("m.gguf"), 2, 240, 32, 8)
    assert int(command[command.index("-c") + 1]) == 8 * 512
    for way in bench.peer.SERVER_WAYS:
        command = bench.peer.server_command(Path("bin"), Path("m.gguf"), 2, way, 1072, 80)
        slots = int(command[command.index("-np") + 1])
        assert int(command[command.index("-c") + 1]) == slots * 1280


def test_tiles_are_mended_once(bench, tmp_path) -> None:
    file = tmp_path / "mmq.cpp"
    file.write_text("void f() {\n    _tile_loadconfig(&tc);\n    done = true;\n}\n")
    bench.peer.mend(file)
    mended = file.read_text()
    assert mended.count("asm volatile") == 1 == mended.count("_tile_loadconfig(&tc);")
    assert mended.index("asm volatile") < mended.index("_tile_loadconfig")
    bench.peer.mend(file)
    assert file.read_text() == mended


def test_a_process_gives_its_output_times_and_memory(bench) -> None:
    code = (
        "import sys; x = b'1' * 50_000_000; print(sys.stdin.read()); print('bad', file=sys.stderr)"
    )
    cores = set(sorted(os.sched_getaffinity(0))[:1])
    done = bench.peer.run([sys.executable, "-c", code], cores, asked="asked")
    assert (done.out, done.err) == ("asked\n", "bad\n")
    assert 0 < done.first_byte <= done.seconds
    assert done.peak_rss > 50_000_000
    with pytest.raises(SystemExit, match="ended with status 3:\nbad"):
        fails = "import sys; print('bad', file=sys.stderr); sys.exit(3)"
        bench.peer.run([sys.executable, "-c", fails], cores)


# --- Cells ----------------------------------------------------------------------------------------


def test_patterns_choose_cells(bench) -> None:
    groups = bench.cpp.chosen(["*"])
    assert sum(len(names) for names in groups.values()) == len(bench.cpp.all_cells())
    assert not any(group.startswith("tiny") for group in groups)
    assert bench.cpp.chosen(["1b/4bit/2/decode-1", "1b/*/2/decode-1"]).keys() == {
        f"1b/{format}/2" for format in bench.cpp.FORMATS
    }
    assert "shared-32" in bench.cpp.chosen(["tiny/4bit/4/*"])["tiny/4bit/4"]
    with pytest.raises(SystemExit, match="no cell matches"):
        bench.cpp.chosen(["1b/5bit/*"])


def test_sides_take_turns(bench, monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(bench.cpp, "busy_seconds", bench.cpp.own_seconds)

    def side(name: str) -> Any:
        return lambda: (order.append(name), float(len(order)))[1]

    found = bench.cpp.take_turns({"ours": side("ours"), "native": side("native")}, 3)
    assert order == ["ours", "native", "native", "ours", "ours", "native"]
    assert found["values"] == {"ours": [1, 4, 5], "native": [2, 3, 6]}


def test_what_others_disturbed_is_measured_again(bench, monkeypatch) -> None:
    """The value with the least of others counts if none was left alone."""
    used = [0.5, 0.9, 0.2, 0.7, 0.4, 0.6, 0.8]
    measured = iter(enumerate(used))
    monkeypatch.setattr(bench.cpp, "watched", lambda side: next(measured))
    found = bench.cpp.take_turns({"ours": None, "native": None}, 1, idle=0.3, tries=4)
    assert found == {"values": {"ours": [2], "native": [4]}, "others_cpu": 0.4}
    assert next(measured, None) is None
    monkeypatch.setattr(bench.cpp, "watched", lambda side: (1, 2.0))
    found = bench.cpp.take_turns({"ours": None}, 2)
    assert found == {"values": {"ours": [1, 1]}, "others_cpu": 2.0}


def test_only_what_others_use_is_counted(bench, monkeypatch) -> None:
    """Neither this process, nor one that it started, be it running or not."""
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('x', flush=True); input()"
    command = [sys.executable, "-c", code]
    start = bench.cpp.own_seconds()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1) == b"x"
    running = bench.cpp.own_seconds()
    process.communicate(b"\n")
    assert running - start >= 0.25
    assert bench.cpp.own_seconds() - start >= 0.25

    cores = set(sorted(os.sched_getaffinity(0))[:1])
    monkeypatch.setattr(bench.cpp, "busy_seconds", lambda: 1e9 + bench.cpp.own_seconds())
    value, others = bench.cpp.watched(lambda: bench.peer.run(command, cores, asked="\n").out)
    assert value == "x\n" and others < 0.5


def test_turns_are_added_to_those_of_the_same_code_and_machine(
    bench, monkeypatch, tmp_path
) -> None:
    commits = ["a" * 40]
    monkeypatch.setattr(bench.cpp, "checkout", lambda: (commits[-1], False))
    setting = bench.cpp.Setting("tiny", "4bit", 2, tmp_path)

    def cell(value: float, before: Any) -> Any:
        found = {"values": {"ours": [value], "native": [2.0]}, "others_cpu": value}
        return bench.cpp.cell_of(found, before, setting, {})

    first = cell(3.0, None)
    second = cell(1.00004, first)
    assert second["values"] == {"ours": [3.0, 1.0], "native": [2.0, 2.0]}
    assert second["median"] == {"ours": 2.0, "native": 2.0} and second["others_cpu"] == 3.0
    commits.append("b" * 40)
    assert cell(5.0, second)["values"] == {"ours": [5.0], "native": [2.0]}
    assert cell(5.0, {**first, "processor": "another"})["values"]["ours"] == [5.0]


def test_answers_are_read_between_other_lines(bench) -> None:
    lines = iter(["warning\n", '@@{"load": 1.5}\n', '@@{"value": 2}\n'])
    assert bench.cpp.answer_of(lines) == {"load": 1.5}
    assert bench.cpp.answer_of(lines) == {"value": 2}
    with pytest.raises(SystemExit, match="ended before it answered"):
        bench.cpp.answer_of(lines)


# --- Tables ---------------------------------------------------------------------------------------


def _cell(ours: list[float], native: list[float], **more: list[float]) -> dict[str, Any]:
    values = {
        "ours": ours,
        "native": native,
        **{key.replace("_", "-"): v for key, v in more.items()},
    }
    median = {name: sorted(all)[len(all) // 2] for name, all in values.items()}
    return {"values": values, "median": median, "others_cpu": 0.0}


def test_ratios_are_of_turns_and_more_is_faster_except_of_memory(bench) -> None:
    cell = _cell([10.0, 40.0, 30.0], [20.0, 10.0, 20.0])
    assert bench.report.ratio_of("decode-4", cell) == 1.5
    assert bench.report.ratio_of("first-token", cell) == pytest.approx(20 / 30)
    assert bench.report.ratio_of("memory", cell) == 1.5


def test_tables_have_no_ratio_of_what_others_disturbed(bench) -> None:
    """But not memory, which they do not change."""
    busy = {"others_cpu": 1.1}
    cells = {
        "1b/4bit/4/decode-1": _cell([60.0], [50.0]) | busy,
        "1b/4bit/4/decode-4": _cell([60.0], [50.0]),
        "1b/4bit/4/memory": _cell([1e9], [1e9]) | busy,
        "1b/4bit/4/load": _cell([1.0], [1.0]) | busy,
        "1b/4bit/2/decode-1": _cell([60.0], [50.0]),
    }
    lines = bench.report.markdown(cells).splitlines()
    assert "| weights | threads | decode 1 | decode 4 | memory, MB |" in lines
    assert "| 4 bits, q4_0 | 4 | 60 (†) | 60 (1.20x) | 1,000 (1.00x) |" in lines


def test_tables_have_a_row_for_each_format_and_number_of_threads(bench, tmp_path) -> None:
    cells = {
        "1b/4bit/4/decode-1": _cell([60.0], [50.0], no_amx=[40.0]),
        "1b/4bit/2/decode-1": _cell([30.0], [40.0], no_amx=[20.0]),
        "1b/4bit-int8/4/decode-32": _cell([300.0], [200.0]),
        "1b/4bit/4/memory": _cell([1.8e9], [1.5e9]),
        "135m/bf16/4/decode-1": _cell([150.0], [100.0]),
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.report.BEGIN}\nold\n{bench.report.END}\nafter\n")
    bench.report.write_docs(cells, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| weights | threads | decode 1 | decode 32 | memory, MB |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 4 bits, q4_0 | 2 | 30 (0.75x, 1.50x) |  |  |",
        "| 4 bits, q4_0 | 4 | 60 (1.20x, 1.50x) |  | 1,800 (1.20x) |",
        "| 4 bits, q4_0; int8 | 4 |  | 300 (1.50x) |  |",
        "| weights | threads | decode 1 |",
        "| --- | ---: | ---: |",
        "| bfloat16, bf16 | 4 | 150 (1.50x) |",
    ]
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        bench.report.write_docs(cells, page)


def test_kinds_of_processors_have_tables_of_their_own(bench, monkeypatch) -> None:
    cells = {
        bench.report.key_of("1b/4bit/2/decode-1", ""): _cell([30.0], [20.0]),
        bench.report.key_of("1b/4bit/2/decode-1", "amx"): _cell([60.0], [50.0], no_amx=[40.0]),
        bench.report.key_of("1b/4bit/2/decode-1", "avx2"): _cell([20.0], [10.0]),
    }
    assert len(cells) == 3
    titled = [text.strip().splitlines() for text in bench.report.markdown(cells).split("### ")]
    assert [(lines[0], lines[-1]) for lines in titled[1:]] == [
        ("Processors without AMX", "| 4 bits, q4_0 | 2 | 30 (1.50x) |"),
        ("Processors with AVX2 only", "| 4 bits, q4_0 | 2 | 20 (2.00x) |"),
        ("Processors with AMX", "| 4 bits, q4_0 | 2 | 60 (1.20x, 1.50x) |"),
    ]
    rows = bench.report.summary(cells)[1]
    assert [row[1] for row in rows] == ["30", "60", "20"]

    # A run keeps the results of the other kinds.
    setting = bench.cpp.Setting("1b", "4bit", 2, Path(), kind="amx")
    monkeypatch.setattr(bench.cpp, "start_sides", lambda *_: {"ours": lambda: 3.0})
    options = argparse.Namespace(turns=1, idle=None, add=False, save=False)
    bench.cpp.measure_group(setting, "", ["memory"], options, cells)
    assert list(cells)[3:] == ["1b/4bit/2/memory@amx"]


def test_settings_without_avx512_name_it_to_both_sides(bench, tmp_path) -> None:
    narrow = bench.cpp.Setting("1b", "4bit", 2, tmp_path, kind="avx2")
    assert narrow.builds() == {"native": "avx2"}
    assert narrow.environ["MLX_PAGED_SIMD"] == "avx2"
    without_tiles = bench.cpp.Setting("1b", "4bit", 2, tmp_path, kind="no-amx")
    assert without_tiles.builds() == {"native": "no-amx"}
    assert without_tiles.environ["MLX_PAGED_SIMD"] == "avx512bf16"
    assert narrow.environ["OPENBLAS_CORETYPE"] == "Haswell"
    wide = bench.cpp.Setting("1b", "4bit", 2, tmp_path, kind="amx")
    assert list(wide.builds()) == ["native", "no-amx"]
    assert wide.environ.get("MLX_PAGED_SIMD") == os.environ.get("MLX_PAGED_SIMD")
    assert list(bench.cpp.Setting("1b", "bf16", 2, tmp_path, kind="amx").builds()) == ["native"]


def test_a_terminal_shows_what_is_asked_beside_what_is_reached(bench) -> None:
    cells = {
        "1b/4bit/4/decode-1": _cell([60.0], [50.0], no_amx=[40.0]),
        "1b/4bit-int8/4/decode-32": _cell([300.0], [200.0]),
        "135m/bf16/4/decode-1": _cell([150.0], [100.0]),
    }
    head, rows = bench.report.summary(cells)
    assert head[-2:] == ["ours is", "asked"]
    assert [row[-2:] for row in rows] == [
        ["1.20", "≥ 1.0x"],
        ["1.50", "≥ 1.2x in int8, 1.0x in float"],
        ["1.50", "≥ 143 (7 ms) with 4 threads"],
    ]


def test_the_docs_tables_are_of_the_committed_results(bench) -> None:
    results = json.loads((BENCH / "results" / "llama_cpp-cpu.json").read_text())
    text = bench.report.DOCS.read_text()
    tables = text.partition(bench.report.BEGIN)[2].partition(bench.report.END)[0]
    assert tables.strip() == bench.report.markdown(results["cells"])
