"""`tiny-vision`: built in code, saved as an ordinary transformers folder, and trained in parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from posttrain.errors import ModelError
from posttrain.images import Image, open_image
from posttrain.models import tower
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel, build_skeleton, load
from posttrain.models.save import save
from posttrain.models.tower import takes_features
from posttrain.models.vision import find_part
from posttrain.recipe.sections import Model

Loaded = Callable[..., LoadedModel]


def test_equal_seeds_give_equal_weights(loaded: Loaded) -> None:
    first, again, other = (loaded("tiny-vision", seed=seed).model for seed in (3, 3, 4))
    names = [name for name, _ in first.named_parameters()]
    assert all(torch.equal(first.get_parameter(name), again.get_parameter(name)) for name in names)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert sum(p.numel() for p in first.parameters()) == 205_952


def test_images_change_the_logits(loaded: Loaded) -> None:
    """Two pictures with the same tokens; equal pictures give equal logits."""
    found = loaded("tiny-vision", training=False)
    assert found.images is not None
    ids = torch.tensor([found.tokenizer(found.images.read(probe_image()).text + "a")["input_ids"]])

    def logits(image: Image) -> torch.Tensor:
        seen = found.images.inputs(found.model.model, [[image]], ids)  # type: ignore[union-attr]
        return found.model(input_ids=ids, **seen).logits  # type: ignore[no-any-return]

    from posttrain.images import png_url

    turned = Image(png_url(open_image(probe_image()).rotate(180)))
    with torch.no_grad():
        assert torch.equal(logits(probe_image()), logits(probe_image()))
        assert not torch.allclose(logits(probe_image()), logits(turned), atol=1e-4)


def test_image_shared_by_rows_is_encoded_once(loaded: Loaded) -> None:
    """Its gradient is the sum over the rows, and the logits equal those of the plain forward pass."""
    found = loaded("tiny-vision", vision="all")
    reader, model = found.images, found.model
    assert reader is not None
    other = Image(probe_image().source, max_pixels=300)
    text = reader.read(probe_image()).text
    ids = torch.tensor([found.tokenizer(f"{text}{word}")["input_ids"] for word in ("a", "b", "c")])
    rows = [[probe_image()], [other], [probe_image()]]
    seen = reader.inputs(model.model, rows, ids)
    features = seen["mm_encoder_outputs"]["image"] if takes_features(model.model) else seen["pixel_values"].found
    assert len(features.pooler_output) == 3
    shared = model(input_ids=ids, **seen).logits
    plain = torch.cat(
        [model(input_ids=ids[[n]], **reader.plain_inputs(model, row, ids[[n]])).logits for n, row in enumerate(rows)]
    )
    assert torch.allclose(shared, plain, atol=1e-5)
    weight = model.model.vision_tower.embeddings.patch_embedding.weight
    of_shared, of_plain = (torch.autograd.grad(x.logsumexp(-1).sum(), weight)[0] for x in (shared, plain))
    assert torch.allclose(of_shared, of_plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("vision", "trained"), [(None, 1), ("frozen", 1), ("projector", 2), ("all", 3)])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_recipe_selects_the_trained_parts(
    loaded: Loaded, vision: str | None, trained: int, lora: dict[str, int] | None
) -> None:
    """Language, projector, tower; with LoRA the adapters are put on these parts."""
    model = loaded("tiny-vision", vision=vision, lora=lora).model
    found = {find_part(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found == set(("language", "projector", "vision")[:trained])


def test_text_model_has_no_vision_parts(loaded: Loaded) -> None:
    with pytest.raises(ModelError, match="does not read images"):
        loaded("tiny", vision="all")


def test_names_of_family_parts_are_recognized() -> None:
    names = {
        "model.visual.blocks.0.attn.qkv.weight": "vision",
        "model.visual.merger.mlp.0.weight": "projector",
        "model.visual.deepstack_merger_list.0.norm.weight": "projector",
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": "vision",
        "model.multi_modal_projector.linear_1.weight": "projector",
        "model.vision_model.embeddings.patch_embedding.weight": "vision",
        "model.connector.modality_projection.proj.weight": "projector",
        "model.language_model.layers.0.mlp.up_proj.weight": "language",
        "model.text_model.layers.0.mlp.up_proj.weight": "language",
        "lm_head.weight": "language",
    }
    assert {name: find_part(name) for name in names} == names


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_saved_vision_model_loads_in_plain_transformers(
    loaded: Loaded, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """Plain transformers gives the same logits for a picture, and posttrain loads the folder again."""
    found = loaded("tiny-vision", vision="all", lora=lora)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter, memory_format=torch.contiguous_format), alpha=1.0)
                assert name
    report = save(found, tmp_path / "final")
    assert report["logit_gap"] < 1e-4
    picture = open_image(probe_image())
    processor = AutoProcessor.from_pretrained(tmp_path / "final")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "final").eval()
    given = processor(text=["<image>how many?"], images=[picture], return_tensors="pt")
    again = load(Model(path=str(tmp_path / "final")), tmp_path)
    assert again.images is not None
    ids = given["input_ids"]
    with torch.no_grad():
        theirs = model(**given).logits
        ours = again.model(input_ids=ids, **again.images.inputs(again.model.model, [[probe_image()]], ids)).logits
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_shape_is_known_without_weights(tmp_path: Path) -> None:
    found = build_skeleton(Model(path="tiny-vision", vision="all"), tmp_path, training=True)
    assert found is not None
    assert {p.device.type for p in found.model.parameters()} == {"meta"}


def test_patch_convolution_is_a_matrix_product() -> None:
    """Also in a copy, which has separate weights; inputs larger than a patch are still convolved."""
    model = nn.Sequential(nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False))
    plain = copy.deepcopy(model)
    tower.project_patches(model)
    patches = torch.randn(5, 3, 2, 4, 4)
    found, expected = model(patches), plain(patches)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)
    for one in (found, expected):
        one.square().sum().backward()
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, atol=1e-4)
    other = copy.deepcopy(model)
    nn.init.zeros_(other[0].weight)
    assert other(patches).abs().max() == 0 < model(patches).abs().max()
    assert torch.allclose(model(large := torch.randn(1, 3, 4, 8, 8)), plain(large), atol=1e-6)
