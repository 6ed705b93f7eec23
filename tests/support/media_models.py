"""Small random models of mlx-vlm, and prompts with pictures for them.

A case gives a prompt in two forms: as mlx-vlm's own `generate_step` takes it, and as tokens with
items for `PagedModel`. No file is read and no processor is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.model.overrides import overridden
from support.media_cases import (
    HEADS,
    IMG,
    KV_HEADS,
    LATENT_DIMS,
    SOUND,
    START,
    TEXT,
    VIDEO,
    Case,
    Item,
    Prompt,
    V,
    noise_of,
    package,
    patch_item,
    sections,
    square_item,
    vision_config,
)
from support.qwen_media_models import (
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_omni_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from support.reference import HEAD_DIM


def gemma3(head_dim: int = HEAD_DIM) -> Case:
    m = package("gemma3")
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(
                model_type="gemma3",
                **TEXT,
                head_dim=head_dim,
                mm_tokens_per_image=16,
                sliding_window=16,
                sliding_window_pattern=2,
            ),
            vision_config=m.VisionConfig(**vision_config("gemma3", 112)),
            model_type="gemma3",
            hidden_size=64,
            pad_token_id=0,
            image_token_index=IMG,
            vocab_size=V,
        )
    )
    return Case(model, "gemma3", lambda seed: square_item(seed, size=112, rows=16), {})


def llava() -> Case:
    m = package("llava")
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(model_type="llama", **TEXT),
            vision_config=m.VisionConfig(**vision_config("clip_vision_model", 56)),
            model_type="llava",
            image_token_index=IMG,
            vocab_size=V,
            vision_feature_layer=-1,
        )
    )
    return Case(model, "llava", lambda seed: square_item(seed, size=56, rows=16), {})


def _idefics(name: str) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(model_type=name, **TEXT),
            vision_config=m.VisionConfig(
                **vision_config("smolvlm_vision" if name == "smolvlm" else name, 112)
            ),
            model_type=name,
            image_token_id=IMG,
            scale_factor=2,
        )
    )
    return Case(
        model,
        name,
        # (Text between the rows, as where a picture is split into tiles.)
        lambda seed: square_item(seed, size=112, rows=16, tiles=True, between=[151, 152]),
        {"pixel_values": 1},
    )


def idefics3() -> Case:
    return _idefics("idefics3")


def smolvlm() -> Case:
    return _idefics("smolvlm")


def _plain(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    picture: Callable[[int], Item],
    axes: dict[str, int] | None = None,
    **more: Any,
) -> Case:
    m = package(name)
    config = {
        "text_config": m.TextConfig.from_dict({**TEXT, **text}),
        "vision_config": m.VisionConfig.from_dict(vision),
        "model_type": name,
        "image_token_index": IMG,
        "image_token_id": IMG,
        "vocab_size": V,
        "hidden_size": 64,
        "pad_token_id": 0,
        **more,
    }
    known = m.ModelConfig.__dataclass_fields__
    return Case(
        m.Model(m.ModelConfig(**{k: v for k, v in config.items() if k in known})),
        name,
        picture,
        axes or {},
    )


def llava_next() -> Case:
    """Wide pictures: the whole, and a row of two tiles. The merge is Hugging Face's."""

    def picture(seed: int) -> Item:
        arrays = {
            "pixel_values": noise_of(seed, 1, 3, 3, 56, 56),
            "image_sizes": np.array([[40, 100]]),
            "tile_grid": np.array([1, 2]),
        }
        # 4 x 4 of the whole; of 4 lines of 8 without the padding, 8 and an end each.
        num = 16 + 4 * 9
        return Item([IMG] * num, arrays, rows=np.arange(num, dtype=np.int32))

    case = _plain(
        "llava_next",
        {"model_type": "llama"},
        vision_config("clip_vision_model", 56),
        picture,
        vision_feature_layer=-1,
    )
    base = type(case.model)

    def merged(self: Any, input_ids: mx.array, pixels: Any = None, **kwargs: Any) -> Any:
        if pixels is None:
            return base.get_input_embeddings(self, input_ids, None)
        embeds = np.array(self.language_model.model.embed_tokens(input_ids))
        rows: list[np.ndarray] = []
        for one in pixels:
            *_, states = self.vision_tower(one.transpose(0, 2, 3, 1), output_hidden_states=True)
            whole, left, right = np.array(self.multi_modal_projector(states[-1][:, 1:]))
            rows += list(whole)
            for line in range(4):
                rows += [*left[4 * line : 4 * line + 4], *right[4 * line : 4 * line + 4]]
                rows.append(np.array(self.image_newline))
        embeds[0, np.array(input_ids)[0] == IMG] = np.stack(rows)
        return package("base").InputEmbeddingsFeatures(inputs_embeds=mx.array(embeds))

    case.model.__class__ = type(base.__name__, (base,), {"get_input_embeddings": merged})
    return case


