"""Loading of the model and tokenizer that a recipe's `model` section describes, for training and generation."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from posttrain import chat
from posttrain.errors import MissingExtra, ModelError
from posttrain.models import adapters, quantize, tiny, tiny_vision, tower, vision
from posttrain.models.checkpointing import checkpoint_layers
from posttrain.models.images import PROCESSOR_FILES, ImageReader
from posttrain.models.merge_adapter import load_merged
from posttrain.models.model_paths import CLASSIFIER, Place, locate
from posttrain.models.precision import keep_half_weights, keep_master_weights
from posttrain.models.pretrained import (
    attention_of,
    device_of,
    dtype_of,
    explain_failure,
    from_pretrained,
    hub_options,
    parse_gguf_once,
    suppress_progress_bars,
)
from posttrain.models.templates import read_special_tokens, set_variables
from posttrain.path_resolution import find
from posttrain.recipe.sections import Model
from posttrain.scratch import scratch
from posttrain.thoughts import declare_format


@dataclass(frozen=True)
class Origin:
    """Where a model was loaded from, which saving needs to know."""

    section: Model
    base_dir: Path
    base: Place  # the dense base, never an adapter directory
    base_changed: bool = False  # an older adapter was merged into the base, so the base differs from the one on disk
    resized: bool = False  # the older adapter has another vocabulary size than its base


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer. `eos_ids` is the set of end tokens used by generation, masks and metrics."""

    model: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    source: str
    origin: Origin | None = None
    half: torch.dtype | None = None  # autocast type over float32 trained weights; None: nothing to cast
    skeleton: Any = None  # of a sharded model: the same model without storage
    images: ImageReader | None = None  # of a vision model

    @cached_property
    def autocast(self) -> Callable[..., contextlib.AbstractContextManager[None]]:
        """Opens the autocast context of a forward pass in training.

        With cache_enabled=False a pass holds the half-precision weights of one layer at a time; otherwise each cast
        weight is cached until the context ends, for reuse. The default is False with checkpointing: a recomputed layer
        casts its weights again, so copies cached in the forward pass would only take memory.
        """
        if self.half is None:
            return lambda **_: contextlib.nullcontext()
        keep = not getattr(self.model, "is_gradient_checkpointing", False)
        return functools.partial(torch.autocast, self.device.type, dtype=self.half, cache_enabled=keep)

    @cached_property
    def device(self) -> torch.device:
        """Device of the model, cached at first access (a LoadedModel is never moved afterwards)."""
        return next(self.model.parameters()).device

    def fork_rng(self) -> contextlib.AbstractContextManager[None]:
        """Restore the random state of the host and of the model's GPU at the end of the block.

        By default, torch saves the state of all visible GPUs, which creates a CUDA context on each.
        """
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of every weight."""
        return self.skeleton is not None

    @property
    def is_lora(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the trained adapters, in the recipe's order; () without LoRA."""
        return adapters.names_of(self.model)

    @property
    def window(self) -> int | None:
        """Context window in tokens; None if the configuration does not say."""
        return max_positions(self.model.config)


