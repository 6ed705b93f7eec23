"""API: all operations, in the order of their documentation."""

from __future__ import annotations

from mlx_paged.server import (
    abort,
    bodies,
    cohere,
    endpoints,
    lm_studio,
    lora,
    pooling,
    pooling_bodies,
    render,
    responses,
)
from mlx_paged.server.batches import bodies as batch_bodies
from mlx_paged.server.batches import endpoints as batches
from mlx_paged.server.batches import messages as message_batches
from mlx_paged.server.chat import chat_completions
from mlx_paged.server.completions import completions
from mlx_paged.server.errors import message_status
from mlx_paged.server.messages import answers
from mlx_paged.server.messages import endpoints as anthropic
from mlx_paged.server.messages.bodies import CountBody, MessagesBody
from mlx_paged.server.ollama import answers as ollama_answers
from mlx_paged.server.ollama import bodies as ollama_bodies
from mlx_paged.server.ollama import changes as ollama_changes
from mlx_paged.server.ollama import embeddings as ollama_embeddings
from mlx_paged.server.ollama import endpoints as ollama
from mlx_paged.server.ollama import models as ollama_models
from mlx_paged.server.openapi import ERRORS, NDJSON, Operation
from mlx_paged.server.responses_api import answers as response_answers
from mlx_paged.server.responses_api import endpoints as response_endpoints
from mlx_paged.server.responses_api.body import InputTokensBody, ResponseBody

_GENERATION = tuple(status for status in ERRORS if status not in ("507", "529"))
_STORED = ("400", "401", "403", "404", "500")
_ON_DISK = (*_STORED, "507")
_BODY = ("400", "401", "403", "404", "408", "413", "415", "500", "503")


def _of_messages(statuses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(message_status(int(status))) for status in statuses)


