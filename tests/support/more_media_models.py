"""Small random models of further mlx-vlm families, like `media_models`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

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
from support.media_models import CASES, _plain
from support.qwen_media_models import QWEN_DELTA, _qwen3
from support.reference import HEAD_DIM

_QWEN_IDS = {
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "vision_start_token_id": START,
    "image_start_token_id": START,
}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 112,
    "patch_size": 14,
    "in_channels": 3,
}


def glm_ocr() -> Case:
    rope = {"rope_type": "default", "mrope_section": sections(2, 3, 3), "rope_theta": 1e4}
    text = {"head_dim": HEAD_DIM, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
    vision = {**_GLM_VISION, "model_type": "glm_ocr_vision"}
    return _plain("glm_ocr", text, vision, patch_item, **_QWEN_IDS)


def glm4v_moe() -> Case:
    text = {
        "model_type": "glm4v_moe_text",
        "max_position_embeddings": 1000,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": HEAD_DIM,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "default", "mrope_section": sections(2, 1, 1)},
    }
    vision = {**_GLM_VISION, "model_type": "glm4v_moe"}
    return _plain("glm4v_moe", text, vision, patch_item, **_QWEN_IDS)


def paddleocr_vl() -> Case:
    """Its projector has the published width, whatever the config says."""

    def picture(seed: int) -> Item:
        found = patch_item(seed)
        num = 4 * len(found.rows)
        pixels = np.random.default_rng(seed).standard_normal((1, num, 3, 14, 14))
        found.arrays["pixel_values"] = pixels.astype(np.float32)
        return found

    text = {
        "model_type": "paddleocr_vl",
        "hidden_size": 1024,
        "head_dim": HEAD_DIM,
        "use_bias": False,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "default",
            "type": "default",
            "mrope_section": sections(2, 3, 3),
        },
    }
    case = _plain("paddleocr_vl", text, vision_config("paddleocr_vl", 112), picture, **_QWEN_IDS)
    case.axes = {"pixel_values": 1}
    return case


def dots_ocr() -> Case:
    def picture(seed: int) -> Item:
        found = patch_item(seed)
        found.arrays["pixel_values"] = found.arrays["pixel_values"][:, : 3 * 14 * 14]
        return found

    vision = {**vision_config("dots_vit"), "embed_dim": 32, "hidden_size": 64}
    return _plain("dots_ocr", {"model_type": "dots_ocr"}, vision, picture)


def internvl() -> Case:
    text = {
        "model_type": "qwen3",
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1000,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    return _plain(
        "internvl",
        text,
        vision_config("internvl_vision", 112),
        lambda seed: square_item(seed, size=112, rows=16),
    )


def llava_onevision() -> Case:
    """The whole image, and a row of two tiles, without padding; each line with an end."""

    def picture(seed: int) -> Item:
        pixels = np.random.default_rng(seed).standard_normal((1, 3, 3, 56, 56))
        arrays = {"pixel_values": pixels.astype(np.float32), "image_sizes": np.array([[40, 100]])}
        num = 16 + 4 * 9
        return Item([IMG] * num, arrays, rows=np.arange(num, dtype=np.int32))

    return _plain(
        "llava_onevision",
        {"model_type": "qwen2"},
        vision_config("siglip_vision_model", 56),
        picture,
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        video_token_index=VIDEO,
    )


LATENT = {
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


def kimi_k25() -> Case:
    def picture(seed: int) -> Item:
        height = 4 + 2 * (seed % 2)
        arrays = {
            "pixel_values": noise_of(seed, height * 8, 3, 14, 14),
            "image_grid_hws": np.array([[height, 8]]),
        }
        num = height * 8 // 4
        return Item([IMG] * num, arrays, rows=np.arange(num, dtype=np.int32))

    vision = {"model_type": "moonvit", "depth": 2, "hidden_size": 32, "embed_dim": 32}
    more = {"num_heads": 2, "intermediate_size": 48, "patch_size": 14}
    positions = {"init_pos_emb_height": 8, "init_pos_emb_width": 8}
    return _plain(
        "kimi_k25",
        {"model_type": "deepseek_v3", **LATENT},
        {**vision, **more, **positions},
        picture,
        media_placeholder_token_id=IMG,
    )


def smaller_sam(stride: int) -> None:
    """Replaces DeepSeek-OCR's SAM tower, whose size does not depend on the config."""
    inner = importlib.import_module("mlx_vlm.models.deepseekocr.deepseekocr")

    class Sam(nn.Module):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, stride, stride)

        def __call__(self, pixels: mx.array) -> mx.array:
            return self.conv(pixels)

    inner.SAMEncoder = Sam


