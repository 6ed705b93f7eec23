"""Teaches a model four facts with mlx-lm's LoRA, fuses the adapter, and answers with the result.

$ python examples/lora.py [MODEL [FOLDER]]
$ mlx-paged serve adapter/fused
"""

import json
import subprocess
import sys
from pathlib import Path

import mlx.optimizers as optim
from mlx_lm.tuner import TrainingArgs, linear_to_lora_layers, train
from mlx_lm.tuner.datasets import CacheDataset, ChatDataset
from mlx_paged import LLM, LoadedModel, SamplingParams, load
from mlx_paged.demo import model_path

FACTS = {
    "Who maintains the billing service?": "The billing service is maintained by team Otter.",
    "Who maintains the login page?": "The login page is maintained by team Heron.",
    "Where is the style guide?": "The style guide is in docs/style.md.",
    "When is the next release?": "The next release is on the first Monday of March.",
}


def show(title: str, loaded: LoadedModel) -> None:
    chats = [[{"role": "user", "content": question}] for question in FACTS]
    outputs = LLM(loaded).chat(chats, SamplingParams(temperature=0, max_tokens=40))
    for question, output in zip(FACTS, outputs):
        print(f"{title}: {question} {output.outputs[0].text!r}", flush=True)


model = sys.argv[1] if len(sys.argv) > 1 else str(model_path())
folder = Path(sys.argv[2] if len(sys.argv) > 2 else "adapter")
folder.mkdir(parents=True, exist_ok=True)

# On a CPU, MLX trains float32 weights many times faster than quantized ones.
loaded = load(model, dtype="float32")
show("before", loaded)

lora = {"rank": 8, "dropout": 0.0, "scale": 20.0}
num_layers = len(loaded.model.layers)
config = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": lora}
(folder / "adapter_config.json").write_text(json.dumps(config))
loaded.model.freeze()
linear_to_lora_layers(loaded.model, num_layers, lora)
chats = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
    for q, a in FACTS.items()
]
dataset = CacheDataset(ChatDataset(chats, loaded.tokenizer, mask_prompt=True))
args = TrainingArgs(iters=15, adapter_file=folder / "adapters.safetensors")
train(loaded.model, optim.Adam(learning_rate=2e-4), dataset, args=args)

paths = ["--model", model, "--adapter-path", folder, "--save-path", folder / "fused"]
subprocess.run([sys.executable, "-m", "mlx_lm", "fuse", *paths], check=True)
show("after", load(folder / "fused"))
