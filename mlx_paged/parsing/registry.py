"""The table of tool-call formats, and the detection of a model's format."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mlx_paged.parsing.answer import AnswerReader, answer_parser
from mlx_paged.parsing.apertus import ApertusFormat
from mlx_paged.parsing.cohere import CohereFormat
from mlx_paged.parsing.deepseek import DeepseekV3Format, DeepseekV31Format
from mlx_paged.parsing.deepseek_v32 import DeepseekV4Format, DeepseekV32Format
from mlx_paged.parsing.derived import derived_or_none
from mlx_paged.parsing.dots import DotsFormat
from mlx_paged.parsing.ernie import Ernie45Format
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.functionary import FunctionaryV31Format, FunctionaryV32Format
from mlx_paged.parsing.gemma import FunctionGemmaFormat, Gemma4Format
from mlx_paged.parsing.gigachat import GigaChat3Format
from mlx_paged.parsing.glm import Glm45Format, Glm47Format
from mlx_paged.parsing.granite import Granite4Format, Granite20bFormat, GraniteFormat
from mlx_paged.parsing.harmony import HarmonyFormat
from mlx_paged.parsing.hermes import HermesFormat
from mlx_paged.parsing.hunyuan3 import Hunyuan3Format
from mlx_paged.parsing.inkling import InklingFormat
from mlx_paged.parsing.internlm2 import Internlm2Format
from mlx_paged.parsing.kimi_k2 import KimiK2Format
from mlx_paged.parsing.kimi_k3 import KimiK3Format
from mlx_paged.parsing.lexer import Lexer
from mlx_paged.parsing.lfm2 import Lfm2Format
from mlx_paged.parsing.llama3 import Llama3JsonFormat
from mlx_paged.parsing.longcat import LongcatFormat
from mlx_paged.parsing.minicpm5 import MiniCpm5Format
from mlx_paged.parsing.minimax_m2 import MinimaxM2Format
from mlx_paged.parsing.minimax_m3 import MinimaxM3Format
from mlx_paged.parsing.mistral import MistralFormat
from mlx_paged.parsing.muse import MuseFormat
from mlx_paged.parsing.olmo3 import Olmo3Format
from mlx_paged.parsing.phi4 import Phi4MiniFormat
from mlx_paged.parsing.plain_json import JsonFormat, XlamFormat
from mlx_paged.parsing.plamo3 import Plamo3Format
from mlx_paged.parsing.probe import ARGUMENTS, TOOL, shown
from mlx_paged.parsing.pythonic import Llama4PythonicFormat, PythonicFormat
from mlx_paged.parsing.qwen3_coder import MimoFormat, Qwen3CoderFormat, SeedOssFormat
from mlx_paged.parsing.solar_open import SolarOpenFormat
from mlx_paged.parsing.step3 import Step3Format
from mlx_paged.parsing.tool_calls import (
    AprielFormat,
    HunyuanA13bFormat,
    JambaFormat,
    MinimaxM1Format,
    NemotronNanoV2Format,
)
from mlx_paged.templates.variables import knows_tools

#: Every format. Detection takes the first match, so those with weaker evidence come later.
FORMATS: tuple[type[ToolFormat], ...] = (
    HarmonyFormat,
    SolarOpenFormat,
    InklingFormat,
    MuseFormat,
    KimiK3Format,
    Plamo3Format,
    MinimaxM3Format,
    MinimaxM2Format,
    DotsFormat,
    Step3Format,
    Hunyuan3Format,
    MiniCpm5Format,
    Internlm2Format,
    ApertusFormat,
    GigaChat3Format,
    DeepseekV4Format,
    DeepseekV32Format,
    DeepseekV3Format,
    DeepseekV31Format,
    KimiK2Format,
    Gemma4Format,
    FunctionGemmaFormat,
    LongcatFormat,
    CohereFormat,
    Lfm2Format,
    Olmo3Format,
    NemotronNanoV2Format,
    JambaFormat,
    AprielFormat,
    MinimaxM1Format,
    HunyuanA13bFormat,
    Glm45Format,
    Glm47Format,
    SeedOssFormat,
    MimoFormat,
    Qwen3CoderFormat,
    Granite4Format,
    GraniteFormat,
    Granite20bFormat,
    Ernie45Format,
    HermesFormat,
    Phi4MiniFormat,
    Llama4PythonicFormat,
    PythonicFormat,
    Llama3JsonFormat,
    MistralFormat,
    FunctionaryV32Format,
    FunctionaryV31Format,
    XlamFormat,
    JsonFormat,
)

_BY_NAME = {name: kind for kind in FORMATS for name in kind.names}


def names() -> list[str]:
    """Every name of a format."""
    return sorted(_BY_NAME)


def format_of(name: str, vocabulary: Mapping[str, int], chat_template: str = "") -> ToolFormat:
    """Returns the format that ``--tool-call-parser`` names: one of `names`.

    Args:
        vocabulary: The tokenizer's added tokens, by text.
        chat_template: The model's template, for families with several ways to render calls.
    """
    return _BY_NAME[name](vocabulary, shown(chat_template).text)


def detect(chat_template: str, vocabulary: Mapping[str, int]) -> ToolFormat | None:
    """Detects the format by a model's chat template and added tokens; None if it is unknown.

    A listed format must have its marks in the template's texts. If the template renders calls, the
    format's own parser must also read them, because marks alone may be a mention. If no listed
    format does, the syntax is derived from the template.
    """
    found = shown(chat_template)
    # If a template offers tools and renders no calls, all its source counts, including comments.
    text = found.text if found.calls or not knows_tools(chat_template) else chat_template
    for kind in FORMATS:
        if not kind.matches(text, vocabulary):
            continue
        format = kind(vocabulary, text)
        if not found.calls or any(_reads(format, call) for call in found.calls):
            return format
    if not found.calls and knows_tools(chat_template):
        # It offers tools and renders no calls, but a comment may name the tokens of a format.
        named = {token for token in vocabulary if token in chat_template}
        kinds = [kind for kind in FORMATS if kind.markers and named.issuperset(kind.markers)]
        if kinds:  # The plainest one, because variants of a format have its markers.
            plainest = min(kinds, key=lambda kind: len(kind.mro()))
            return plainest(vocabulary, found.text)
    return derived_or_none(chat_template, vocabulary)


def _reads(format: ToolFormat, text: str) -> bool:
    """True if a format reads the probe's call, and no other, in a template's rendering of it."""
    reader = AnswerReader(
        Lexer(format.markers, {}),
        answer_parser(format, None, (TOOL,), begins_inside=False),
        (TOOL,),
    )
    for character in text:
        list(reader.feed(None, character))
    list(reader.finish())
    calls = [(call.name, call.arguments, call.is_complete) for call in reader.answer.calls]
    if [name for name, _, is_complete in calls if is_complete] != [TOOL.name]:
        return False
    try:
        return bool(json.loads(calls[0][1]) == ARGUMENTS)
    except ValueError:
        return False
