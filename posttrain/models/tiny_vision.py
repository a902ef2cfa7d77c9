"""`tiny-vision`: the language model of `tiny` with a 2-layer vision tower (LLaVA), built in code.

An image of any size is resized to SIZE x SIZE pixels and becomes (SIZE / PATCH)^2 tokens.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain.models import tiny

SIZE = 64  # pixels, both ways
PATCH = 8
IMAGE = "<image>"  # placeholder of an image in a text, and of each of its tokens

# The template of `tiny`, extended to contents that are lists of texts and images.
CHAT_TEMPLATE = (
    "{%- macro say(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content or [] -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}\n"
) + re.sub(r"(message(?:s\[0\])?\.content)(?: or '')?", r"say(\1)", tiny.CHAT_TEMPLATE)


def build(seed: int = 0) -> tuple[Any, Any]:
    """Return (model, tokenizer): float32 on the CPU, 0.21 M parameters. Equal seeds give equal weights; global RNG is
    unchanged.
    """
    import torch
    from transformers import GenerationConfig, LlavaForConditionalGeneration

    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config).float().eval()
    model.generation_config = GenerationConfig(**tiny.special_ids(tokenizer))
    return model, tokenizer


def build_config(tokenizer: Any) -> Any:
    """Return the LlavaConfig of the model."""
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
        initializer_factor=2.0,
        dtype="float32",
    )
    return LlavaConfig(
        text_config=tiny.build_config(tokenizer),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(SIZE // PATCH) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
        dtype="float32",
        **tiny.special_ids(tokenizer),
    )


def build_tokenizer() -> Any:
    """Return the tokenizer of `tiny` with `<image>` as one more special token."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*tiny.ROLES, IMAGE]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor(tokenizer: Any) -> Any:
    """Return the processor that makes pixels of images and inserts their tokens (LlavaProcessor)."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token, which strategy `default` drops
    )