def llava_bunny() -> Case:
    def picture(seed: int) -> Item:
        found = square_item(seed, size=378, rows=729)
        found.short = [IMG]
        return found

    case = _plain(
        "llava_bunny",
        {"model_type": "qwen2"},
        {**vision_config("siglip_vision_model", 378)},
        picture,
        auto_map={},
        mm_hidden_size=32,
    )
    case.most_pictures = 1
    return case


def pixtral() -> Case:
    vision = {**vision_config("pixtral", 56), "head_dim": 16, "rope_theta": 10000.0}
    return _plain(
        "pixtral",
        {"model_type": "mistral", "head_dim": HEAD_DIM, "rope_theta": 10000.0},
        vision,
        lambda seed: square_item(seed, size=56, rows=16, sizes=True, between=[151]),
    )


def mistral3() -> Case:
    vision = {**vision_config("pixtral", 112), "head_dim": 16, "rope_theta": 10000.0}
    text = {"model_type": "mistral", "head_dim": HEAD_DIM, "rope_theta": 10000.0}
    return _plain(
        "mistral3",
        {**text, "rope_parameters": {"rope_theta": 10000.0}},
        vision,
        lambda seed: square_item(seed, size=112, rows=16, sizes=True, between=[151]),
    )


def idefics2() -> Case:
    m = package("idefics2")
    perceiver = {"num_key_value_heads": 2, "resampler_depth": 2, "resampler_head_dim": 16}
    more = {"resampler_n_heads": 4, "resampler_n_latents": 8}

    def picture(seed: int) -> Item:
        found = square_item(seed, size=56, rows=8, tiles=True)
        found.arrays["pixel_attention_mask"] = np.ones((1, 1, 56, 56), dtype=bool)
        return found

    return _plain(
        "idefics2",
        {"model_type": "mistral"},
        vision_config("idefics2", 56),
        picture,
        {"pixel_values": 1, "pixel_attention_mask": 1},
        perceiver_config=m.PerceiverConfig(model_type="idefics2", **perceiver, **more),
    )


def internvl_chat() -> Case:
    return _plain(
        "internvl_chat",
        {"model_type": "qwen2"},
        vision_config("intern_vit_6b", 112),
        lambda seed: square_item(seed, size=112, rows=16),
    )


def gemma4_vision() -> Case:
    """The positions of a picture see each other, in layers with a window."""
    case = gemma4()
    case.model.config.text_config.use_bidirectional_attention = "vision"
    case.sound, case.sees_pictures = None, True

    def join(prompt: Prompt) -> dict[str, Any]:
        items = [item for _, item in prompt.items]
        types = np.isin([prompt.token_ids], [IMG, VIDEO]).astype(np.int32)
        joined = {
            name: mx.array(np.concatenate([item.arrays[name] for item in items]))
            for name in items[0].arrays
        }
        return {**joined, "mm_token_type_ids": mx.array(types)}

    case.join = join
    inner = case.model.language_model.model
    inner.__class__ = overridden(type(inner), "_make_masks", _masks_of_hugging_face)
    return case


def _masks_of_hugging_face(model: Any, hidden: mx.array, caches: list[Any], types: Any) -> Any:
    """Gemma 4's: mlx-vlm's have the pictures in layers without a window too, and go beyond it."""
    position = np.arange(hidden.shape[1])
    if types is None or len(position) == 1:
        return type(model).__mro__[1]._make_masks(model, hidden, caches, types)
    assert types.shape[1] == len(position)
    is_vision = np.array(types[0]) > 0
    starts = is_vision & ~np.concatenate([[False], is_vision[:-1]])
    block = np.where(is_vision, np.cumsum(starts), 0)
    causal = position[None] <= position[:, None]
    seen = causal | ((block[:, None] == block) & is_vision)
    near = position[None] > position[:, None] - model.window_size
    masks = {"full_attention": mx.array(causal), "sliding_attention": mx.array(seen & near)}
    return [masks[layer.layer_type] for layer in model.layers]


