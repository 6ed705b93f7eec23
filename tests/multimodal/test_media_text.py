"""Text of users beside placeholders, and the start token of chats with and without media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mlx_paged.multimodal.marked_text import MarkedText
from mlx_paged.multimodal.marks import MARK, marked, unmarked

SPECIAL = ["<s>", "<image>", "<end>"]


def bytes_tokenizer() -> Tokenizer:
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return tokenizer


def llama_tokenizer() -> Tokenizer:
    """Writes a space before each text between added tokens, as Llama's does."""
    letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghimnsu?<>", "▁a"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


@pytest.fixture(params=[bytes_tokenizer, llama_tokenizer])
def tokenizers(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """One with placeholders, and one that does not know them."""
    made = []
    for special in (SPECIAL, [token for token in SPECIAL if token != "<image>"]):
        tokenizer = request.param()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        made.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))
    return made[0], made[1]


def test_a_marked_text_is_itself_again() -> None:
    for text in ("<image>", "a<image><image>b", f"{MARK}x{MARK}", "<<image>", "", f"<image>{MARK}"):
        found = marked(text, ["<image>", "<a><image><b>"])
        assert "<image>" not in found
        assert unmarked(found) == text
    nested = marked([{"content": "<image>", "n": 3}, ("<image>", None)], ["<image>"])
    assert nested == [{"content": f"<{MARK}image>", "n": 3}, [f"<{MARK}image>", None]]


def test_tokens_of_a_marked_text_are_those_of_a_tokenizer_without_placeholders(
    tokenizers: tuple[Any, Any],
) -> None:
    tokenizer, plain = tokenizers
    maker = MarkedText(tokenizer, ["<image>"], "<image>")
    [end] = tokenizer.convert_tokens_to_ids(["<end>"])
    [other] = plain.convert_tokens_to_ids(["<end>"])
    for text in ("a <image> in a <image>?", "<image>", "a<end><image>", f"a{MARK}<image>"):
        [found] = maker.pieces(marked(text, ["<image>"]))
        expected = plain(text, add_special_tokens=False)["input_ids"]
        assert found == [end if token == other else token for token in expected]
    # The separator parts a text as its placeholder does, which here is "<end>".
    found = maker.pieces(marked("see <image> a", ["<image>"]) + maker.separator + "a")
    whole = plain("see <image> a<end>a", add_special_tokens=False)["input_ids"]
    at = whole.index(other)
    assert found == [whole[:at], whole[at + 1 :]]
    # A placeholder without a mark stays a placeholder.
    [found] = maker.pieces(f"<image>{marked('<image>', ['<image>'])}")
    [image] = tokenizer.convert_tokens_to_ids(["<image>"])
    assert found[0] == image and image not in found[1:]


# --- Models ---------------------------------------------------------------------------------------


def checkpoint(path: Path, name: str) -> Any:
    """A checkpoint whose tokenizer begins texts with a token that its template does not write."""
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")
    from support.media_checkpoints import write
    from support.more_media_checkpoints import ALL_CHECKPOINTS

    from mlx_paged import LLM, load

    write(path, ALL_CHECKPOINTS[name]())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    start = tokenizer.token_to_id("<pad>")
    tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", pair="<pad> $A $B", special_tokens=[("<pad>", start)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<pad>"}))
    return LLM(load(path), kv_cache_memory=16 << 20, block_size=16), start


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl", "phi3_v"])
def test_users_write_placeholders_as_text(name: str, tmp_path: Path) -> None:
    from PIL import Image

    from mlx_paged import SamplingParams

    llm, start = checkpoint(tmp_path, name)
    params = SamplingParams(max_tokens=1, temperature=0)
    media = llm.engine.media
    picture: dict[str, Any] = {"type": "image", "image": Image.new("RGB", (90, 60), "red")}
    placeholder = media.placeholder("image")
    rows = media._text_of(media._placeholder_ids("image")[0]) or placeholder
    asked = f"What does {placeholder} or {rows} do?"

    def chat(*parts: Any) -> list[int]:
        [output] = llm.chat([{"role": "user", "content": list(parts)}], params)
        return list(output.prompt_token_ids)

    beside, plain = chat(picture, asked), chat(asked)
    for tokens in (beside, plain):
        assert asked in llm.tokenizer.decode(tokens)
        assert tokens[0] == start and tokens[1] != start
    # Beside the picture's own rows there are no others.
    ids = media._placeholder_ids("image")
    count = chat(picture, "What?")
    assert sum(t in ids for t in beside) == sum(t in ids for t in count)
    assert not any(t in ids for t in plain)
    # As for a tokenizer that does not know the placeholder: letter by letter.
    tail = llm.tokenizer.encode(" do?", add_special_tokens=False)
    at = next(i for i in range(len(plain)) if plain[i : i + len(tail)] == tail)
    assert beside[-(len(plain) - at) :] == plain[at:]


def test_a_chat_about_a_picture_begins_like_one_without(tmp_path: Path) -> None:
    from PIL import Image

    from mlx_paged import SamplingParams

    llm, start = checkpoint(tmp_path, "llava")
    params = SamplingParams(max_tokens=1, temperature=0)
    first = [{"role": "user", "content": "Hello there"}]
    picture = {"type": "image", "image": Image.new("RGB", (60, 60))}
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": [picture]}]
    a, b = llm.chat([first, later], params)
    count = len("user\nHello there")
    assert a.prompt_token_ids[:count] == b.prompt_token_ids[:count]
    assert a.prompt_token_ids[0] == start
    # As transformers' processor does it; the template's own start token is not doubled.
    assert llm.engine.media.encode("<pad>a") == llm.engine.media.encode("a")
    assert start not in llm.engine.media.encode("a", add_special_tokens=False)


def test_a_text_model_adds_nothing_to_its_template() -> None:
    from support.models import embedded_twin

    from mlx_paged.engine.chat.renderer import ChatRenderer

    tokenizer = embedded_twin().tokenizer
    text_only = ChatRenderer(tokenizer)
    multimodal = ChatRenderer(tokenizer, media_reason="its files have no weights of a tower")
    text = "def f():"
    plain = list(tokenizer.encode(text, add_special_tokens=False))
    assert text_only.tokens(text) == plain
    whole = list(tokenizer.encode(text, add_special_tokens=True))
    assert multimodal.tokens(text) == whole
    assert multimodal.tokens(text, add_special_tokens=False) == plain
