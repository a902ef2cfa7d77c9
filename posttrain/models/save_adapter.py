"""Saving of a trained adapter as a folder that PEFT loads. Its config names a base only if that name gives the same
weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from posttrain.models import adapters
from posttrain.models.load import LoadedModel


def base_is_stored(loaded: LoadedModel) -> bool:
    """Return whether plain transformers finds the adapter's base, unchanged, in a directory or on the hub."""
    origin = loaded.origin
    return origin is not None and origin.base.kind in ("directory", "hub") and not origin.base_changed


def base_name(loaded: LoadedModel) -> str | None:
    """Return the path or hub id of the adapter's base.

    None for `tiny`, which depends on a seed, and for a base with an older adapter merged in, which is not stored.
    """
    origin = loaded.origin
    if origin is None or origin.base_changed or origin.base.kind == "tiny":
        return None
    return str(origin.base.path or origin.base.name)


def merged_note(loaded: LoadedModel) -> str | None:
    """Return one line on what happened to the adapter that training starts from; None if it starts from no adapter."""
    origin = loaded.origin
    if loaded.is_lora and adapters.REFERENCE in loaded.model.peft_config:
        return f"{loaded.source} is an adapter: it is trained further, and its initial weights are the reference"
    if origin is None or not origin.base_changed:
        return None
    base = origin.base.name
    after = "a new adapter is trained on the result" if loaded.is_lora else "all weights of the result are trained"
    instead = "; `model.lora.continue: true` trains the adapter itself" if loaded.is_lora else ""
    return f"{loaded.source} is an adapter: it was merged into its base {base}, and {after}{instead}"


def adapter_state(loaded: LoadedModel, adapter: str) -> dict[str, Tensor]:
    """Return a trained adapter's tensors by the names under which PEFT saves them. They are the model's own, not
    copies.
    """
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(
        loaded.model, adapter_name=adapter, save_embedding_layers=is_resized(loaded)
    )
    return found


def adapter_folders(loaded: LoadedModel, folder: Path) -> dict[str, Path]:
    """Return where each trained adapter is stored: `folder`, or for several adapters a subfolder of each name."""
    names = loaded.adapters
    return {name: folder if len(names) == 1 else folder / name for name in names}


def is_resized(loaded: LoadedModel) -> bool:
    """Return whether embeddings are stored with the adapter, because the base's have fewer tokens."""
    return loaded.origin is not None and loaded.origin.resized


def write_adapter(loaded: LoadedModel, folder: Path, adapter: str) -> None:
    """Write one trained adapter, its configuration, and a README that names its base."""
    origin = loaded.origin
    loaded.model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=is_resized(loaded))
    if adapter != adapters.SINGLE:  # PEFT writes such an adapter into a subfolder of its name
        for file in (folder / adapter).iterdir():
            file.rename(folder / file.name)
        (folder / adapter).rmdir()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base = base_name(loaded)
    if origin is not None and origin.base.kind == "hub" and base is not None:
        config["revision"] = origin.section.revision
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").write_text(_readme(loaded, base), encoding="utf-8")


def _readme(loaded: LoadedModel, base: str | None) -> str:
    """Return the adapter's model card.

    PEFT's own card would name the model that the base was loaded from, even if an older adapter was merged into it.
    """
    head = ["library_name: peft", *([f"base_model: {json.dumps(base)}"] if base else [])]
    if base is not None:
        text = f"An adapter on `{base}`."
    elif loaded.origin is not None and loaded.origin.base_changed:
        text = (
            f"An adapter on `{loaded.source}`, which is an adapter itself and was merged into its base before this one"
            " was trained. The merged base is not stored; the run's `final/` is that base with this adapter merged in."
        )
    else:
        text = f"An adapter on `{loaded.source}`, which is made from a seed; the run's `final/` is both as one model."
    return "\n".join(["---", *head, "---", "", text, ""])