def max_positions(config: Any) -> int | None:
    """Return the number of positions of a transformers configuration, in tokens; None if it does not say."""
    text = config.get_text_config()
    named = (getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((count for count in named if count and count > 0), None)


def load(
    section: Model, base_dir: Path, *, seed: int = 0, training: bool = False, on_host: bool = False
) -> LoadedModel:
    """Load the model and tokenizer of a recipe. Raises ModelError, MissingExtra.

    seed: initializes `tiny` and a fresh adapter. training: add the recipe's adapter. on_host: leave the model in host
    memory, in the precision of the recipe's device.

    An adapter directory is loaded as its base plus the adapter. To train LoRA on top of an adapter, the old adapter is
    merged into the base and a fresh one is added, so that the frozen base is the starting policy. With 4-bit weights or
    `lora.continue` nothing is merged: the old adapter is trained further, and a frozen copy is kept as `reference`.
    """
    if device_of(section).type == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device: cuda, but torch sees no GPU", hint="`posttrain doctor` shows what torch sees")
    place = _check_section(section, locate(section.path, base_dir), base_dir)
    base = _locate_dense_base(place, base_dir)
    with suppress_progress_bars(), _explain_out_of_memory(section), parse_gguf_once(base):
        tokenizer = _tokenizer(section, place, base_dir)
        model = _base_model(section, base, base_dir, seed, on_host=on_host)
        rows = model.get_input_embeddings().weight.shape[0]
        model, changed = _with_adapters(model, section, place, seed=seed, training=training)
        resized = model.get_input_embeddings().weight.shape[0] != rows
    _check_vocabulary(model, tokenizer, section.path)
    eos = chat.eos_ids(tokenizer, model.generation_config, model.config)
    pad = _set_special_tokens(tokenizer, model, eos, section.path)
    half = set_mode(model, section, training=training)
    origin = Origin(section, base_dir, base, changed, resized)
    reader = _image_reader(section, base, base_dir, tokenizer, model.config)
    return LoadedModel(model, tokenizer, eos, pad, section.path, origin, half, images=reader)


def build_skeleton(
    section: Model, base_dir: Path, *, training: bool = False, buffers: bool = False
) -> LoadedModel | None:
    """Return what `load` gives, without weights: parameters on torch's meta device, and buffers too unless requested.

    None if weights or custom code decide what the model is: an adapter directory, GGUF, `trust_remote_code`. Raises
    ModelError, MissingExtra.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    place = _check_section(section, locate(section.path, base_dir), base_dir)
    if place.kind in ("adapter", "gguf") or section.trust_remote_code:
        return None
    tokenizer = _tokenizer(section, place, base_dir)
    with suppress_progress_bars(), torch.random.fork_rng(devices=[]):
        if place.kind == "tiny":
            model = _tiny_builder(place).build()[0].to("meta", dtype_of(section))
        else:
            config = from_pretrained(AutoConfig, section, place, base_dir)
            _refuse_classifier(config, section.path)
            try:
                with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
                    kind = vision.auto_class(config, section)
                    attention = attention_of(section) if buffers else {}  # without buffers nothing runs on this machine
                    model = kind.from_config(config, dtype=dtype_of(section), **attention)
                model.tie_weights()  # accelerate creates a separate parameter for each use of a tied weight
            except Exception as cause:
                raise explain_failure(section, place, base_dir, cause) from cause
        if training and section.lora:
            model = adapters.add(model, section.lora, without=vision.modules_without_adapters(model, section))
    eos = load_eos_ids(section, base_dir, tokenizer)
    pad = _set_special_tokens(tokenizer, model, eos, section.path)
    half = set_mode(model, section, training=training)
    reader = _image_reader(section, place, base_dir, tokenizer, model.config)
    return LoadedModel(model, tokenizer, eos, pad, section.path, half=half, images=reader)


def set_mode(model: Any, section: Model, *, training: bool) -> torch.dtype | None:
    """Set training or evaluation mode, with checkpointing as the recipe asks and trained weights in float32.

    Returns the half precision to compute in, see `LoadedModel.half`.
    """
    model.train(training)
    tower.project_patches(model)
    if training:
        vision.freeze_parts(model, section)
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # otherwise every pass computes a router loss, which sft requests itself
    if not training:
        return None
    if section.gradient_checkpointing:
        checkpoint_layers(model, section)
        if section.lora:
            model.enable_input_require_grads()  # checkpoints need an input with gradient, and embeddings are frozen
    with _explain_out_of_memory(section):
        if not section.half_weights:
            return keep_master_weights(model)
        keep_half_weights(model)
        return None


@contextlib.contextmanager
def _explain_out_of_memory(section: Model) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU into a ModelError."""
    try:
        yield
    except torch.OutOfMemoryError as cause:
        raise ModelError(
            f"{section.path} does not fit into the GPU's free memory",
            hint="check what else runs on the GPU (nvidia-smi), and the memory that `posttrain plan` predicts",
        ) from cause


def load_companion(
    section: Model,
    path: str,
    base_dir: Path,
    tokenizer: Any,
    *,
    key: str,
    seed: int,
    reader: ImageReader | None = None,
) -> LoadedModel:
    """Load another model beside the trained one (`section`), for log-probs of the same tokens.

    It is loaded with the settings of `section` except revision and adapter. key: the recipe key that names `path`.
    reader: the trained model's image reader, if it has one. Raises ModelError if the vocabularies differ, or if the
    model reads images differently than `reader`.
    """
    found = load(section.model_copy(update={"path": path, "revision": None, "lora": None}), base_dir, seed=seed)
    if found.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"{path} has another vocabulary than {section.path}",
            where=key,
            hint="log-probs of tokens can only be compared between models with the same tokenizer",
        )
    if reader is not None and (found.images is None or not found.images.reads_like(reader)):
        raise ModelError(
            f"{path} processes images differently than {section.path}, or not at all",
            where=key,
            hint="log-probs of rows with images can only be compared between models with the same image processor",
        )
    return found