def gemma4_video() -> Case:
    """Two frames with text between them; the positions of a frame see each other."""
    case = gemma4_vision()
    case.model.config.video_token_id = VIDEO

    def clip(seed: int) -> Item:
        place = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1).reshape(1, 1, 64, 2)
        arrays = {
            "pixel_values_videos": noise_of(seed, 1, 2, 64, 768),
            "video_position_ids": np.tile(place, (1, 2, 1, 1)).astype(np.int32),
        }
        ids = [*[VIDEO] * 16, 151, 152, *[VIDEO] * 16]
        return Item(ids, arrays, "video", np.flatnonzero(np.array(ids) == VIDEO).astype(np.int32))

    case.picture = clip
    return case


def gemma4() -> Case:
    text = {
        "model_type": "gemma4_text",
        "head_dim": HEAD_DIM,
        "global_head_dim": HEAD_DIM,
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 16,
        "pooling_kernel_size": 2,
        "default_output_length": 16,
        "position_embedding_size": 64,
    }
    m = package("gemma4")
    audio = m.AudioConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        subsampling_conv_channels=(8, 4),
        output_proj_dims=32,
    )
    case = _plain(
        "gemma4",
        text,
        vision,
        lambda seed: square_item(seed, size=128, rows=16),
        audio_config=audio,
        audio_token_id=SOUND,
    )

    def sound(seed: int) -> Item:
        arrays = {
            "input_features": noise_of(seed, 1, 32, 128),
            "input_features_mask": np.ones((1, 32), dtype=bool),
        }
        return Item([SOUND] * 8, arrays, "audio", np.arange(8, dtype=np.int32))

    case.sound = sound
    return case


def smaller_gemma3n() -> None:
    """Its picture tower is one of 300 M parameters whatever the config says: another is here."""
    inner = importlib.import_module("mlx_vlm.models.gemma3n.gemma3n")

    class Tower(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 32, 14, 14)

        def __call__(self, pixels: mx.array, output_hidden_states: bool = False) -> mx.array:
            return self.conv(pixels.transpose(0, 2, 3, 1))

    inner.VisionModel = package("gemma3n").VisionModel = Tower