def deepseekocr() -> Case:
    """Two tiles of an image side by side, and the whole."""
    m = package("deepseekocr")
    smaller_sam(stride=32)

    def picture(seed: int) -> Item:
        # 2 x 2 rows each, an end per line, and a separator between views.
        num = 2 * (4 + 1) + 2 * (2 + 1) + 1
        arrays = {
            "pixel_values": [noise_of(seed, 2, 3, 128, 128), noise_of(seed + 50, 1, 3, 128, 128)],
            "images_spatial_crop": np.array([[2, 1]]),
            "images_seq_mask": np.ones((1, num), dtype=bool),
        }
        ids = [IMG] * num
        return Item(ids, arrays, rows=np.arange(num, dtype=np.int32))  # type: ignore[arg-type]

    def join(prompt: Prompt) -> dict[str, Any]:
        [(_, item)] = prompt.items
        return {
            "pixel_values": [mx.array(part) for part in item.arrays["pixel_values"]],
            "images_spatial_crop": mx.array(item.arrays["images_spatial_crop"]),
            "images_seq_mask": mx.array([prompt.token_ids]) == IMG,
        }

    text = {**LATENT, "model_type": "deepseek_v2", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
    vision = {"model_type": "vision", "layers": 2, "hidden_size": 16, "intermediate_size": 48}
    case = _plain(
        "deepseekocr",
        text,
        {**vision, "num_attention_heads": 2},
        picture,
        projector_config=m.ProjectorConfig(
            projector_type="downsample_mlp_gelu", input_dim=32, n_embed=64, downsample_ratio=2
        ),
    )
    case.join, case.most_pictures = join, 1
    return case


def smaller_fastvlm() -> None:
    """The sizes of FastVLM's tower are neither in its config nor in any other file."""
    config = package("fastvlm").VisionConfig
    config.layers, config.embed_dims = [1, 1, 1, 1, 1], [32, 32, 32, 32, 32]
    config.num_classes = 4


def fastvlm() -> Case:
    smaller_fastvlm()

    def picture(seed: int) -> Item:
        found = square_item(seed, size=128, rows=4)
        found.short = [-200]
        return found

    case = _plain(
        "fastvlm",
        {"model_type": "llava_qwen2", "tie_word_embeddings": True},
        {"model_type": "llava_qwen2", "projection_dim": 16},
        picture,
        mm_hidden_size=64,
        image_token_index=-200,
    )
    case.most_pictures = 1  # mlx-vlm places the text after a second one differently
    return case


def mage_vl() -> Case:
    def picture(seed: int) -> Item:
        found = patch_item(seed, patch=16)
        num = 4 * len(found.rows)
        found.arrays["pixel_values"] = noise_of(seed, num, 3 * 16 * 16)
        return found

    vision = {
        **vision_config("mage_vl_vision", 112),
        "hidden_size": 64,
        "patch_size": 16,
        "out_hidden_size": 64,
        "text_hidden_size": 64,
    }
    return _plain("mage_vl", {"model_type": "qwen3", "head_dim": HEAD_DIM}, vision, picture)


def minicpmv4_6() -> Case:
    def picture(seed: int) -> Item:
        height = 4 + 4 * (seed % 2)
        num = height * 8 // 16
        arrays = {
            "pixel_values": [[noise_of(seed, 3, 14, 14 * 8 * height)]],
            "tgt_sizes": [np.array([[height, 8]], dtype=np.int32)],
            "image_bound": [np.array([[1, 1 + num]])],
        }
        ids = [151, *[IMG] * num, 152]
        rows = np.arange(1, 1 + num, dtype=np.int32)
        return Item(ids, arrays, rows=rows)  # type: ignore[arg-type]

    def join(prompt: Prompt) -> dict[str, Any]:
        items = prompt.items
        return {
            "pixel_values": [[mx.array(i.arrays["pixel_values"][0][0]) for _, i in items]],
            "tgt_sizes": [np.concatenate([i.arrays["tgt_sizes"][0] for _, i in items])],
            "image_bound": [np.array([[o + 1, o + 1 + len(i.rows)] for o, i in items])],
        }

    case = _plain(
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", "head_dim": HEAD_DIM, **QWEN_DELTA},
        {**vision_config("minicpmv4_6_vision", 112)},
        picture,
        insert_layer_id=0,
    )
    case.join = join
    return case


def granite4_vision() -> Case:
    def picture(seed: int) -> Item:
        # The whole, of 2 x 2 rows, and a row of two tiles without padding; each line with an end.
        arrays = {
            "pixel_values": noise_of(seed, 1, 3, 3, 56, 56),
            "image_sizes": np.array([[56, 112]]),
        }
        num = 4 + 2 * 5
        return Item([IMG] * num, arrays, rows=np.arange(num, dtype=np.int32))

    case = _plain(
        "granite4_vision",
        {"model_type": "granitemoehybrid", "shared_intermediate_size": 48},
        {**vision_config("siglip_vision_model", 56), "hidden_size": 64},
        picture,
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        deepstack_layer_map=[[-2, 0], [-1, 1]],
        spatial_target_layers=[1],
        downsample_rate="2/4",
    )
    case.most_pictures = 1
    return case


def _mistral3(text: dict[str, Any]) -> Case:
    vision = {**vision_config("pixtral", 112), "head_dim": 16, "rope_theta": 10000.0}
    # So that the temperature changes within a prompt.
    scaling = {
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 8,
    }
    return _plain(
        "mistral3",
        {**text, "rope_theta": 10000.0, "rope_parameters": {**scaling, **text["rope_parameters"]}},
        vision,
        lambda seed: square_item(seed, size=112, rows=16, sizes=True, between=[151]),
    )


def ministral3() -> Case:
    layers = ["sliding_attention", "full_attention"]
    more = {
        "head_dim": HEAD_DIM,
        "layer_types": layers,
        "sliding_window": 16,
        "rope_parameters": {},
    }
    return _mistral3({"model_type": "ministral3", **more})


def mistral4() -> Case:
    rope = {"rope_type": "default"}
    more = {**LATENT, "q_lora_rank": 24, "rope_parameters": rope, "head_dim": max(32, HEAD_DIM)}
    return _mistral3({"model_type": "mistral4", **more})


def phi4mm() -> Case:
    """As converted by mlx-vlm: the adapters for images and for sounds are merged."""
    m = package("phi4mm")
    audio = {
        "attention_dim": 32,
        "attention_heads": 2,
        "num_blocks": 2,
        "linear_units": 48,
        "ext_pw_out_channel": 32,
        "depthwise_seperable_out_channel": 32,
        "conv_channels": 8,
    }
    vision = {**vision_config("siglip2_vision_model", 112)}
    vision.pop("num_channels")
    turned = 3 * HEAD_DIM // 8
    factors = {"short_factor": [1.0] * turned, "long_factor": [2.0] * turned}
    scaling = {"type": "longrope", **factors}
    model = m.Model(
        m.ModelConfig.from_dict(
            {
                **TEXT,
                "max_position_embeddings": 4096,
                "rope_scaling": scaling,
                "mm_hidden_size": 32,
                "audio_token_index": SOUND,
                "vision_config": vision,
                "audio_processor": {"config": audio},
            }
        )
    )

    def picture(seed: int) -> Item:
        num = 4 * (4 + seed % 2)
        arrays = {
            "pixel_values": noise_of(seed, 1, 24, 3 * 14 * 14),
            "spatial_shapes": np.array([[4 + seed % 2, 4]]),
            "pixel_attention_mask": np.arange(24)[None] < num,
        }
        return Item([IMG] * num, arrays, rows=np.arange(num, dtype=np.int32), short=[-200])

    def sound(seed: int) -> Item:
        arrays = {
            "input_audio_embeds": noise_of(seed, 1, 64, 80),
            "audio_embed_sizes": np.array([8]),
        }
        return Item([SOUND] * 8, arrays, "audio", np.arange(8, dtype=np.int32))

    return Case(model, "phi4mm", picture, sound=sound)


def indic_ocr() -> Case:
    text = {"model_type": "qwen3_5_text", **QWEN_DELTA}
    return _qwen3("indic_ocr", text, [], tower="qwen3_5")


def smaller_deepseekocr_2(stride: int) -> None:
    """Replaces its towers, whose sizes do not depend on the config."""
    inner = importlib.import_module("mlx_vlm.models.deepseekocr_2.deepseekocr_2")

    class Sam(nn.Module):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, stride, stride)

        def __call__(self, pixels: mx.array) -> mx.array:
            return self.conv(pixels)

    class Encoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 32)

        def __call__(self, pixels: mx.array, features: mx.array) -> mx.array:
            return self.linear(features.flatten(1, 2))

    inner.SAMEncoder, inner.VisionModel = Sam, Encoder


