"""Log-probs under masked or noisy images: what is changed, and what the loss terms get."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from posttrain.data.tasks.pictures import find_square
from posttrain.errors import UserError
from posttrain.images import Image, add_noise, degrade, open_image, png_url
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run.metrics import read_metrics
from posttrain.train import rl

Values = dict[str, Any]
REWARD = "def varied(completion: str) -> float:\n    return len(set(completion)) / 8\n"
SQUARE = Image(find_square(2, random.Random(0))["images"][0])


def colors(image: Image) -> list[tuple[int, int, int]]:
    picture = open_image(image)
    return [picture.getpixel((x, y)) for x in range(picture.width) for y in range(picture.height)]


def test_masking_blackens_a_share_of_the_squares() -> None:
    """16 squares of 16 pixels in 64 x 64, half of them black; the image itself has no black pixel."""
    assert colors(SQUARE).count((0, 0, 0)) == 0
    masked = degrade(SQUARE, "mask", ratio=0.5, patch=16, seed=1)
    assert open_image(masked).size == open_image(SQUARE).size
    assert colors(masked).count((0, 0, 0)) == 8 * 16 * 16
    assert masked == degrade(SQUARE, "mask", ratio=0.5, patch=16, seed=1)
    assert masked != degrade(SQUARE, "mask", ratio=0.5, patch=16, seed=2)
    assert colors(degrade(SQUARE, "mask", ratio=0.0, patch=16, seed=1)) == colors(SQUARE)
    assert set(colors(degrade(SQUARE, "blank", ratio=0.5, patch=16, seed=1))) == {(127, 127, 127)}
    blurred = colors(degrade(SQUARE, "blur", ratio=0.5, patch=8, seed=1))
    assert len(set(blurred)) > len(set(colors(SQUARE))) and max(map(max, blurred)) <= 255


def recipe(folder: Path, *, pictures: bool = True, **changes: Any) -> Stage:
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(8):
            row = find_square(1, random.Random(number))
            kept = row if pictures else {key: value for key, value in row.items() if key != "images"}
            file.write(json.dumps(kept) + "\n")
    (folder / "reward.py").write_text(REWARD)
    values: Values = {
        "stage": "rl",
        "algorithm": "papo",
        "model": {"path": "tiny-vision", "vision": "all"},
        "data": {"source": "rows.jsonl"},
        "rewards": [{"use": "./reward.py:varied"}],
        "scoring": {"workers": 1},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6},
        "optim": {"lr": 1e-3},
        "run": {"steps": 2},
    }
    return load_dict({**values, **changes}, base_dir=folder, where="test").recipe


def test_masked_pass_changes_the_loss(tmp_path: Path, rows_of: Any) -> None:
    """In the first update the policy is the one of the pass: without masking the divergence is 0."""
    term = {"use": "masked_kl", "coef": 1.0, "how": "mask", "patch": 8}
    none = rows_of(rl.run, recipe(tmp_path, regularisers=[{**term, "ratio": 0.0}]), "none")
    most = rows_of(rl.run, recipe(tmp_path, regularisers=[{**term, "ratio": 0.9}]), "most")
    (name,) = [key for key in most[0] if key.endswith("masked_kl") or key.endswith("masked_kl/mean")]
    assert abs(none[0][name]) < 1e-6 < most[0][name]
    assert most[0]["grad_norm"] != pytest.approx(none[0]["grad_norm"], rel=1e-3)


def test_rows_without_images_are_reported(tmp_path: Path, rows_of: Any) -> None:
    with pytest.raises(UserError, match="no row has an image") as error:
        rows_of(rl.run, recipe(tmp_path, pictures=False), "texts")
    assert "images" in str(error.value)


def test_steps_and_ranks_without_images_mask_nothing(tmp_path: Path, rows_of: Any, answer: Any) -> None:
    """Every second row has an image. Of three ranks one has only the row without an image; then steps of one prompt
    each. If nothing is masked the policy equals the masked policy."""
    changes: Values = {"data": {"source": "mixed.jsonl", "shuffle": False}, "run": {"steps": 2}}
    changes["rollout"] = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6}
    several = recipe(tmp_path, **changes)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for row in rows[1::2]:
        row["prompt"] = row["prompt"].replace("<image>", "")
        del row["images"]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = rows_of(rl.run, several, "one")
    given = json.loads(several.model_dump_json(by_alias=True, exclude_unset=True))
    job = {"recipe": given, "base_dirs": [str(tmp_path)], "output": str(tmp_path / "three"), "resume": False}
    assert answer("ranked", **job, ranks=3, lost_sync=None, engine=None) == [0, 0, 0]
    for key in ("loss", "grad_norm"):
        found = [row[key] for row in read_metrics(tmp_path / "three")]
        assert found == pytest.approx([row[key] for row in expected], rel=1e-4, abs=1e-6)
    changes["rollout"] |= {"prompts_per_step": 1}
    steps = rows_of(rl.run, recipe(tmp_path, **changes), "single")
    (name,) = [key for key in steps[0] if key.endswith("masked_kl") or key.endswith("masked_kl/mean")]
    assert abs(steps[1][name]) < 1e-6 < steps[0][name]


def test_run_resumes_exactly(tmp_path: Path, rows_of: Any) -> None:
    whole = rows_of(rl.run, recipe(tmp_path), "whole")
    rows_of(rl.run, recipe(tmp_path, run={"steps": 1}), "parts")
    assert rows_of(rl.run, recipe(tmp_path), "parts", resume=True) == whole


def test_noise_follows_the_diffusion_schedule() -> None:
    """Without noise the image is unchanged; with full noise no pixel is informative; in between the mean moves to
    grey."""
    assert colors(add_noise(SQUARE, noise=0.0, seed=1)) == colors(SQUARE)
    white = Image(png_url(Pillow.new("RGB", (64, 64), (255, 255, 255))))
    noisy = [value for color in colors(add_noise(white, noise=0.19, seed=1)) for value in color]
    assert (
        add_noise(white, noise=0.19, seed=1)
        == add_noise(white, noise=0.19, seed=1)
        != add_noise(white, noise=0.19, seed=2)
    )
    below = [value for value in noisy if value < 255]  # 0.9 of white is 242, and the noise has 56 around it
    assert sorted(noisy)[len(noisy) // 2] == pytest.approx(242, abs=3) and len(below) > len(noisy) / 2


def test_noise_and_masks_are_separate_passes(tmp_path: Path, rows_of: Any) -> None:
    """In the first update the policy is the one of the passes: the divergence without noise is 0."""
    mask = {"use": "masked_kl", "coef": 1.0, "how": "mask", "patch": 8, "ratio": 0.9}
    terms = {n: [mask, {"use": "perturbed_kl", "coef": 1.0, "noise": n}] for n in (0.0, 0.5)}
    none, much = (rows_of(rl.run, recipe(tmp_path, algorithm="dvrp", regularisers=t, run={"steps": 1}), str(n))[0]
                  for n, t in terms.items())  # fmt: skip
    (name,) = [key for key in much if key.endswith("perturbed_kl") or key.endswith("perturbed_kl/mean")]
    assert abs(none[name]) < 1e-6 < much[name]
    assert much["grad_norm"] != pytest.approx(none["grad_norm"], rel=1e-3)