def gemma3n(*, num_shared: int = 0) -> Case:
    """(mlx-vlm's own layers that share keys turn queries by positions behind the chunk.)"""
    m = package("gemma3n")
    text = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "head_dim": HEAD_DIM,
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "sliding_window": 16,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": num_shared,
        "intermediate_size": [96] * 4,
        "final_logit_softcapping": 30.0,
        "altup_num_inputs": 2,
    }

    smaller_gemma3n()
    audio = m.AudioConfig(
        input_feat_size=32,
        hidden_size=32,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=2,
        sscp_conv_channel_size=(8, 4),
        vocab_size=8,
        vocab_offset=V - 8,  # (padding of sounds is the last token)
    )
    case = _plain(
        "gemma3n",
        text,
        {"model_type": "gemma3n_vision", "hidden_size": 32, "vocab_size": 8},
        lambda seed: square_item(seed, size=56, rows=16),
        audio_config=audio,
        audio_token_id=SOUND,
        vision_soft_tokens_per_image=16,
        audio_soft_tokens_per_image=12,
    )
    case.model.embed_vision.vocab_offset = 1000
    base = type(case.model)

    def scaled(self: Any, input_ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        """(mlx-vlm leaves this out for prompts, and has it for the tokens that follow.)"""
        found = base.get_input_embeddings(self, input_ids, *args, **kwargs)
        text = (
            (input_ids != IMG) & (input_ids != SOUND) & (input_ids < self.embed_audio.vocab_offset)
        )
        found.inputs_embeds = mx.where(text[..., None], 8.0, 1.0) * found.inputs_embeds
        return found

    case.model.__class__ = type(base.__name__, (base,), {"get_input_embeddings": scaled})

    def sound(seed: int) -> Item:
        arrays = {
            "input_features": noise_of(seed, 1, 64, 32),
            "input_features_mask": np.arange(64)[None] < 50,
        }
        return Item([SOUND] * 12, arrays, "audio", np.arange(12, dtype=np.int32))

    case.sound = sound
    return case


def paligemma() -> Case:
    """All of a prompt sees each other."""
    text = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    vision = {**vision_config("siglip_vision_model", 56), "projection_dim": 64}

    def whole_prompt(seed: int) -> Item:
        found = square_item(seed, size=56, rows=16)
        found.token_ids += [189, *(20 + (seed * 7 + i) % 60 for i in range(9))]
        return found

    case = _plain("paligemma", {**text, "use_bidirectional_attention": True}, vision, whole_prompt)
    case.most_pictures, case.only_pictures = 1, True
    return case


def aya_vision() -> Case:
    text = {
        "model_type": "cohere2",
        "head_dim": HEAD_DIM,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    }
    return _plain(
        "aya_vision",
        text,
        vision_config("siglip_vision_model", 112),
        lambda seed: square_item(seed, size=112, rows=16),
        alignment_intermediate_size=64,
    )


def llama4() -> Case:
    text = {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": HEAD_DIM,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "floor_scale": 8,
    }
    vision = {
        **vision_config("llama4_vision_model", 56),
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 64,
        "intermediate_size": 128,
    }
    return _plain("llama4", text, vision, lambda seed: square_item(seed, size=56, rows=4))


def lfm2_vl() -> Case:
    text = {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "num_heads": HEADS,
        "block_dim": 64,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "block_multiple_of": 8,
    }

    def picture(seed: int) -> Item:
        patches = np.random.default_rng(seed).standard_normal((1, 64, 3 * 14 * 14))
        return Item(
            [IMG] * 16,
            {
                "pixel_values": patches.astype(np.float32),
                "spatial_shapes": np.array([[8, 8]]),
                "pixel_attention_mask": np.ones((1, 64), dtype=np.int32),
            },
            rows=np.arange(16, dtype=np.int32),
        )

    vision = {**vision_config("lfm2_vl", 112), "num_patches": 64}
    return _plain("lfm2_vl", text, vision, picture, projector_hidden_size=64)


def kimi_vl() -> Case:
    text = {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        **LATENT_DIMS,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": HEADS,
    }
    vision = {"model_type": "moonvit", "depth": 2, "hidden_size": 32, "embed_dim": 32}
    more = {"num_heads": 2, "intermediate_size": 48, "patch_size": 14}

    def picture(seed: int) -> Item:
        height = 4 + 2 * (seed % 2)
        patches = np.random.default_rng(seed).standard_normal((height * 8, 3, 14, 14))
        num = height * 8 // 4
        return Item(
            [IMG] * num,
            {"pixel_values": patches.astype(np.float32), "image_grid_hws": np.array([[height, 8]])},
            rows=np.arange(num, dtype=np.int32),
        )

    positions = {"init_pos_emb_height": 8, "init_pos_emb_width": 8}
    return _plain("kimi_vl", text, {**vision, **more, **positions}, picture)


def glm4v() -> Case:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    more = {"out_hidden_size": 64, "image_size": 112, "patch_size": 14, "in_channels": 3}
    return _plain(
        "glm4v",
        {"model_type": "glm4v_text", "rope_scaling": {"mrope_section": sections(2, 1, 1)}},
        {"model_type": "glm4v", **vision, **more},
        patch_item,
        video_token_id=VIDEO,
        video_token_index=VIDEO,
        vision_start_token_id=START,
    )


def smaller_phi3_v() -> None:
    """The sizes of its tower are fixed; the width follows from other fixed sizes."""
    vision = package("phi3_v").vision.VisionModel
    full = vision.CLIP_VIT_LARGE_PATCH14_336_CONFIG
    small = {"num_hidden_layers": 2, "intermediate_size": 32}
    vision.CLIP_VIT_LARGE_PATCH14_336_CONFIG = SimpleNamespace(**{**vars(full), **small})


def phi3_v() -> Case:
    m = package("phi3_v")
    smaller_phi3_v()
    model = m.Model(m.ModelConfig(**TEXT))

    def picture(seed: int) -> Item:
        pixels = np.random.default_rng(seed).standard_normal((1, 2, 3, 336, 336))
        arrays = {
            "pixel_values": pixels.astype(np.float32),
            "image_sizes": np.array([[336, 336]]),
        }
        return Item([-1] * 313, arrays, rows=np.arange(313, dtype=np.int32))

    return Case(model, "phi3_v", picture, most_pictures=1)


def deepseek_vl_v2() -> Case:
    m = package("deepseek_vl_v2")
    text = {
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        **LATENT_DIMS,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": HEADS,
    }
    vision = {"layers": 2, "width": 32, "intermediate_size": 48, "num_attention_heads": 2}

    def picture(seed: int) -> Item:
        # The whole and one tile, of 2 x 2 rows: (2 * 3) + 1 + (2 * 3).
        pixels = np.random.default_rng(seed).standard_normal((1, 2, 3, 64, 64))
        arrays = {
            "pixel_values": pixels.astype(np.float32),
            "images_spatial_crop": np.array([[[1, 1]]]),  # (mlx-vlm reads one for each tile)
            "images_seq_mask": np.ones((1, 13), dtype=bool),
        }
        return Item([IMG] * 13, arrays, rows=np.arange(13, dtype=np.int32))

    def join(prompt: Prompt) -> dict[str, Any]:
        items = [item.arrays for _, item in prompt.items]
        return {
            "pixel_values": mx.array(np.concatenate([i["pixel_values"] for i in items], 1)),
            "images_spatial_crop": mx.array([[[1, 1]] * len(items) + [[0, 0]] * len(items)]),
            "images_seq_mask": mx.array([prompt.token_ids]) == IMG,
        }

    case = _plain(
        "deepseek_vl_v2",
        {"model_type": "deepseek_v2", **text},
        {"model_type": "vision", **vision, "image_size": 64, "patch_size": 16},
        picture,
        projector_config=m.ProjectorConfig(input_dim=32, n_embed=64),
    )
    case.join = join
    return case


def minicpmo() -> Case:
    text = {
        "model_type": "qwen3",
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1000,
        "rope_scaling": {"type": "default", "mrope_section": sections(4, 2, 2)},
    }

    def picture(seed: int) -> Item:
        height = 4 + 2 * (seed % 2)
        pixels = np.random.default_rng(seed).standard_normal((3, 14, 14 * 8 * height))
        arrays = {
            "pixel_values": [[pixels.astype(np.float32)]],
            "tgt_sizes": [np.array([[height, 8]], dtype=np.int32)],
            "image_bound": [np.array([[1, 9]])],
        }
        ids = [151, *[IMG] * 8, 152]
        return Item(ids, arrays, rows=np.arange(1, 9, dtype=np.int32))  # type: ignore[arg-type]

    def join(prompt: Prompt) -> dict[str, Any]:
        items = prompt.items
        return {
            "pixel_values": [[mx.array(i.arrays["pixel_values"][0][0]) for _, i in items]],
            "tgt_sizes": [np.concatenate([i.arrays["tgt_sizes"][0] for _, i in items])],
            "image_bound": [np.array([[o + 1, o + 9] for o, _ in items])],
        }

    case = _plain(
        "minicpmo",
        text,
        vision_config("siglip_vision_model", 112),
        picture,
        query_num=8,
        init_audio=False,
        init_tts=False,
    )
    case.join = join
    return case


def molmo() -> Case:
    text = {
        "d_model": 64,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "n_layers": 2,
        "mlp_hidden_size": 96,
        "embedding_size": V,
        "additional_vocab_size": 16,
    }
    vision = {
        "image_default_input_size": (56, 56),
        "hidden_size": 96,
        "image_emb_dim": 32,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_num_layers": 3,
        "image_head_dim": 16,
        "image_mlp_dim": 48,
        "image_num_pos": 17,
        "d_model": 64,
        "vit_layers": [-1, -2],
    }

    def picture(seed: int) -> Item:
        pixels = np.random.default_rng(seed).standard_normal((1, 2, 16, 588))
        places = np.arange(8).reshape(1, 2, 4)
        places[0, 1, 3] = -1  # padding
        arrays = {
            "pixel_values": pixels.astype(np.float32),
            "image_masks": np.ones((1, 2, 16), dtype=np.float32),
            "image_input_idx": places + (places > 3),
        }
        ids = [IMG] * 4 + [151] + [IMG] * 3
        rows = np.array([0, 1, 2, 3, 5, 6, 7], dtype=np.int32)
        return Item(ids, arrays, rows=rows)

    def join(prompt: Prompt) -> dict[str, Any]:
        items = prompt.items
        places = [np.where(i.arrays["image_input_idx"] < 0, -1000, 0) for _, i in items]
        moved = [i.arrays["image_input_idx"] + o + p for (o, i), p in zip(items, places)]
        joined = {
            name: mx.array(np.concatenate([i.arrays[name] for _, i in items], 1))
            for name in ("pixel_values", "image_masks")
        }
        return {**joined, "image_input_idx": mx.array(np.concatenate(moved, 1))}

    case = _plain("molmo", text, vision, picture)
    case.join = join
    return case


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        qwen3_vl_moe,
        qwen3_5,
        qwen3_5_moe,
        gemma3,
        llava,
        idefics3,
        smolvlm,
        llava_next,
        llava_bunny,
        pixtral,
        mistral3,
        idefics2,
        internvl_chat,
        gemma4,
        gemma4_vision,
        gemma4_video,
        gemma3n,
        qwen3_omni_moe,
        paligemma,
        aya_vision,
        llama4,
        lfm2_vl,
        kimi_vl,
        glm4v,
        phi3_v,
        deepseek_vl_v2,
        minicpmo,
        molmo,
    )
}
