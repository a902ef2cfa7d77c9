"""Small random vision-language models of transformers' families, each with its family's processor around the
tokenizer of `tiny`. Nothing is downloaded, and torchvision is not needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from posttrain.batch import Prompt, PromptImages
from posttrain.images import Image, open_image, png_url
from posttrain.models import tiny, tiny_vision, vision
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel

TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "initializer_range": 0.2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
CLIP: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 32, "patch_size": 8},
}
QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}

# Tokens of images of each family; the first one stands for an image in a text.
TOKENS = {
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<end_of_utterance>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    "llava": ("<image>", "<video>"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<end_of_utterance>"),
}
NAMES = {  # the names under which processors ask a tokenizer for them
    "gemma3": ("boi_token", "eoi_token", "image_token"),
    "smolvlm": ("image_token", "fake_image_token", "global_image_token"),
    "internvl": ("context_image_token", "start_image_token", "end_image_token", "video_token"),
}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm", "llava_onevision", "internvl")


def kin(kind: str) -> str:
    """Return the family whose tokens a kind uses."""
    return "qwen" if kind.startswith("qwen") else "llava" if kind == "llava_onevision" else kind


def tokenizer_of(kind: str) -> Any:
    tokens = TOKENS[kin(kind)]
    plain = tiny.build_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [*tiny.ROLES, *tokens]})
    named = dict(zip(NAMES.get(kind, ()), tokens, strict=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        **{f"{name}_token": getattr(plain, f"{name}_token") for name in ("pad", "bos", "eos", "unk")},
        extra_special_tokens=named,
        padding_side="left",
    )
    tokenizer.chat_template = tiny_vision.CHAT_TEMPLATE.replace(tiny_vision.IMAGE, tokens[0])
    return tokenizer


# A language model with heads that vLLM's kernels for a CPU know.
WIDE_HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}


def config_of(kind: str, tokenizer: Any, *, wide_heads: bool = False) -> Any:
    """Return a configuration of two layers."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS[kin(kind)]}
    text: dict[str, Any] = {**TEXT, **(WIDE_HEADS if wide_heads else {}), "vocab_size": len(tokenizer)}
    width = text["hidden_size"]
    if kin(kind) == "qwen":
        sizes = {"out_hidden_size": width, "hidden_size": 32, "intermediate_size": 48, **QWEN_VISION}
        if kind == "qwen2_vl":
            sizes = {"embed_dim": 32, "hidden_size": width, "mlp_ratio": 2, **QWEN_VISION}
        if kind == "qwen2_5_vl":
            sizes |= {"window_size": 32, "fullatt_block_indexes": [1]}
        if kind == "qwen3_vl":
            sizes |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        parts = {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        sections = [4, 6, 6] if wide_heads else [1, 1, 2]
        rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
        return CONFIG_MAPPING[kind](text_config={**text, "rope_parameters": rope}, vision_config=sizes, **parts)
    if kind == "gemma3":
        text |= {"query_pre_attn_scalar": 8, "sliding_window": 512}
        parts = {"image_token_index": ids["<image_soft_token>"], "mm_tokens_per_image": 4}
        parts |= {"boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"]}
        return CONFIG_MAPPING[kind](text_config=text, vision_config=CLIP, **parts)
    if kind in ("idefics3", "smolvlm"):
        text |= {"model_type": "llama"}
        return CONFIG_MAPPING[kind](
            text_config=text, vision_config=CLIP, image_token_id=ids["<image>"], scale_factor=2, pad_token_id=0
        )
    if kind == "internvl":
        sizes = {**CLIP, "image_size": [32, 32], "patch_size": [8, 8]}
        text |= {"model_type": "qwen2"}
        return CONFIG_MAPPING[kind](
            text_config=text, vision_config=sizes, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4
        )
    text |= {"model_type": "qwen2"}
    parts = {"image_token_index": ids["<image>"], "video_token_index": ids["<video>"]}
    parts |= {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]]}
    return CONFIG_MAPPING[kind](text_config=text, vision_config={**CLIP, "model_type": "siglip_vision_model"}, **parts)


def processor_of(kind: str, tokenizer: Any, config: Any) -> Any:
    """Return the processor of the family, whose image part works with Pillow."""

    def pil(name: str, cls: str, **how: Any) -> Any:
        module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        return getattr(module, cls)(**how)

    square = {"height": 32, "width": 32}
    make = vision.processor_class(config)
    if make is transformers.AutoProcessor:
        make = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    if kin(kind) == "qwen":
        images = pil(
            "qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}
        )
        video = {} if importlib.util.find_spec("torchvision") is None else {"video_processor": _qwen_videos(kind)}
        return make(image_processor=images, tokenizer=tokenizer, **video)
    if kind == "gemma3":
        return make(pil("gemma3", "Gemma3ImageProcessorPil", size=square), tokenizer, image_seq_length=4)
    if kind in ("idefics3", "smolvlm"):
        how = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        name = {"idefics3": "Idefics3ImageProcessorPil", "smolvlm": "SmolVLMImageProcessorPil"}[kind]
        return make(pil(kind, name, **how), tokenizer, image_seq_len=4)
    if kind == "internvl":
        images = pil("got_ocr2", "GotOcr2ImageProcessorPil", size=square, max_patches=2)
        return make(images, tokenizer, image_seq_length=4)
    images = pil(
        "llava_onevision",
        "LlavaOnevisionImageProcessorPil",
        size=square,
        image_grid_pinpoints=config.image_grid_pinpoints,
    )
    return make(images, tokenizer, num_image_tokens=16, vision_feature_select_strategy="full")


def _qwen_videos(kind: str) -> Any:
    """Return the video reader of Qwen's processors, if torchvision is installed."""
    name = "Qwen3VLVideoProcessor" if kind == "qwen3_vl" else "Qwen2VLVideoProcessor"
    return getattr(transformers, name)(patch_size=8)


def save_seeing(kind: str, folder: Path, seed: int = 0, *, wide_heads: bool = False) -> Path:
    """Save a model folder with transformers alone and return it."""
    tokenizer = tokenizer_of(kind)
    config = config_of(kind, tokenizer, wide_heads=wide_heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
        for parameter in model.parameters():
            if not parameter.any():  # some projections are initialized to 0, so images would have no effect
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    processor_of(kind, tokenizer, config).save_pretrained(folder)
    return folder


WIDE = Image(png_url(open_image(probe_image()).resize((64, 24))))


def prompts_of(loaded: LoadedModel) -> list[Prompt]:
    """Return three prompts: with one image; with two images of other shapes between words; with none."""
    reader, tokenizer = loaded.images, loaded.tokenizer
    assert reader is not None
    texts = [("a{}bcd?", (probe_image(),)), ("{}efg{}h", (WIDE, probe_image())), ("only words", ())]
    found = []
    for number, (text, shown) in enumerate(texts):
        ids = tokenizer(text.format(*(reader.read(image).text for image in shown)))["input_ids"]
        short = tokenizer(text.format(*(reader.placeholder for _ in shown)))["input_ids"]
        images = PromptImages(shown, tuple(short), len(ids)) if shown else None
        found.append(Prompt(str(number), {}, text, tuple(ids), images))
    return found