#: The API, in the order of its documentation.
API = (
    Operation(
        "/v1/chat/completions", "POST", chat_completions, "Answer a conversation.",
        responses.ChatAnswer, _GENERATION, bodies.ChatBody, responses.ChatChunk,
    ),
    Operation(
        "/v1/completions", "POST", completions, "Continue prompts.",
        responses.CompletionAnswer, _GENERATION, bodies.CompletionBody,
        responses.CompletionAnswer,
    ),
    Operation(
        "/v1/chat/completions/render", "POST", render.render_chat,
        "Render a conversation to tokens.", render.GenerateRequest, _BODY,
        bodies.ChatBody, runner="generate",
    ),
    Operation(
        "/v1/completions/render", "POST", render.render_completion,
        "Render prompts to tokens.", list[render.GenerateRequest], _BODY,
        bodies.CompletionBody, runner="generate",
    ),
    Operation(
        "/v1/messages", "POST", anthropic.messages,
        "Answer a conversation, in Anthropic's API.",
        answers.MessageAnswer, _of_messages(_GENERATION), MessagesBody, answers.MessageEvent,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/count_tokens", "POST", anthropic.count_tokens,
        "Count the tokens of a conversation.",
        answers.TokenCount, _of_messages(_BODY), CountBody, error=answers.MessageError,
    ),
    Operation(
        "/v1/responses", "POST", response_endpoints.create,
        "Answer text or items, and store the response.", response_answers.Response, _GENERATION,
        ResponseBody, response_answers.ResponseEvent,
    ),
    Operation(
        "/v1/responses/input_tokens", "POST", response_endpoints.input_tokens,
        "Count the tokens of a response's input.", response_answers.InputTokens, _BODY,
        InputTokensBody,
    ),
    Operation(
        "/v1/responses/{response_id}", "GET", response_endpoints.retrieve,
        "Get a stored response.",
        response_answers.Response, _STORED, query=("stream", "starting_after"),
    ),
    Operation(
        "/v1/responses/{response_id}", "DELETE", response_endpoints.delete,
        "Delete a stored response.", response_answers.Deleted, _STORED,
    ),
    Operation(
        "/v1/responses/{response_id}/input_items", "GET", response_endpoints.input_items,
        "List the input of a stored response.", response_answers.ItemList, _STORED,
        query=("after", "limit", "order"),
    ),
    Operation(
        "/v1/responses/{response_id}/cancel", "POST", response_endpoints.cancel,
        "Cancel a background response.", response_answers.Response, _STORED,
    ),
    Operation(
        "/v1/embeddings", "POST", pooling.embeddings, "Embed texts.",
        pooling_bodies.EmbeddingAnswer, _GENERATION, pooling_bodies.EmbeddingBody,
        runner="pooling",
    ),
    Operation(
        "/v2/embed", "POST", cohere.embed, "Embed texts, in Cohere's API.", cohere.CohereAnswer,
        _GENERATION, cohere.CohereEmbedBody, runner="pooling",
    ),
    Operation(
        "/classify", "POST", pooling.classify, "Classify texts.", pooling_bodies.ClassifyAnswer,
        _GENERATION, pooling_bodies.ClassifyBody, runner="pooling",
    ),
    Operation(
        "/pooling", "POST", pooling.pooling, "Embed texts, in vLLM's form.",
        pooling_bodies.PoolingAnswer, _GENERATION, pooling_bodies.PoolingBody, runner="pooling",
    ),
    *(
        Operation(
            f"{prefix}/score", "POST", pooling.score, "Score the similarity of texts.",
            pooling_bodies.ScoreAnswer, _GENERATION, pooling_bodies.ScoreBody, runner="pooling",
        )
        for prefix in ("", "/v1")
    ),
    *(
        Operation(
            f"{prefix}/rerank", "POST", pooling.rerank,
            "Rank documents by relevance to a query.",
            pooling_bodies.RerankAnswer, _GENERATION, pooling_bodies.RerankBody, runner="pooling",
        )
        for prefix in ("", "/v1", "/v2")
    ),
    Operation(
        "/v1/files", "POST", batches.upload, "Upload a file.", batch_bodies.FileAnswer,
        (*_BODY, "507"), batch_bodies.FileForm, content="multipart/form-data",
    ),
    Operation(
        "/v1/files", "GET", batches.list_files, "List files.", batch_bodies.FileList,
        _STORED, query=("purpose", "limit", "order", "after"),
    ),
    Operation(
        "/v1/files/{file_id}", "GET", batches.retrieve_file, "Get a file's metadata.",
        batch_bodies.FileAnswer, _STORED,
    ),
    Operation(
        "/v1/files/{file_id}/content", "GET", batches.file_content, "Get a file's content.",
        None, _STORED, answer_type="application/octet-stream",
    ),
    Operation(
        "/v1/files/{file_id}", "DELETE", batches.delete_file, "Delete a file.",
        batch_bodies.FileDeleted, _ON_DISK,
    ),
    Operation(
        "/v1/batches", "POST", batches.create_batch, "Create a batch from a file.",
        batch_bodies.BatchAnswer, (*_BODY, "429", "507"), batch_bodies.BatchBody,
    ),
    Operation(
        "/v1/batches", "GET", batches.list_batches, "List batches, newest first.",
        batch_bodies.BatchList, _STORED, query=("limit", "after"),
    ),
    Operation(
        "/v1/batches/{batch_id}", "GET", batches.retrieve_batch, "Get a batch.",
        batch_bodies.BatchAnswer, _STORED,
    ),
    Operation(
        "/v1/batches/{batch_id}/cancel", "POST", batches.cancel_batch, "Cancel a batch.",
        batch_bodies.BatchAnswer, _ON_DISK,
    ),
    Operation(
        "/v1/messages/batches", "POST", message_batches.create,
        "Create a batch of conversations.",
        message_batches.MessageBatch, _of_messages((*_BODY, "429", "507")),
        message_batches.MessageBatchBody, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches", "GET", message_batches.list_batches,
        "List batches, newest first.", message_batches.MessageBatchList, _STORED,
        query=("limit", "after_id", "before_id"), error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}", "GET", message_batches.retrieve, "Get a batch.",
        message_batches.MessageBatch, _STORED, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}", "DELETE", message_batches.delete,
        "Delete an ended batch.", message_batches.MessageBatchDeleted, _ON_DISK,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}/cancel", "POST", message_batches.cancel,
        "Cancel a batch.",
        message_batches.MessageBatch, _ON_DISK, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}/results", "GET", message_batches.results,
        "Get a batch's results, one line per conversation.", None, _STORED,
        error=answers.MessageError, answer_type="application/x-jsonl",
    ),
    Operation(
        "/v1/models", "GET", endpoints.models, "List the served names.", responses.ModelList
    ),
    Operation(
        "/v1/models/{model:path}", "GET", endpoints.model, "Get a served name.",
        responses.Model, ("401", "403", "404", "500"),
    ),
    *(
        Operation(
            f"{prefix}/tokenize", "POST", endpoints.tokenize,
            "Tokenize a prompt or messages.",
            responses.Tokens, _BODY, bodies.TokenizeBody,
        )
        for prefix in ("", "/v1")
    ),
    Operation(
        "/extract_text", "POST", endpoints.extract_text, "Extract the text of a PDF.",
        responses.DocumentText, _BODY, bodies.DocumentBody,
    ),
    *(
        Operation(
            f"{prefix}/detokenize", "POST", endpoints.detokenize, "Detokenize tokens.",
            responses.Text, _BODY, bodies.DetokenizeBody,
        )
        for prefix in ("", "/v1")
    ),
    Operation(
        "/api/chat", "POST", ollama.chat, "Answer a conversation, in Ollama's API.",
        ollama_answers.OllamaChatAnswer, _GENERATION, ollama_bodies.OllamaChatBody,
        ollama_answers.OllamaChatAnswer, error=ollama_answers.OllamaError, stream_type=NDJSON,
    ),
    Operation(
        "/api/generate", "POST", ollama.generate, "Answer a prompt, in Ollama's API.",
        ollama_answers.GenerateAnswer, _GENERATION, ollama_bodies.GenerateBody,
        ollama_answers.GenerateAnswer, error=ollama_answers.OllamaError, stream_type=NDJSON,
    ),
    Operation(
        "/api/embed", "POST", ollama_embeddings.embed, "Embed texts, in Ollama's API.",
        ollama_answers.EmbedAnswer, _GENERATION, ollama_bodies.EmbedBody, runner="pooling",
        error=ollama_answers.OllamaError,
    ),
    Operation(
        "/api/embeddings", "POST", ollama_embeddings.embeddings,
        "Embed one text, in Ollama's older API.", ollama_answers.EmbeddingsAnswer, _GENERATION,
        ollama_bodies.EmbeddingsBody, runner="pooling", error=ollama_answers.OllamaError,
    ),
    Operation(
        "/api/tags", "GET", ollama_models.tags, "List the models.", ollama_answers.ModelTags,
        error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/ps", "GET", ollama_models.ps, "List the loaded models.",
        ollama_answers.LoadedModels, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/show", "POST", ollama_models.show, "Describe a model.", ollama_answers.ShownModel,
        _BODY, ollama_bodies.ShowBody, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/pull", "POST", ollama_changes.pull, "Fetch a model from the Hugging Face hub.",
        ollama_answers.PullStatus, (*_BODY, "429", "507"), ollama_bodies.PullBody,
        ollama_answers.PullStatus, error=ollama_answers.OllamaError, stream_type=NDJSON,
        of_catalog=True,
    ),
    Operation(
        "/api/delete", "DELETE", ollama_changes.delete, "Remove a model from the hub's cache.",
        None, _BODY, ollama_bodies.DeleteBody, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/version", "GET", ollama_models.version, "Get the version of Ollama's API.",
        ollama_answers.OllamaVersion, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/v0/models", "GET", lm_studio.models, "List the models, in LM Studio's API.",
        lm_studio.StudioModels, of_catalog=True,
    ),
    Operation(
        "/api/v0/models/{model:path}", "GET", lm_studio.model, "Get a model, in LM Studio's API.",
        lm_studio.StudioModel, ("401", "403", "404", "500"), of_catalog=True,
    ),
    Operation(
        "/api/v0/chat/completions", "POST", lm_studio.chat_completions,
        "Answer a conversation, with LM Studio's statistics.", lm_studio.StudioChatAnswer,
        _GENERATION, lm_studio.StudioChatBody, responses.ChatChunk,
    ),
    Operation(
        "/api/v0/completions", "POST", lm_studio.text_completions,
        "Continue prompts, with LM Studio's statistics.", lm_studio.StudioCompletionAnswer,
        _GENERATION, lm_studio.StudioCompletionBody, responses.CompletionAnswer,
    ),
    Operation(
        "/api/v0/embeddings", "POST", pooling.embeddings, "Embed texts, in LM Studio's API.",
        pooling_bodies.EmbeddingAnswer, _GENERATION, pooling_bodies.EmbeddingBody,
        runner="pooling",
    ),
    Operation(
        "/health", "GET", endpoints.health, "Check that requests are answered.", responses.Status,
        (), refusal=responses.Status,
    ),
    *(
        Operation(
            "/ping", method, endpoints.health,
            "Check that requests are answered, for SageMaker.", responses.Status, (),
            refusal=responses.Status,
        )
        for method in ("GET", "POST")
    ),
    Operation(
        "/live", "GET", endpoints.live, "Liveness: fails if the process should be replaced.",
        responses.Status, (), refusal=responses.Status,
    ),
    Operation(
        "/ready", "GET", endpoints.ready,
        "Readiness: succeeds while new requests are accepted.", responses.Status, (),
        refusal=responses.Status,
    ),
    Operation("/version", "GET", endpoints.version, "Get versions.", responses.Version),
    Operation("/metrics", "GET", endpoints.metrics, "Get Prometheus metrics.", None),
    Operation(
        "/load", "GET", endpoints.load, "Count running requests.", responses.Load
    ),
    Operation(
        "/server_info", "GET", endpoints.server_info, "Get options and state.", responses.ServerInfo
    ),
    Operation(
        "/abort_requests", "POST", abort.abort_requests, "Abort requests by id.",
        abort.Aborted, _BODY, abort.AbortBody,
    ),
    Operation(
        "/reset_prefix_cache", "POST", endpoints.reset_prefix_cache,
        "Drop all cached prefixes.",
        responses.Reset, ("401", "403", "500", "503"),
    ),
    Operation(
        "/v1/load_lora_adapter", "POST", lora.load_adapter,
        "Load a LoRA adapter, or replace one.", None, _BODY, lora.LoadLoraBody,
    ),
    Operation(
        "/v1/unload_lora_adapter", "POST", lora.unload_adapter,
        "Unload a LoRA adapter.", None, _BODY, lora.UnloadLoraBody,
    ),
)  # fmt: skip