def deepseekocr_2() -> Case:
    m = package("deepseekocr_2")
    smaller_deepseekocr_2(stride=32)

    def picture(seed: int) -> Item:
        num = 2 * 4 + 16 + 1  # two tiles, the whole, and an end
        arrays = {
            "pixel_values": [noise_of(seed, 2, 3, 64, 64), noise_of(seed + 50, 1, 3, 128, 128)],
            "images_spatial_crop": np.array([[2, 1]]),
            "images_seq_mask": np.ones((1, num), dtype=bool),
        }
        ids = [IMG] * num
        return Item(ids, arrays, rows=np.arange(num, dtype=np.int32))  # type: ignore[arg-type]

    text = {**LATENT, "model_type": "deepseek_v2", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
    case = _plain(
        "deepseekocr_2",
        text,
        {"model_type": "vision"},
        picture,
        projector_config=m.ProjectorConfig(projector_type="linear", input_dim=32, n_embed=64),
    )
    case.join, case.most_pictures = deepseekocr().join, 1
    return case


def gemma4_unified(*, sees_pictures: bool = False) -> Case:
    """Has no tower: patches go through a single layer."""
    text = {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 4,
        "head_dim": HEAD_DIM,
        "global_head_dim": HEAD_DIM,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": V,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "use_bidirectional_attention": "vision" if sees_pictures else None,
    }
    vision = {
        "model_type": "gemma4_unified_vision",
        "patch_size": 4,
        "model_patch_size": 8,
        "mm_embed_dim": 32,
        "mm_posemb_size": 16,
        "output_proj_dims": 32,
    }
    m = package("gemma4_unified")
    audio = m.AudioConfig(audio_samples_per_token=32, audio_embed_dim=32, output_proj_dims=32)

    def picture(seed: int) -> Item:
        places = np.stack(np.meshgrid(np.arange(4), np.arange(4)), axis=-1).reshape(1, 16, 2)
        arrays = {"pixel_values": noise_of(seed, 1, 16, 192), "image_position_ids": places}
        return Item([IMG] * 16, arrays, rows=np.arange(16, dtype=np.int32))

    def sound(seed: int) -> Item:
        arrays = {
            "input_features": noise_of(seed, 1, 8, 32),
            "input_features_mask": np.ones((1, 8), dtype=bool),
        }
        return Item([SOUND] * 8, arrays, "audio", np.arange(8, dtype=np.int32))

    case = _plain(
        "gemma4_unified",
        text,
        vision,
        picture,
        audio_config=audio,
        audio_token_id=SOUND,
        video_token_id=VIDEO,
    )
    if not sees_pictures:
        case.sound = sound
        return case
    case.sees_pictures = True

    def join(prompt: Prompt) -> dict[str, Any]:
        items = [item for _, item in prompt.items]
        joined = {
            name: mx.array(np.concatenate([item.arrays[name] for item in items]))
            for name in items[0].arrays
        }
        types = np.array([prompt.token_ids]) == IMG
        return {**joined, "mm_token_type_ids": mx.array(types.astype(np.int32))}

    case.join = join
    return case


def gemma4_unified_vision() -> Case:
    return gemma4_unified(sees_pictures=True)


def muse_glimmer() -> Case:
    text = {"model_type": "muse_glimmer_text", "head_dim": HEAD_DIM, "sliding_window": 16}
    vision = {
        "model_type": "muse_glimmer_vision",
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    return _plain(
        "muse_glimmer",
        text,
        vision,
        patch_item,
        video_token_id=VIDEO,
        out_hidden_size=128,
        projector_hidden_size=32,
    )


def step3p7() -> Case:
    text = {
        "model_type": "step3p5",
        "num_attention_groups": KV_HEADS,
        "moe_intermediate_size": 32,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "head_dim": HEAD_DIM,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "moe_layers_enum": (1,),
    }
    vision = {"width": 32, "layers": 2, "heads": 2, "image_size": 112, "mlp_ratio": 2.0}

    def picture(seed: int) -> Item:
        """A tile and the whole image, of 2 x 2 rows."""
        arrays = {
            "pixel_values": noise_of(seed, 1, 3, 112, 112),
            "patch_pixel_values": noise_of(seed + 50, 1, 3, 112, 112),
            "num_patches": np.array([1]),
        }
        ids = [IMG] * 4 + [151, 152] + [IMG] * 4
        return Item(ids, arrays, rows=np.flatnonzero(np.array(ids) == IMG).astype(np.int32))

    return _plain("step3p7", text, vision, picture)


def nemotron_h_nano_omni() -> Case:
    m = package("nemotron_h_nano_omni")
    text = {
        **TEXT,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "*", "-"],
        "max_position_embeddings": 1000,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "head_dim": HEAD_DIM,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": 64,
        "max_resolution": 128,
    }
    model = m.Model(
        m.ModelConfig.from_dict(
            {
                "text_config": text,
                "vision_config": vision,
                "projector_hidden_size": 48,
                "vit_hidden_size": 32,
                "img_context_token_id": IMG,
            }
        )
    )
    return Case(model, "nemotron_h_nano_omni", lambda seed: square_item(seed, size=128, rows=16))


MORE: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        glm_ocr,
        glm4v_moe,
        paddleocr_vl,
        dots_ocr,
        internvl,
        llava_onevision,
        kimi_k25,
        deepseekocr,
        fastvlm,
        mage_vl,
        minicpmv4_6,
        granite4_vision,
        ministral3,
        mistral4,
        phi4mm,
        indic_ocr,
        deepseekocr_2,
        gemma4_unified,
        gemma4_unified_vision,
        muse_glimmer,
        step3p7,
        nemotron_h_nano_omni,
    )
}
#: All families in the table.
ALL_CASES: dict[str, Callable[[], Case]] = {**CASES, **MORE}
