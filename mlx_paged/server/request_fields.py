"""Every field of OpenAI's and vLLM's generating requests: works, hint, or refused by name.

A field that changes the answer works or is refused; it is never ignored. A hint changes no answer,
and any value of it is accepted. Fields that neither API has are logged, or refused under
``--strict-requests``. The bodies in `server.bodies` and `server.responses_api.body` have all
these fields; a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Fields that work, by the API that defines them.
WORKS = {
    "all": """
        allowed_token_ids bad_words cache_salt frequency_penalty ignore_eos
        include_stop_str_in_output logit_bias logprob_token_ids metadata min_p min_tokens model
        prediction presence_penalty priority repetition_penalty request_id
        return_tokens_as_token_ids safety_identifier seed skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structural_tag structured_outputs temperature thinking_token_budget top_k top_p user
        guided_choice guided_grammar guided_json guided_json_object guided_regex
        guided_whitespace_pattern
    """,
    "chat": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs
        continue_final_message documents echo enable_thinking function_call functions
        include_reasoning logprobs max_completion_tokens max_tokens media_io_kwargs messages n
        parallel_tool_calls prompt_logprobs reasoning reasoning_effort response_format
        return_token_ids tool_choice tools top_logprobs truncate_prompt_tokens truncation_side
        verbosity
    """,
    "completion": """
        add_special_tokens best_of echo logprobs max_completion_tokens max_tokens n prompt
        prompt_logprobs response_format return_token_ids truncate_prompt_tokens truncation_side
    """,
    "response": """
        chat_template chat_template_kwargs include input instructions max_output_tokens
        previous_response_id reasoning store text tool_choice tools top_logprobs truncation
    """,
}


class Hint(NamedTuple):
    """A field that changes no answer.

    Attributes:
        reason: Why it does not, here.
    """

    name: str
    reason: str


HINTS = (
    Hint("service_tier", "there is one tier"),
    Hint("prompt_cache_key", "there is one cache"),
    Hint("prompt_cache_options", "prefixes are cached without it"),
    Hint("prompt_cache_retention", "prefixes are kept as long as there is room"),
    Hint("session_id", "there is one cache"),
    Hint("return_token_offsets", "of vLLM's render endpoints only"),
    Hint("return_mm_kwargs", "of vLLM's render endpoints only"),
)


class Refusal(NamedTuple):
    """A field that is refused with 400, except for values without effect.

    Attributes:
        allowed: Values without effect, besides null.
        reason: Why no others are accepted.
    """

    name: str
    allowed: tuple[Any, ...]
    reason: str


REFUSED = (
    Refusal("audio", ([],), "this server writes text only"),
    Refusal("modalities", (["text"],), "this server writes text only"),
    Refusal("web_search_options", ([],), "this server does not search"),
    Refusal("moderation", ([],), "this server does not moderate"),
    Refusal("prompt_embeds", ([],), "prompts are texts or tokens"),
    Refusal("use_beam_search", (False,), "this server has no beam search"),
    Refusal("length_penalty", (1,), "this server has no beam search"),
    Refusal("guided_decoding_backend", ("auto", "guidance"), "there is one"),
    Refusal("logits_processors", ([],), "requests bring no code"),
    Refusal("mm_processor_kwargs", ([], {}), "the server's --mm-processor-kwargs hold for all"),
    Refusal("kv_transfer_params", ([], {}), "this server computes prompts itself"),
    Refusal("ec_transfer_params", ([], {}), "this server encodes media itself"),
    Refusal("vllm_xargs", ([], {}), "this server has no plug-ins"),
    Refusal("watermarking", (False,), "this server marks no text"),
    Refusal("repetition_detection", (), "answers are not ended for repeating themselves"),
    Refusal("routed_experts_prompt_start", (0,), "routing of experts is not reported"),
    Refusal("return_prompt_text", (False,), "/tokenize shows a prompt"),
)
