"""Reward models: a language model with one or several scalar heads on the last token of an answer.

They are transformers' sequence classifiers, so `AutoModelForSequenceClassification.from_pretrained(folder)` gives the
same scores. `reward_model.json` beside the weights describes the heads, how rows were rendered, and the mean and
deviation of each head on held-out answers. For vision models transformers has no such class except Gemma 3's;
`classifier_of` creates an equivalent one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ModelError, RunError, count_noun
from posttrain.images import Image
from posttrain.models import adapters, merge_adapter, model_paths, pretrained, vision
from posttrain.models import load as models
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel, Origin
from posttrain.models.rounding_bounds import TOLERANCE
from posttrain.models.save import cast_state, sync_all
from posttrain.models.weight_names import save_under_published_names
from posttrain.recipe.sections import Model
from posttrain.run.atomic_io import explain_write_errors, put_in_place

CARD = "reward_model.json"
PROBE = ("What is 17 + 25? Say why.", "42, for 17 + 25 = 42.")


@dataclass(frozen=True)
class Card:
    """Description of a reward model's scores.

    data: the keys of the recipe's `data` that rendered the rows (`chat`, `system`, `prompt_template`). center, scale:
    mean and deviation of each head over held-out answers. gaussian: the second half of the outputs are log-deviations
    of the first half.
    """

    use: str = "bradley_terry"
    heads: tuple[str, ...] = ("reward",)
    data: Mapping[str, Any] = field(default_factory=dict)
    center: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    users: Mapping[str, int] = field(default_factory=dict)  # mixture objective: user in training -> head

    @property
    def gaussian(self) -> bool:
        return self.use == "gaussian"


def read_card(folder: Path | None, outputs: int) -> Card:
    """Return the card of a reward model's folder; without a card file, a card of `outputs` unnamed heads."""
    path = folder / CARD if folder else None
    if path is None or not path.is_file():
        return Card(heads=tuple(f"head_{n}" for n in range(outputs)) if outputs > 1 else ("reward",))
    values = json.loads(path.read_text(encoding="utf-8"))
    known: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in Card.__dataclass_fields__
    }
    return Card(**known)


def is_reward_model(section: Model, base_dir: Path) -> bool:
    """Return whether a model is a sequence classifier rather than a causal language model."""
    place = model_paths.locate(section.path, base_dir)
    if place.kind not in ("directory", "hub"):
        return False
    named = getattr(models.config_of(section, base_dir), "architectures", None) or []
    return any(name.endswith(model_paths.CLASSIFIER) for name in named)


def load(
    section: Model, base_dir: Path, *, outputs: int | None = None, seed: int = 0, training: bool = False
) -> LoadedModel:
    """Load a reward model for training or scoring. outputs: number of heads; None = as many as the model has.

    A causal language model gets a fresh head (initialized from `seed`) in place of its output head; a reward model
    keeps its own. Raises ModelError if the model is not a reward model and `outputs` is None, or if it has another
    number of heads.
    """
    place = model_paths.locate(section.path, base_dir)
    if is_reward_model(section, base_dir):
        loaded = _load_classifier(section, base_dir)
    elif outputs is None:
        raise ModelError(f"{section.path} is not a reward model", hint="`posttrain reward-model` trains one")
    else:
        loaded = _build_from_causal(section, base_dir, outputs, seed)
    found = loaded.model.config.num_labels
    if outputs is not None and found != outputs:
        raise ModelError(f"{section.path} has {count_noun(found, 'head')}, the recipe needs {outputs}")
    model = loaded.model
    if training and section.lora:
        without = vision.modules_without_adapters(model, section)
        model = adapters.add(model, section.lora, seed=seed, task="SEQ_CLS", without=without)
    half = models.set_mode(model, section, training=training)
    origin = Origin(section, base_dir, place)
    return dataclasses.replace(loaded, model=model, origin=origin, half=half)


