"""What every request body shares."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Body(BaseModel):
    """A request's body.

    Types are strict ("5" is no number), numbers finite. Fields that nobody knows are kept apart in
    `model_extra`: the server logs them, or refuses them under ``--strict-requests``.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="Send usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(
        None, description="Send usage in every chunk; needs include_usage."
    )
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Body):
    """Only plain text so far."""

    type: str


class Unsupported(Body):
    """Known fields whose feature this server does not have: refused, never ignored."""

    tools: list[Any] | None = Field(None, description="Not supported yet: 400.")
    tool_choice: Any = Field(None, description='Only "none", or "auto" without tools.')
    parallel_tool_calls: bool | None = Field(None, description="Means nothing without tools.")
    functions: list[Any] | None = Field(None, description="Not supported: 400.")
    function_call: Any = Field(None, description="Not supported: 400.")
    response_format: ResponseFormat | None = Field(
        None, description='Only {"type": "text"} so far.'
    )
    structured_outputs: Any = Field(None, description="Not supported yet: 400.")
    guided_json: Any = Field(None, description="Not supported yet: 400.")
    guided_regex: Any = Field(None, description="Not supported yet: 400.")
    guided_choice: Any = Field(None, description="Not supported yet: 400.")
    guided_grammar: Any = Field(None, description="Not supported yet: 400.")
    prediction: Any = Field(None, description="Not supported: 400.")
    audio: Any = Field(None, description="Not supported: 400.")
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    store: bool | None = Field(None, description="true is refused: nothing is stored.")
    service_tier: str | None = Field(None, description='Only "auto" or "default".')
    web_search_options: Any = Field(None, description="Not supported: 400.")
    prompt_embeds: Any = Field(None, description="Not supported: 400.")
    use_beam_search: bool | None = Field(None, description="true is not supported: 400.")

    def unsupported(self) -> tuple[str, str] | None:
        """The first field that asks for what there is not, and why that is refused."""
        later = "is not supported yet by this server"
        for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar"):  # fmt: skip
            if getattr(self, name) is not None:
                return name, f"{name} {later}"
        for name in ("tools", "functions"):
            if getattr(self, name):
                return name, f"{name} {later}"
        for name in ("function_call", "prediction", "audio", "web_search_options", "prompt_embeds"):
            if getattr(self, name) is not None:
                return name, f"{name} is not supported by this server"
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice", f"tool_choice {later}: only 'none' and 'auto', without tools"
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format", f"response_format {later}: only {{'type': 'text'}}"
        if self.modalities not in (None, ["text"]):
            return "modalities", "modalities must be ['text']: this server writes text only"
        if self.store:
            return "store", "store must be false: this server stores nothing"
        if self.service_tier not in (None, "auto", "default"):
            return "service_tier", "service_tier must be 'auto' or 'default'"
        if self.use_beam_search:
            return "use_beam_search", "use_beam_search is not supported by this server"
        return None
