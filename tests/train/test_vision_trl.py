"""SFT's loss on rows with images beside TRL's own collator for models that see, on the same rows and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from posttrain.data.prepare import prepare_examples
from posttrain.models.load import load
from posttrain.recipe.sections import Data, Model
from posttrain.train import sft
from posttrain.train.image_batches import image_inputs, with_images

from .vision_families import save_seeing


@pytest.mark.parametrize("kind", ["tiny-vision", "qwen2_5_vl"])
def test_the_loss_is_that_of_trl(kind: str, tmp_path: Path) -> None:
    """Prompts and answers of uneven length; TRL pads prompts on the left and moves them, we pad on the right."""
    rows, theirs = [], []
    for n, color in enumerate(("red", "green", "blue")):
        Pillow.new("RGB", (40, 24 + 8 * n), color).save(tmp_path / f"{color}.png")
        asked = "what" + "?" * n
        rows.append({"prompt": f"<image>{asked}", "completion": color, "image": f"{color}.png"})
        prompt: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        pictures = [Pillow.open(tmp_path / f"{color}.png")]
        theirs.append({"images": pictures, "prompt": prompt, "completion": [{"role": "assistant", "content": color}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    loaded = load(Model(path=path, vision="all"), tmp_path)
    assert loaded.images is not None
    data = Data(source=str(tmp_path / "rows.jsonl"))
    examples = prepare_examples(data, loaded.tokenizer, tmp_path, reader=loaded.images).items
    collate = with_images(sft.make_padding_collator(loaded.pad_id), loaded.images)
    ours = collate(list(sft.dataset(examples)))
    batch = DataCollatorForVisionLanguageModeling(loaded.images.processor, completion_only_loss=True)(theirs)
    given = image_inputs(loaded.model, {key: value for key, value in ours.items() if key != "labels"})
    with torch.no_grad():
        loss = loaded.model(**given, labels=ours["labels"]).loss
        expected = loaded.model(**batch).loss
    assert (ours["labels"] != sft.IGNORED).sum() == (batch["labels"] != sft.IGNORED).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