def classifier_of(config: Any) -> Any:
    """Return the sequence classifier class for a configuration, or None if there is none.

    That is transformers' own class, or for a vision model a class with the same heads on its backbone.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SEEING
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in KNOWN:
        return KNOWN[type(config)]
    if type(config) not in SEEING:
        return None
    writer: Any = SEEING[type(config)]
    common = next(c for c in writer.__mro__ if c.__name__.endswith("PreTrainedModel") and c is not PreTrainedModel)
    name = writer.__name__.removesuffix("ForConditionalGeneration") + model_paths.CLASSIFIER
    return type(name, (GenericForSequenceClassification, common), {"__module__": __name__})


def _load_classifier(section: Model, base_dir: Path) -> LoadedModel:
    """Load a model that already is a sequence classifier."""
    from transformers import AutoModelForSequenceClassification

    place = model_paths.locate(section.path, base_dir)
    tokenizer = models.load_tokenizer(section, base_dir)
    options = {"dtype": pretrained.dtype_of(section), **pretrained.attention_of(section)}
    with pretrained.suppress_progress_bars():
        # the auto class also loads models that come with their own code
        kind = classifier_of(models.config_of(section, base_dir)) or AutoModelForSequenceClassification
        model = pretrained.from_pretrained(kind, section, place, base_dir, **options)
    text = model.config.get_text_config()
    pad = text.pad_token_id
    pad = tokenizer.pad_token_id if pad is None else pad
    model.config.pad_token_id = text.pad_token_id = pad
    eos = (tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ()
    reader = models.load_image_reader(section, base_dir, tokenizer)
    model = model.to(pretrained.device_of(section)).eval()
    return LoadedModel(model, tokenizer, eos, int(pad), section.path, images=reader)


def _build_from_causal(section: Model, base_dir: Path, outputs: int, seed: int) -> LoadedModel:
    """Build a classifier from the backbone of a causal language model and a fresh head."""
    causal = models.load(section.model_copy(update={"lora": None}), base_dir, seed=seed)
    config = copy.deepcopy(causal.model.config)
    config.num_labels, config.pad_token_id = outputs, causal.pad_id
    config.get_text_config().pad_token_id = causal.pad_id  # a classifier finds a row's last token by the pad id
    if (kind := classifier_of(config)) is None:
        raise ModelError(f"transformers has no sequence classifier for {type(causal.model).__name__}: {section.path}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(config, dtype=causal.model.dtype)
    model.base_model.load_state_dict(causal.model.base_model.state_dict())
    if section.attention != "auto":
        model.set_attn_implementation(causal.model.config._attn_implementation)  # `tiny` ignores the key
    model = model.to(causal.device).eval()
    return LoadedModel(model, causal.tokenizer, causal.eos_ids, causal.pad_id, section.path, images=causal.images)


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` [N,L], padded on the right."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
        mask[n, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def compute_outputs(model: Any, inputs: Mapping[str, Tensor], seen: Mapping[str, Any] | None = None) -> Tensor:
    """Return the head outputs at the last token of each row, float32 [N, outputs].

    seen: the result of `ImageReader.inputs` for the images of the rows.
    """
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model(**given, use_cache=False, **(seen or {})).logits.float()


@torch.no_grad()
def score_rows(
    loaded: LoadedModel,
    rows: Sequence[Sequence[int]],
    images: Sequence[Sequence[Image]] | None = None,
    *,
    batch_tokens: int = 16384,
) -> Tensor:
    """Return `compute_outputs` of all rows on the CPU, in forward passes of at most `batch_tokens` tokens with padding.

    images: the images in each row.
    """
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
    training = loaded.model.training
    loaded.model.eval()
    outputs: list[Tensor] = []
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // max(len(rows[order[start]]), 1))
        part = order[start : start + count]
        batch = {k: v.to(loaded.device) for k, v in pad_rows([rows[n] for n in part], loaded.pad_id).items()}
        shown = [images[n] for n in part] if images is not None else []
        with loaded.autocast():
            seen = _image_inputs(loaded, shown, batch["input_ids"]) if any(shown) else None
            outputs.append(compute_outputs(loaded.model, batch, seen).cpu())
        start += count
    loaded.model.train(training)
    out = torch.cat(outputs)
    return torch.empty_like(out).index_copy_(0, torch.tensor(order), out)


def _image_inputs(loaded: LoadedModel, shown: Sequence[Sequence[Image]], ids: Tensor) -> dict[str, Any]:
    """Return the image arguments of a pass over rows ids [N,L] that contain these images."""
    assert loaded.images is not None, "a model that reads no images was given some"
    return loaded.images.inputs(adapters.backbone(adapters.causal_of(loaded.model)), shown, ids)


def save(loaded: LoadedModel, folder: Path, card: Card) -> dict[str, Any]:
    """Write a reward model, with its adapter merged in, its tokenizer and card; reload it and compare scores.

    Replaces `folder` in one step. Raises RunError if the saved model differs from the one in memory.
    """
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    with explain_write_errors(partial), pretrained.suppress_progress_bars():
        partial.mkdir(parents=True)
        model = merge_adapter.merged_copy(loaded.model) if loaded.is_lora else loaded.model
        dtype = loaded.half or model.dtype
        save_under_published_names(model).save_pretrained(partial, state_dict=cast_state(model, dtype))
        path = partial / "config.json"
        names = {"id2label": dict(enumerate(card.heads)), "label2id": {name: n for n, name in enumerate(card.heads)}}
        config = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        config |= names if len(card.heads) == model.config.num_labels else {}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        loaded.tokenizer.save_pretrained(partial)
        if loaded.images is not None:
            loaded.images.processor.save_pretrained(partial)
        (partial / CARD).write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")
        report = {"path": str(folder), "kind": "reward model", "bytes": sync_all(partial)}
        report["max_score_gap"] = _compare_scores(loaded, partial)
    put_in_place(partial, folder)
    return report


def _compare_scores(loaded: LoadedModel, folder: Path) -> float:
    """Return the largest difference between probe scores of the saved model and of the one in memory, over the largest
    score.

    A vision model is also given an image. Raises RunError if the gap exceeds rounding.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["".join(PROBE), PROBE[1]]
    images: list[tuple[Image, ...]] = [(), ()]
    if loaded.images is not None:
        texts.append(loaded.images.read(probe_image()).text + PROBE[1])
        images.append((probe_image(),))
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = [row if shown else row[: loaded.window] for row, shown in zip(rows, images, strict=True)]
    kind = classifier_of(AutoConfig.from_pretrained(folder))
    saved = kind.from_pretrained(folder, dtype="auto").to(loaded.device).eval()
    reader = models.load_image_reader(Model(path=str(folder)), folder, tokenizer) if loaded.images else None
    again = LoadedModel(saved, tokenizer, loaded.eos_ids, loaded.pad_id, str(folder), images=reader)
    expected, found = score_rows(loaded, rows, images), score_rows(again, rows, images)
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
    if not gap <= 4 * TOLERANCE.get(saved.dtype, 5e-2):
        raise RunError(f"the saved reward model gives other scores than the one in memory (gap {gap:.2g})")
    return gap
