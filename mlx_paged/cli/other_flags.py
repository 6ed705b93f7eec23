"""Hints for options of `serve` that have another name in mlx_lm.server, vllm-mlx or vLLM."""

from __future__ import annotations

_MEMORY = "--gpu-memory-utilization or --kv-cache-memory sets the memory of the KV cache"
_ALWAYS_PAGED = "nothing is needed: batching is always continuous, and the cache always paged"
_SAMPLING = (
    "clients send it with each request; --override-generation-config '{\"%s\": ...}' sets a default"
)
_ANSWER = (
    "clients send max_tokens with each request; --override-generation-config "
    "'{\"max_new_tokens\": ...}' sets the maximum, --max-model-len the context"
)
_CHUNKS = "--max-num-batched-tokens sets the maximum tokens of a step"
_MEDIA = "nothing is needed: models with towers take media where the extra 'vision' is installed"
_QUANTIZED_KV = "--kv-cache-dtype int8 or int4 quantizes the KV cache"
_DRAFT_MODEL = (
    '--speculative-config \'{"method": "draft_model", "model": ..., "num_speculative_tokens": 5}\''
    " drafts with a second model"
)
_MTP = (
    '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\' drafts with the '
    "model's own head"
)
_TEMPLATE = (
    "clients send chat_template_kwargs with each request; --chat-template sets another template"
)
_NO_CODE = "nothing is needed for the models of docs/models.md"

_HINTS: dict[str, str] = {
    "--auto-unload-idle-seconds": "it is --model-ttl here, for each of several models (--model)",
    "--cache-memory-mb": _MEMORY,
    "--cache-memory-percent": _MEMORY,
    "--cache-policy": "--no-enable-prefix-caching switches the prefix cache off",
    "--chat-template-args": _TEMPLATE,
    "--chunked-prefill-tokens": _CHUNKS,
    "--completion-batch-size": "--max-num-seqs sets the maximum sequences of a step",
    "--continuous-batching": _ALWAYS_PAGED,
    "--decode-concurrency": "--max-num-seqs sets the maximum sequences of a step",
    "--default-chat-template-kwargs": _TEMPLATE,
    "--default-min-p": _SAMPLING % "min_p",
    "--default-presence-penalty": "clients send presence_penalty with each request",
    "--default-repetition-penalty": _SAMPLING % "repetition_penalty",
    "--default-temperature": _SAMPLING % "temperature",
    "--default-thinking-token-budget": "clients send thinking_token_budget with each request",
    "--default-top-k": _SAMPLING % "top_k",
    "--default-top-p": _SAMPLING % "top_p",
    "--disable-log-stats": "nothing is needed: statistics are not logged; GET /metrics has them",
    "--disable-prefix-cache": "it is --no-enable-prefix-caching here",
    "--draft-model": _DRAFT_MODEL,
    "--embedding-model": "--models-config adds it, with the option runner: pooling",
    "--enable-metrics": "nothing is needed: GET /metrics is always there",
    "--enable-mtp": _MTP,
    "--enable-prefix-cache": "nothing is needed: prefixes are shared unless "
    "--no-enable-prefix-caching is given",
    "--enable-thinking": _TEMPLATE,
    "--guided-decoding-backend": "nothing is needed: grammars are llguidance's",
    "--kv-bits": _QUANTIZED_KV,
    "--kv-cache-quantization": _QUANTIZED_KV,
    "--kv-cache-quantization-bits": _QUANTIZED_KV,
    "--kv-group-size": _QUANTIZED_KV,
    "--kv-transfer-config": "it is --role prefill or decode here (docs/disaggregation.md)",
    "--lazy-load-model": "models besides the first (--model) are loaded when requests name them",
    "--max-cache-blocks": "it is --num-gpu-blocks-override here",
    "--max-kv-size": "--max-model-len sets the maximum tokens of prompt and answer",
    "--max-request-tokens": "--max-model-len sets the maximum tokens of prompt and answer",
    "--max-tokens": _ANSWER,
    "--mcp-config": "it is --mcp here",
    "--memory-budget-gb": "it is --memory-budget here, for several models (--model)",
    "--min-p": _SAMPLING % "min_p",
    "--mllm": _MEDIA,
    "--mllm-draft-model": _DRAFT_MODEL,
    "--mllm-prefill-step-size": _CHUNKS,
    "--mtp-num-draft-tokens": _MTP,
    "--no-memory-aware-cache": _MEMORY,
    "--num-draft-tokens": _DRAFT_MODEL,
    "--offline": "set HF_HUB_OFFLINE=1, or give a directory",
    "--paged-cache-block-size": "it is --block-size here",
    "--pipeline": "--pipeline-parallel-size gives each device some layers (docs/distributed.md)",
    "--prefill-batch-size": _CHUNKS,
    "--prefill-step-size": _CHUNKS,
    "--prefix-cache-size": _MEMORY,
    "--prompt-cache-bytes": "--kv-cache-memory sets the bytes of the KV cache",
    "--prompt-cache-size": _MEMORY,
    "--prompt-concurrency": "--max-num-seqs sets the maximum sequences of a step",
    "--quantization": "nothing is needed: the checkpoint specifies it; mlx_lm.convert -q quantizes",
    "--quantized-kv-start": _QUANTIZED_KV,
    "--rate-limit": "--requests-per-minute and --tokens-per-minute limit each API key or address",
    "--request-timeout-s": "it is --request-timeout here",
    "--rerank-model": "--models-config adds it, with the option runner: pooling",
    "--revision": "give the directory of the revision, as `mlx-paged pull` prints it",
    "--specprefill": "there is no such option: every token of a prompt is computed",
    "--ssd-cache-dir": "it is --kv-offload-dir here",
    "--ssd-cache-max-gb": "it is --kv-offload-gib here",
    "--swap-space": "--kv-offloading-size sets the host memory for KV blocks",
    "--temp": _SAMPLING % "temperature",
    "--temperature": _SAMPLING % "temperature",
    "--timeout": "it is --request-timeout here",
    "--tokenizer": "the tokenizer is the model's: put its files into the model's directory",
    "--top-k": _SAMPLING % "top_k",
    "--top-p": _SAMPLING % "top_p",
    "--trust-remote-code": _NO_CODE,
    "--use-default-chat-template": "--chat-template sets a template",
    "--use-paged-cache": _ALWAYS_PAGED,
    "--uvicorn-log-level": "it is --log-level here",
    "--warm-prompts": "send the prompt once: the prefix cache keeps it",
}


def with_hint(message: str, option: str | None) -> str:
    """Returns an error about an unknown option, with a replacement."""
    hint = _HINTS.get(option or "")
    return f"No such option: {option}: {hint}" if hint is not None else message
