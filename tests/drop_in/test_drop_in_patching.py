"""Putting the seams in and taking them out: in any order of imports, as a whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plain import plain_mlx_lm

# isort: split
import mlx.core as mx
from mlx_lm.models import cache

import mlx_paged
from mlx_paged import drop_in
from mlx_paged.drop_in import patching
from mlx_paged.drop_in.seams import SEAMS, Seam, mismatch, resolve, signature_of

mlx_lm_generate = sys.modules["mlx_lm.generate"]
REPLACED = [seam for seam in SEAMS if seam.maker is not None]


def python(code: str, **env: str) -> str:
    """Runs a program in a process of its own, without the tests' setting; returns what it prints.

    Its warnings come after a line of dashes.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_DISABLE"}
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env={**inherited, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return f"{run.stdout}\n-----\n{run.stderr}"


def printed(code: str, **env: str) -> list[str]:
    """The words that a program prints."""
    return python(code, **env).partition("\n-----\n")[0].split()


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mlx-lm as it is, free to be patched."""
    monkeypatch.delenv("MLX_PAGED_DISABLE", raising=False)
    mlx_paged.unpatch()
    yield
    mlx_paged.unpatch()


def everything() -> dict[str, Any]:
    """All that mlx-lm's loaded modules and its classes hold, and MLX's attention."""
    found: dict[str, Any] = {"attention": mx.fast.scaled_dot_product_attention}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "mlx_lm":
            continue
        for attribute, value in vars(module).items():
            found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__.startswith("mlx_lm"):
                found.update({f"{name}.{attribute}.{k}": v for k, v in vars(value).items()})
    return found


# --- Order of imports -----------------------------------------------------------------------------

# Prints the module that defines each function in mlx-lm's places. (File names tell nothing in a
# checkout whose folder has the package's name, and `__module__` may be the wrapped function's.)
SHOW = """
import sys, mlx_lm.generate, mlx_lm.server
generate = sys.modules["mlx_lm.generate"]
for function in (generate.generate_step, generate.BatchGenerator._next,
                 mlx_lm.server.make_prompt_cache, mlx_lm.server.ResponseGenerator._tokenize):
    print(function.__globals__["__name__"])
"""


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "imports",
    [
        "import mlx_paged",
        "import mlx_paged\nimport mlx_lm",
        "import mlx_lm\nimport mlx_paged",
        "import mlx_lm.server\nimport mlx_paged",
        "from mlx_lm.models.cache import make_prompt_cache\nimport mlx_paged",
        "from mlx_paged import LLM",
    ],
)
def test_the_order_of_imports_does_not_matter(imports) -> None:
    modules = printed(f"{imports}\n{SHOW}")
    assert len(modules) == 4
    assert all(module.startswith("mlx_paged.drop_in.") for module in modules), modules


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "first", ["mlx_paged.cli.main", "mlx_paged.engine.detokenizer", "mlx_paged.model.loader"]
)
def test_mlx_lm_is_paged_whichever_of_our_modules_loads_it(first: str) -> None:
    """The drop-in is imported in the middle of these modules, which import mlx-lm."""
    modules = printed(f"import warnings; warnings.simplefilter('error')\nimport {first}\n{SHOW}")
    assert len(modules) == 4
    assert all(module.startswith("mlx_paged.drop_in.") for module in modules), modules


def test_names_that_mlx_lm_imported_before_are_replaced_too() -> None:
    out = printed("""
        import mlx_lm, mlx_lm.chat, mlx_lm.server, mlx_lm.cache_prompt
        import mlx_paged, sys
        made = sys.modules["mlx_lm.models.cache"].make_prompt_cache
        for name in ("generate", "chat", "server", "cache_prompt"):
            assert sys.modules[f"mlx_lm.{name}"].make_prompt_cache is made, name
        assert made.__globals__["__name__"].startswith("mlx_paged.drop_in.")
        print("all")
    """)
    assert out == ["all"]


def test_functions_imported_before_are_paged_all_the_same(tmp_path) -> None:
    from support.models import embedded, save_tiny, tiny_config

    # (The embedded model is quantized, and a CPU takes 15 s for such a prompt.)
    save_tiny(tmp_path / "model", tiny_config("llama", vocab_size=embedded().vocab_size))
    out = printed(f"""
        from mlx_lm import generate, load
        import mlx_paged
        model, tokenizer = load({str(tmp_path / "model")!r})
        for _ in range(2):
            generate(model, tokenizer, [5] * 40, max_tokens=1)
        print(mlx_paged.drop_in.stats(model).num_cached_tokens)
    """)
    assert out == ["39"]


def test_importing_is_cheap_until_mlx_lm_is_there() -> None:
    out = printed("""
        import sys, mlx_paged
        print(sorted({"mlx.core", "mlx_lm", "numpy", "transformers"} & set(sys.modules)))
    """)
    assert out == ["[]"]


def test_the_environment_can_forbid_it() -> None:
    program = f"import mlx_paged\n{SHOW}\nprint(mlx_paged.patch())"
    *modules, patched = printed(program, MLX_PAGED_DISABLE="yes")
    assert all(module.startswith("mlx_lm.") for module in modules), modules
    assert patched == "False"
    assert printed(program, MLX_PAGED_DISABLE="0")[-1] == "True"


@pytest.mark.parametrize(
    ("value", "disabled"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_values_of_the_environment(value, disabled, monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_DISABLE", value)
    assert drop_in.is_disabled() is disabled


def test_what_is_unpatched_before_mlx_lm_is_loaded_stays_so() -> None:
    modules = printed(f"import mlx_paged\nmlx_paged.unpatch()\n{SHOW}")
    assert all(module.startswith("mlx_lm.") for module in modules), modules


def test_a_module_is_run_with_it(tmp_path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\nfrom mlx_lm.generate import generate_step\n"
        "print(__name__, sys.argv[1:], 'mlx_paged' in generate_step.__code__.co_filename)"
    )
    command = [sys.executable, "-m", "mlx_paged.drop_in", "program", "--a", "b"]
    env = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_DISABLE"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "__main__ ['--a', 'b'] True"
    command[3:] = ["mlx_lm.server", "--help"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "usage: mlx_lm.server" in run.stdout and "--prompt-cache-size" in run.stdout


# --- Undoing --------------------------------------------------------------------------------------


def test_unpatching_restores_every_symbol(enabled) -> None:
    import mlx_lm.server  # noqa: F401

    before = everything()
    assert mlx_paged.patch() and drop_in.is_patched()
    assert mlx_paged.patch()  # again changes nothing
    during = everything()
    changed = {name for name, value in before.items() if during.get(name) is not value}
    for seam in REPLACED:
        assert seam.name in changed
    assert "mlx_lm.server.BatchGenerator" in changed
    mlx_paged.unpatch()
    mlx_paged.unpatch()
    after = everything()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert before.keys() == after.keys()
    assert not drop_in.is_patched()


def test_attention_goes_back_too_and_live_caches_go_on(enabled) -> None:
    from support.models import embedded_twin

    model = embedded_twin().model
    attention = mx.fast.scaled_dot_product_attention
    mlx_paged.patch()
    caches = cache.make_prompt_cache(model)
    tokens = mx.array([[5, 6, 7]])
    model(tokens, cache=caches)
    mlx_paged.unpatch()
    assert mx.fast.scaled_dot_product_attention is attention
    expected = model(mx.array([[5, 6, 7, 8]]), cache=cache.make_prompt_cache(model))[:, -1]
    assert mx.allclose(model(mx.array([[8]]), cache=caches)[:, -1], expected, atol=1e-4)
    patching.unpatch()
    from mlx_paged.model import patches

    patches.uninstall()


# --- Refusing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.module != "mlx_lm.server"], ids=str)
@pytest.mark.parametrize("change", ["other parameters", "missing"])
def test_an_mlx_lm_that_differs_is_left_as_it_is(enabled, monkeypatch, seam: Seam, change) -> None:
    owner, name, _ = resolve(sys.modules[seam.module], seam.symbol)
    if change == "missing":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda self, something_new: None)
    before = everything()
    with pytest.raises(drop_in.MlxLmMismatchError) as caught:
        mlx_paged.patch()
    message = str(caught.value)
    assert seam.name in message and seam.signature in message and "0.32.2" in message
    after = everything()
    assert [n for n, value in before.items() if after[n] is not value] == []
    assert not drop_in.is_patched()


def test_at_import_a_refusal_is_a_warning_and_the_program_goes_on() -> None:
    out = python("""
        import sys, mlx_lm.generate
        original = sys.modules["mlx_lm.generate"]
        def generate_step(prompt, model, verbose=False): pass
        original.generate_step = generate_step
        import mlx_paged
        assert original.generate_step is generate_step
        assert not mlx_paged.drop_in.is_patched()
    """)
    assert "mlx_lm.generate.generate_step takes (prompt, model, verbose=)" in out


def test_a_server_that_differs_undoes_all() -> None:
    out = python("""
        import mlx_paged, sys, mlx_lm.generate
        from dataclasses import replace
        from mlx_paged.drop_in import patching
        assert mlx_paged.drop_in.is_patched()
        patching.SEAMS = tuple(
            replace(s, signature="self, other") if s.module == "mlx_lm.server" else s
            for s in patching.SEAMS
        )
        import mlx_lm.server
        assert not mlx_paged.drop_in.is_patched()
        for function, module in (
            (sys.modules["mlx_lm.generate"].generate_step, "mlx_lm.generate"),
            (mlx_lm.server.make_prompt_cache, "mlx_lm.models.cache"),
        ):
            assert function.__globals__["__name__"] == module
    """)
    assert "mlx_lm.server.ResponseGenerator._tokenize" in out


def test_what_cannot_be_made_replaces_nothing(enabled, monkeypatch) -> None:
    from mlx_paged.drop_in import batch

    def fails(original: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(batch, "batch_generator", fails)
    before = everything()
    with pytest.raises(RuntimeError, match="no"):
        mlx_paged.patch()
    after = everything()
    assert [n for n, value in before.items() if after[n] is not value] == []


# --- The list -------------------------------------------------------------------------------------


def test_the_list_is_that_of_the_installed_mlx_lm() -> None:
    import mlx_lm
    import mlx_lm.server

    assert mlx_lm.__version__ in patching.CHECKED_ON
    with plain_mlx_lm():
        assert [m for seam in SEAMS if (m := mismatch(sys.modules[seam.module], seam))] == []


def test_signatures_tell_what_matters() -> None:
    def f(a: int, /, b: str = "x", *rest: int, c: int, d: int = 0, **more: int) -> None: ...

    assert signature_of(f) == "a, b=, *rest, c, d=, **more"
    assert signature_of(lambda a, *, b=1: a) == "a, *, b="
    assert signature_of(5) == "not a callable"


# --- Documentation --------------------------------------------------------------------------------


def test_the_page_names_what_is_replaced_and_its_example_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/drop-in.md").read_text()
    table = page.partition("| symbol of mlx_lm |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE) == [
        seam.name.removeprefix("mlx_lm.") for seam in REPLACED
    ]
    example, output = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)[:2]
    assert python(example).partition("\n-----\n")[0].strip() == output.strip()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", patching._MODULES_ON_MLX_LM)
def test_a_module_of_ours_may_be_the_first_import(name: str) -> None:
    out, _, warned = python(f"""
        import {name}
        from mlx_paged.drop_in.patching import is_patched
        print(is_patched())
    """).partition("\n-----\n")
    assert out.split() == ["True"] and "not paged" not in warned
