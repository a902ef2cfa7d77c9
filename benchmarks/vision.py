"""The model and the rows of work V of `rl_step.py`: a Qwen2.5-VL with random weights, and pictures drawn in code."""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
from pathlib import Path
from typing import Any

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
AROUND = ("<|vision_start|>", "<|vision_end|>")
COLOURS = ("red", "green", "blue", "orange", "black", "purple")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{{- '" + AROUND[0] + IMAGE + AROUND[1] + "' if part.type == 'image' else part.text -}}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# 1.08B: half the layers of Qwen2.5-VL's vision tower and of Qwen2.5-1.5B, with SmolLM2's vocabulary.
TEXT: dict[str, Any] = {
    **{"hidden_size": 1536, "num_hidden_layers": 14, "num_attention_heads": 12, "num_key_value_heads": 2},
    **{"intermediate_size": 8960, "max_position_embeddings": 4096, "initializer_range": 0.02},
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
TOWER: dict[str, Any] = {
    **{"hidden_size": 1280, "depth": 16, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 1536},
    **{"patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [3, 7, 11, 15]},
}
SMALL_TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "max_position_embeddings": 1024, "initializer_range": 0.02},
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
}
SMALL_TOWER: dict[str, Any] = {
    **{"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64},
    **{"patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1]},
}


def rows(folder: Path, count: int, side: int) -> list[dict[str, Any]]:
    """Return rows with a question about an image of side x side pixels each; the images are files in `folder`."""
    from PIL import Image, ImageDraw

    draw = random.Random("rl_step/pictures")
    (folder / "pictures").mkdir(exist_ok=True)
    found = []
    for number in range(count):
        picture = Image.new("RGB", (side, side), "white")
        pencil = ImageDraw.Draw(picture)
        for _ in range(12):
            x, y = draw.randrange(side * 3 // 4), draw.randrange(side * 3 // 4)
            wide, high = (draw.randrange(side // 16, side // 4) for _ in range(2))
            shape = draw.choice((pencil.rectangle, pencil.ellipse))
            shape((x, y, x + wide, y + high), fill=draw.choice(COLOURS))
        path = folder / "pictures" / f"{number}.png"
        picture.save(path)
        asked = f"How many {draw.choice(COLOURS)} shapes are there? Explain each step."
        found.append({"prompt": asked, "images": [str(path)]})
    return found


def vllm_sees() -> bool:
    """Return whether vLLM is installed with the imports of its vision models."""
    return all(importlib.util.find_spec(name) for name in ("vllm", "torchvision"))


def qwen2_5_vl(folder: Path, *, smoke: bool) -> Path:
    """Return the model's folder with its processor. Built in a separate process, so that the calling process, which
    runs measurements, holds no GPU memory. smoke: a tiny model."""
    if (folder / "config.json").is_file():
        return folder
    maker = multiprocessing.get_context("spawn").Process(target=_save, args=(folder, smoke))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RuntimeError(f"the model in {folder} could not be made")
    return folder


def _save(folder: Path, smoke: bool) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _tokenizer(smoke)
    token = tokenizer.convert_tokens_to_ids
    # transformers sets the embedding of a pad token to 0. SmolLM2's pad token ends every message: the gradient through
    # the norm of a 0 is a thousand times as large as what comes in, and infinite where a prompt begins with it.
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    text = {**(SMALL_TEXT if smoke else TEXT), "vocab_size": len(tokenizer), "tie_word_embeddings": True, **special}
    dtype = torch.float32 if smoke else torch.bfloat16
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=SMALL_TOWER if smoke else TOWER,
        image_token_id=token(IMAGE),
        video_token_id=token(VIDEO),
        vision_start_token_id=token(AROUND[0]),
        vision_end_token_id=token(AROUND[1]),
        tie_word_embeddings=True,
        dtype=str(dtype).removeprefix("torch."),
        **special,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
    model.to(dtype).save_pretrained(folder)
    _processor(tokenizer, config).save_pretrained(folder)


def _tokenizer(smoke: bool) -> Any:
    """Return the tokenizer of SmolLM2 or `tiny`, with image tokens added."""
    from posttrain.models.load import load_tokenizer
    from posttrain.models.model_paths import SMOLLM2
    from posttrain.recipe.sections import Model

    tokenizer = load_tokenizer(Model(path="tiny" if smoke else SMOLLM2, device="cpu"), Path.cwd())
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", IMAGE, VIDEO, *AROUND], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _processor(tokenizer: Any, config: Any) -> Any:
    """Return Qwen2.5-VL's processor, without its video part if torchvision is not installed."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from posttrain.models import vision

    sizes = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 1280}}
    if importlib.util.find_spec("torchvision"):
        return transformers.Qwen2_5_VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=transformers.Qwen2VLVideoProcessor(),
            chat_template=CHAT_TEMPLATE,
        )
    make = vision.processor_class(config)
    return make(image_processor=Qwen2VLImageProcessorPil(**sizes), tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)
