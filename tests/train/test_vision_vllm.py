"""vLLM samples from prompts with images, with the vision tower that the trainer has changed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from transformers import LlavaForConditionalGeneration

from posttrain.models import tiny_vision
from posttrain.models.load import load
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Model
from posttrain.rollout.make_engine import make_engine

from .vision_families import prompts_of, save_seeing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's models that see import it"),
]

PAINTER = """
from PIL import Image


class Painter:
    def reset(self, row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return ["so?", Image.new("RGB", (30, 20), (30 * len(text), 90, 200))], self.turns == 2

    def score(self):
        return 1.0

    def close(self):
        pass
"""


def test_rollouts_use_the_trained_vision_tower(tmp_path: Path, cli: Any) -> None:
    """After each update the engine's log-probs equal the trainer's, except for the probability of the one token that
    is never sampled, about 1/111 of a fresh model's. A stale tower would differ by far more. An environment shows
    another picture before the second turn.
    """
    model, tokenizer = tiny_vision.build()
    config = model.config
    config.text_config.num_attention_heads = config.text_config.num_key_value_heads = 2
    config.text_config.head_dim = 32  # one that vLLM on a CPU supports
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).float().save_pretrained(tmp_path / "seeing")
    tiny_vision.build_processor(tokenizer).save_pretrained(tmp_path / "seeing")
    for n in range(4):
        Pillow.new("RGB", (32, 16 + 8 * n), (60 * n, 200, 30)).save(tmp_path / f"{n}.png")
    rows = [{"prompt": "<image> or <image>?" if n == 3 else "what?", "images": [f"{n}.png"] * (2 if n == 3 else 1)}
            for n in range(4)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "no image"}]))
    (tmp_path / "painter.py").write_text(PAINTER)
    (tmp_path / "reward.py").write_text("def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n")
    recipe = {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {"path": "seeing", "vision": "all"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"engine": "vllm", "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 150},
        "environment": {"use": "./painter.py:Painter"},
        "rewards": [{"use": "./reward.py:varied"}],
        "optim": {"lr": 1e-2},
        "run": {"steps": 3},
    }
    recipe["rollout"] |= {"vllm": {"enforce_eager": True}, "turn_tokens": 8, "stop": list("aeiou0123")}  # type: ignore
    (tmp_path / "rl.yaml").write_text(json.dumps(recipe))
    cli.run("rl", str(tmp_path / "rl.yaml"), "--output", str(tmp_path / "run"))
    found = cli.rows_of(tmp_path / "run")
    gaps = [row["mismatch/mean"] for row in found]
    assert max(row["turns/mean"] for row in found) > 1.2
    assert len(gaps) == 3
    assert all(gap < 2 * -math.log(1 - 1 / 111) for gap in gaps), gaps


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vllm_log_probs_of_families_match_the_trainer(kind: str, tmp_path: Path) -> None:
    """Positions by height and width, windows and deep features of the tower are computed by vLLM's code.

    Its log-probs equal those of transformers over the tokens that may be sampled, before and after all weights have
    changed.
    """
    path = str(save_seeing(kind, tmp_path / kind, wide_heads=True))
    loaded = load(Model(path=path, vision="all"), tmp_path)
    assert loaded.images is not None
    prompts, closed = prompts_of(loaded), sorted(loaded.images.token_ids)
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {"enforce_eager": True}})
    engine = make_engine(section, loaded, scratch=tmp_path / "engine", max_len=128)
    try:
        for version in (0, 1):
            if version:
                draw = torch.Generator().manual_seed(3)
                for weight in loaded.model.parameters():
                    weight.data += 0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=draw)
                engine.sync(loaded.model, version)
            rollouts = engine.generate(prompts, 2, Sampling(max_new_tokens=5, temperature=1.0), seed=3)
            assert engine.version == version and len(rollouts) == 2 * len(prompts)
            for rollout in rollouts:
                row = torch.tensor([*rollout.prompt.ids, *rollout.ids])[None]
                given = loaded.images.plain_inputs(loaded.model, rollout.images, row) if rollout.images else {}
                with torch.no_grad():
                    logits = loaded.model(input_ids=row, **given).logits[0, len(rollout.prompt.ids) - 1 : -1]
                logits[:, closed] = -torch.inf
                expected = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.ids)[:, None])[:, 0]
                assert rollout.logps == pytest.approx(expected.tolist(), abs=2e-3), (version, rollout.prompt.uid)
    finally:
        engine.close()