def load_tokenizer(section: Model, base_dir: Path) -> Any:
    """Load the tokenizer alone, with the recipe's chat template, and the EOS and pad tokens that `load` gives it."""
    place = _check_section(section, locate(section.path, base_dir), base_dir)
    with parse_gguf_once(place):
        tokenizer = _tokenizer(section, place, base_dir)
        if tokenizer.eos_token_id is None and (eos := load_eos_ids(section, base_dir, tokenizer)):
            tokenizer.eos_token_id = eos[0]
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def read_gguf_once(section: Model, base_dir: Path) -> AbstractContextManager[None]:
    """Let `load_tokenizer`, `load_eos_ids` and `config_of` in this context share one parse of the model's GGUF file.

    The parse takes a second and a half for 150,000 tokens and merges. Raises ModelError, MissingExtra.
    """
    place = _check_section(section, locate(section.path, base_dir), base_dir)
    return parse_gguf_once(_locate_dense_base(place, base_dir))


def load_eos_ids(section: Model, base_dir: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the set of end tokens, from the configuration files alone (no weights)."""
    from transformers import AutoConfig, GenerationConfig

    base = _locate_dense_base(locate(section.path, base_dir), base_dir)
    if base.kind == "tiny":
        return chat.eos_ids(tokenizer)
    config = from_pretrained(AutoConfig, section, base, base_dir)
    try:
        generation = GenerationConfig.from_pretrained(base.target, **hub_options(section, base))
    except OSError:  # a model without generation_config.json
        generation = None
    return chat.eos_ids(tokenizer, generation, config)


def config_of(section: Model, base_dir: Path) -> Any:
    """Return the configuration of the dense base, without its weights. Raises ModelError."""
    from transformers import AutoConfig

    base = _locate_dense_base(_check_section(section, locate(section.path, base_dir), base_dir), base_dir)
    if base.kind == "tiny":
        builder = _tiny_builder(base)
        return builder.build_config(builder.build_tokenizer())
    return from_pretrained(AutoConfig, section, base, base_dir)


def _check_section(section: Model, place: Place, base_dir: Path) -> Place:
    """Refuse keys that do not apply to this kind of model, and missing packages, before anything is loaded."""
    if section.revision and _locate_dense_base(place, base_dir).kind != "hub":
        raise ModelError(f"model.revision is for hub ids; {section.path} is a local model")
    if section.lora or place.kind == "adapter":
        adapters.require_peft()
    if place.kind == "adapter" and place.path is not None and not section.quantize:
        adapters.check_mergeable(place.path)
    if section.lora:
        adapters.check_continue(place.path, section.lora, section.path)
    if section.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "model.quantize: nf4", "quant")
    if place.kind == "gguf" and importlib.util.find_spec("gguf") is None:
        raise MissingExtra("gguf", "a .gguf model", "train")
    return place


def _locate_dense_base(place: Place, base_dir: Path) -> Place:
    """Return the dense model of a place: itself, or the base that an adapter names."""
    if place.kind != "adapter" or place.path is None:
        return place
    base = locate(adapters.base_of(place.path), base_dir)
    if base.kind == "adapter":
        raise ModelError(
            f"{place.path} is an adapter on another adapter, {base.path}", hint="merge the older one first"
        )
    return base


def _tokenizer(section: Model, place: Place, base_dir: Path) -> Any:
    """Load the tokenizer with the recipe's chat template, padding on the left."""
    from transformers import AutoTokenizer

    own = place.kind != "adapter" or (place.path is not None and (place.path / "tokenizer_config.json").is_file())
    home = place if own else _locate_dense_base(place, base_dir)
    tokenizer = (
        _tiny_builder(home).build_tokenizer()
        if home.kind == "tiny"
        else from_pretrained(AutoTokenizer, section, home, base_dir)
    )
    if home.kind == "gguf" and home.path is not None:
        for name, token in read_special_tokens(home.path).items():
            setattr(tokenizer, name, token)  # transformers 5.17 uses the file's BOS as EOS
    if section.chat_template:
        tokenizer.chat_template = find(section.chat_template, base_dir, "chat template", ModelError).read_text()
    tokenizer.chat_template = set_variables(tokenizer.chat_template, section.chat_template_kwargs)
    if section.thoughts:
        declare_format(tokenizer, *section.thoughts)
    tokenizer.padding_side = "left"  # generation continues at the right end
    return tokenizer


def _base_model(section: Model, base: Place, base_dir: Path, seed: int, *, on_host: bool = False) -> Any:
    """Load the base, quantized or dense, onto the recipe's device."""
    if section.quantize:
        return quantize.disable_repacking(_load_quantized(section, base, base_dir, seed))
    model = load_dense_base(section, base, base_dir, seed)
    return model if on_host else model.to(device_of(section))


def load_dense_base(section: Model, base: Place, base_dir: Path, seed: int = 0) -> Any:
    """Load the base with unquantized weights in the recipe's dtype, on the CPU."""
    if base.kind == "tiny":
        return _tiny_builder(base).build(seed)[0].to(dtype_of(section))
    options: dict[str, Any] = {"dtype": dtype_of(section), **attention_of(section)}
    if base.kind == "gguf":
        options |= _dequantize()
    return from_pretrained(_auto_class(section, base, base_dir), section, base, base_dir, **options)


def _tiny_builder(place: Place) -> Any:
    """Return the module that builds a model in code."""
    return tiny_vision if place.name == "tiny-vision" else tiny


def _auto_class(section: Model, base: Place, base_dir: Path | None) -> Any:
    """Return the transformers class that loads a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if base.kind == "gguf":
        return AutoModelForCausalLM
    config = from_pretrained(AutoConfig, section, base, base_dir)
    _refuse_classifier(config, section.path)
    return vision.auto_class(config, section)


def _refuse_classifier(config: Any, path: str) -> None:
    """Raise ModelError for a sequence classifier: with tied embeddings it lacks no weight, and would load as a language
    model.
    """
    named = getattr(config, "architectures", None) or ()
    if named and all(name.endswith(CLASSIFIER) for name in named):
        raise ModelError(
            f"{path} is a reward model, which gives scores and generates no text",
            hint="name the model that it was trained from; as a reward: `{use: reward_model, params: {path: ...}}`",
        )


def load_image_reader(section: Model, base_dir: Path, tokenizer: Any) -> ImageReader | None:
    """Return the image reader of a vision model; None for any other model. tokenizer: from `load_tokenizer`."""
    base = _locate_dense_base(locate(section.path, base_dir), base_dir)
    if base.kind == "gguf":
        return None
    return _image_reader(section, base, base_dir, tokenizer, config_of(section, base_dir))


def _image_reader(section: Model, base: Place, base_dir: Path, tokenizer: Any, config: Any) -> ImageReader | None:
    """Return the image reader for a configuration; None for a model that does not read images."""
    if base.kind == "gguf" or not vision.sees_images(config, section):
        return None
    if base.kind == "directory" and not any((Path(base.target) / name).exists() for name in PROCESSOR_FILES):
        return None  # saved without an image processor
    if base.kind == "tiny":
        return ImageReader(tiny_vision.build_processor(tokenizer), config, shares=True)
    processor = from_pretrained(vision.processor_class(config), section, base, base_dir)
    processor.tokenizer = tokenizer  # with the recipe's chat template
    return ImageReader(processor, config, shares=True)


def _dequantize() -> dict[str, Any]:
    """Return options that load GGUF weights dequantized: newer transformers otherwise keep blocks, which cannot be
    trained.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _load_quantized(section: Model, base: Place, base_dir: Path, seed: int) -> Any:
    """Load the base with 4-bit weights."""
    options = {
        "dtype": dtype_of(section),
        "device_map": {"": str(device_of(section))},
        "quantization_config": quantize.nf4_config(dtype_of(section), divided=section.divided is not None),
        **attention_of(section),
    }
    if base.kind not in ("tiny", "gguf"):
        return from_pretrained(_auto_class(section, base, base_dir), section, base, base_dir, **options)
    # Only safetensors checkpoints are quantized while they load, so `tiny` and GGUF are saved as one first.
    with scratch("quantize") as folder:
        model = load_dense_base(section, base, base_dir, seed)
        model.should_save_on_this_rank = lambda _: True  # transformers writes on rank 0 only; each rank has its folder
        model.save_pretrained(folder)
        place = Place("directory", base.name, folder)
        return from_pretrained(_auto_class(section, place, None), section, place, None, **options)


def _with_adapters(model: Any, section: Model, place: Place, *, seed: int, training: bool) -> tuple[Any, bool]:
    """Return (model with the adapters to use, whether an older adapter was merged into its base)."""
    old = place.path if place.kind == "adapter" else None
    if old and (section.quantize is not None or (training and section.lora and section.lora.continue_)):
        if not training:
            return adapters.load_frozen(model, old), False
        if section.lora:
            adapters.check_same_shape(old, section.lora)
        return adapters.continue_from(model, old), False
    if old:
        model = load_merged(model, old)
    if training and section.lora:
        without = vision.modules_without_adapters(model, section)
        model = adapters.add(model, section.lora, seed=seed, without=without)
    return model, old is not None


def _check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Raise ModelError if the tokenizer has ids beyond the model's embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows and not _has_4bit_weight(model.get_input_embeddings()):
        raise ModelError(f"{name}: the tokenizer has ids up to {highest}, but the model has only {rows} embeddings")


def _has_4bit_weight(module: Any) -> bool:
    return type(module.weight).__name__ == "Params4bit"


def _set_special_tokens(tokenizer: Any, model: Any, eos: tuple[int, ...], name: str) -> int:
    """Set the EOS tokens and a pad id for generation; return the pad id.

    Without a pad token EOS is used (masks go by position, so EOS is still learned); tokens are never added.
    """
    if not eos:
        raise ModelError(f"{name}: neither tokenizer nor configuration names an end-of-sequence token")
    if tokenizer.pad_token_id is None:
        configured = getattr(model.generation_config, "pad_token_id", None)
        tokenizer.pad_token_id = eos[0] if configured is None else configured
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token_id = eos[0]
    model.generation_config = generation_config(tokenizer, eos)
    return int(tokenizer.pad_token_id)


def generation_config(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    """Return a generation config with only what ends and pads a completion.

    Sampling settings belong to the recipe: a penalty or temperature stored with the model would change rollouts
    unnoticed.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        eos_token_id=eos[0] if len(eos) == 1 else list(eos),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
