"""Model card (README.md) of an export: lineage, training, evaluations, and how to load the model.

The card contains nothing about this machine: files are named without their folders, and of a recipe only the keys in
SHOWN are listed, none of which holds a secret or an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain import hub
from posttrain.export.source import Source, read_adapter_base, read_license
from posttrain.models.lineage import find_run_of_model, merge_inputs, start_models, trace_lineage
from posttrain.recipe.merging import UNWEIGHTED
from posttrain.run.atomic_io import read_json
from posttrain.run.environment import packages

RECIPE_KEYS = (  # recipe keys that a card lists if they have a value
    *(
        "algorithm",
        "merge_method",
        "model.lora.rank",
        "model.lora.alpha",
        "model.quantize",
        "objective.use",
        "loss.use",
    ),
    *("advantage.use", "kl.coef", "rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens"),
    *("rollout.temperature", "batch.size", "optim.use", "optim.lr", "optim.schedule", "run.steps", "run.epochs"),
    "run.seed",
)
VERSIONS = ("posttrain", "torch", "transformers", "trl", "peft", "vllm")
MAX_RUNS_SEARCHED = 2000  # directories next to the run that are searched for evaluations


@dataclass(frozen=True)
class Facts:
    """Contents of a model card.

    bases: the starting models of the first trainings, as named in their recipes; several for a merge of models with
    different bases. adapter: whether the model is an adapter. runs: trainings and merges in order, newest last.
    evaluations: run directories.
    """

    title: str
    bases: Sequence[str]
    license: str | None
    adapter: bool = False
    runs: Sequence[Path] = ()
    evaluations: Sequence[Path] = ()
    notes: Sequence[str] = field(default_factory=list)

    @property
    def base(self) -> str | None:
        """The base model; None unless there is exactly one."""
        return self.bases[0] if len(self.bases) == 1 else None

    @property
    def public_bases(self) -> list[str]:
        """The base models whose names are hub ids."""
        return [b for b in self.bases if b.count("/") == 1 and hub.looks_like_id(b) and not Path(b).exists()]

    @property
    def public_base(self) -> str | None:
        """The base model if there is exactly one and its name is a hub id; else None."""
        return next(iter(self.public_bases), None) if self.base else None


def collect_facts(source: Source, *, license: str | None = None, evaluations: Iterable[Path] = ()) -> Facts:
    """Collect the facts about a model.

    license, evaluations: given by the user; evaluations of the model in run directories next to its run are added.
    """
    traced = trace_lineage(source.path)
    under = read_adapter_base(Path(source.path).expanduser())
    bases = traced.roots if traced.runs else [under] if under else []
    paths = [*evaluations, *(_find_evaluations(source) if source.run else ())]
    named = {_known_license(base) for base in bases}
    known = license or _known_license(source.path) or (named.pop() if len(named) == 1 else None)
    measured = list(dict.fromkeys(path.resolve() for path in paths))
    return Facts(source.name, bases, known, under is not None, traced.runs, measured, _notes(source))


def _notes(source: Source) -> list[str]:
    """Return what a reader must know about a model that is not the final model of its run."""
    if source.part == "best":
        return ["The model of the best evaluation in training; numbers of the training are those of the whole run."]
    if source.part:
        return [f"The checkpoint {source.part}; numbers of the training are those of the whole run."]
    return []


def _find_folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else hub.find_snapshot(path)


def _known_license(model: str) -> str | None:
    """Return the license named in a model's card or GGUF file; None if it names none or is not available locally."""
    if not model.endswith(".gguf"):
        return read_license(_find_folder(model))
    from gguf import GGUFReader

    from posttrain.models.model_paths import locate

    place = locate(model, None).path
    named = GGUFReader(place).get_field("general.license") if place else None
    return str(named.contents()) if named else None


def _find_evaluations(source: Source) -> Iterator[Path]:
    """Yield finished evaluations of the model: stages of its pipeline, and runs in the folder that holds its run."""
    assert source.run is not None
    here, above = Path(source.path).resolve(), source.run.resolve().parent
    names = (here, here.parent) if here.name == "final" else (here,)  # a run directory means its final/
    beside = list(above.glob("*/resolved.json"))
    if above.parent.name == "runs":  # runs/NAME/TIME-HASH
        beside += above.parent.glob("*/*/resolved.json")
    for file in sorted(set(beside[:MAX_RUNS_SEARCHED])):
        recipe = read_json(file) or {}
        named = (recipe.get("model") or {}).get("path")
        done = (file.parent / "summary.json").is_file()
        if recipe.get("stage") in ("eval", "harness") and named and done and Path(named).resolve() in names:
            yield file.parent


def write_card(facts: Facts, kind: str, name: str, files: Sequence[str] = ()) -> str:
    """Return the text of README.md.

    kind: adapter, merged, gguf or ollama. name: the name that others load the model by. files: GGUF files.
    """
    parts = [
        _front_matter(facts, kind),
        f"# {facts.title}\n",
        _summary_section(facts, kind),
        _training_section(facts),
        _evaluation_section(facts),
    ]
    parts += [_loading_section(facts, kind, name, files), _license_section(facts), _versions_section(facts)]
    return "\n".join(part for part in parts if part)


def _front_matter(facts: Facts, kind: str) -> str:
    """Return the YAML front matter of the card, as the hub reads it."""
    import yaml

    stages = dict.fromkeys(str(_read_recipe(run).get("stage", "")).replace("_", "-") for run in facts.runs)
    values: dict[str, Any] = {
        "library_name": {"adapter": "peft", "merged": "transformers"}.get(kind, "gguf"),
        "pipeline_tag": "text-generation",
        "license": facts.license or "unknown",
        "tags": ["posttrain", *(stage for stage in stages if stage)],
    }
    if public := facts.public_bases:
        values["base_model"] = facts.public_base or public
        full = "merge" if len(public) > 1 else "finetune"
        values["base_model_relation"] = {"adapter": "adapter", "merged": full}.get(kind, "quantized")
    sets = [source for run in facts.runs for source in _data_sources(_read_recipe(run)) if _is_hub_set(source)]
    if sets:
        values["datasets"] = list(dict.fromkeys(sets))
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---\n"


def _summary_section(facts: Facts, kind: str) -> str:
    """Return the first paragraph: what the model is and how it was trained."""
    forms = {
        "adapter": "A LoRA adapter",
        "merged": "A model with all its weights"
        + (", into which the trained adapter is merged" if facts.adapter else ""),
        "gguf": "A model as a GGUF file",
        "ollama": "A model as a GGUF file with a Modelfile for Ollama",
    }
    stages = _describe_steps(facts.runs)
    base = f" on {_list_models(facts.bases)}" if facts.bases else ""
    made = f"Trained with posttrain{base}: {stages}." if stages else (f"Its base is{base[3:]}." if base else "")
    return "\n".join([f"{forms[kind]}. {made}".strip(), "", *(f"- {note}" for note in facts.notes)])


def _describe_steps(runs: Sequence[Path]) -> str:
    """Return a sentence about the runs: in sequence, or for a merge each run with its name and starting model."""
    if not any(merge_inputs(_read_recipe(run)) for run in runs):
        return ", then ".join(_stage_name(_read_recipe(run)) for run in runs)
    return "; ".join(
        f"`{run.name}` is {_stage_name(recipe)} of {_list_models(start_models(recipe))}"
        for run, recipe in ((run, _read_recipe(run)) for run in runs)
    )


def _list_models(models: Iterable[str]) -> str:
    return ", ".join(f"`{_model_name(model)}`" for model in models)


def _model_name(model: str) -> str:
    """Return the display name of a model: its run if known, with the checkpoint's name for a checkpoint."""
    run = find_run_of_model(model)
    if run is None:
        return _drop_folders(model)
    part = Path(model).expanduser().resolve().name
    return run.name if part in (run.name, "final") else f"{run.name}/{part}"


def _merge_lines(recipe: Mapping[str, Any]) -> list[str]:
    """Return table rows about a merge: its inputs with weights, its base, and the common parameters."""
    common = recipe.get("parameters") or {}
    lines = []
    for model in merge_inputs(recipe):
        own = {k: v for k, v in (model.get("parameters") or {}).items() if v is not None}
        if recipe.get("merge_method") not in UNWEIGHTED:
            given = common.get("weight")
            own = {"weight": own.pop("weight", 1.0 if given is None else given), **own}
        cells = (
            [f"layers {model['layer_range'][0]} to {model['layer_range'][1] - 1}"] if model.get("layer_range") else []
        )
        cells += [f"{key} {value}" for key, value in own.items()]
        lines.append(f"| model | {_escape_cell(', '.join([_list_models([str(model['model'])]), *cells]))} |")
    if recipe.get("base_model"):
        lines.append(f"| `base_model` | `{_model_name(str(recipe['base_model']))}` |")
    shared = [
        f"| `parameters.{key}` | {_escape_cell(v)} |" for key, v in common.items() if v is not None and key != "weight"
    ]
    return lines + shared


def _stage_name(recipe: Mapping[str, Any]) -> str:
    method = recipe.get("algorithm") or recipe.get("merge_method")
    return f"{recipe.get('stage', '?')}{f' ({method})' if method else ''}"


def _training_section(facts: Facts) -> str:
    """Return one section per training: recipe, data, and the numbers of its summary."""
    if not facts.runs:
        return "## Training\n\nNo run directory was beside the model, so its recipe and data are not known here.\n"
    lines = ["## Training\n"]
    merged = any(merge_inputs(_read_recipe(run)) for run in facts.runs)
    for run in facts.runs:
        recipe, summary = _read_recipe(run), read_json(run / "summary.json") or {}
        lines += [f"### {f'{run.name}: ' if merged else ''}{_stage_name(recipe)}\n", "| | |", "|---|---|"]
        lines += [
            f"| `{key}` | {_escape_cell(value)} |"
            for key in RECIPE_KEYS
            if (value := _get_key(recipe, key)) not in (None, "", [])
        ]
        data = recipe.get("data") or {}
        for source in _data_sources(recipe):
            split = f", split {data['split']}" if _is_hub_set(source) and data.get("split") else ""
            size = f", {data['size']} rows" if data.get("size") else ""
            lines += [f"| data | {_escape_cell(_drop_folders(source))}{split}{size} |"]
        lines += _merge_lines(recipe)
        rewards = [
            f"{reward.get('use')} (weight {reward.get('weight', 1.0):g})" for reward in recipe.get("rewards") or ()
        ]
        if rewards:
            lines += [f"| rewards | {_escape_cell(', '.join(_drop_folders(reward) for reward in rewards))} |"]
        ended = {k: v for k, v in summary.items() if isinstance(v, int | float) and not k.endswith("seconds")}
        lines += [f"| {name} | {_format_number(value)} |" for name, value in ended.items()]
        lines += [""]
    return "\n".join(lines)


def _evaluation_section(facts: Facts) -> str:
    """Return a table of all evaluations with intervals, or a sentence that there are none."""
    if not facts.evaluations:
        return "## Evaluation\n\nNo evaluation of this model was found beside its run.\n"
    remarks: list[str] = []
    lines = ["## Evaluation\n", "| data | metric | mean | interval | problems |", "|---|---|---|---|---|"]
    for run in facts.evaluations:
        recipe, summary = _read_recipe(run), read_json(run / "summary.json") or {}
        harness = f"lm-eval {summary['lm_eval']}" if "lm_eval" in summary else ""
        sources = harness or ", ".join(_drop_folders(source) for source in _data_sources(recipe))
        for name, interval in (summary.get("intervals") or {}).items():
            if interval["mean"] is None:
                continue
            bounds = f"{100 * interval['level']:g}%: {interval['low']:.3f} to {interval['high']:.3f}"
            note = f" ({interval['note']})" if interval["note"] else ""
            measured = f"{interval['mean']:.3f} | {bounds}{note} | {interval['problems']}"
            lines += [f"| {_escape_cell(sources)} | {_escape_cell(name)} | {measured} |"]
        if trained := summary.get("trained_on"):
            rows = f"{trained['rows']} of {trained['of']} rows"
            remarks += [
                f"{_drop_folders(run.name)}: measured on rows it was trained on ({rows}), so not on new problems."
            ]
        sampling = summary.get("sampling") or {}
        if sampling:
            limit, cut = sampling["max_new_tokens"], 100 * summary.get("truncated", 0)
            how = f"temperature {sampling['temperature']:g}, at most {limit} new tokens"
            remarks += [f"{_drop_folders(run.name)}: {how}; {cut:.1f}% of the completions were cut and count as wrong."]
    remarks += ["Intervals are bootstraps over problems; they say nothing about training seeds."]
    return "\n".join([*lines, "", *(f"- {remark}" for remark in remarks), ""])


def _loading_section(facts: Facts, kind: str, name: str, files: Sequence[str]) -> str:
    """Return the section with code that loads the model."""
    file = files[0] if files else "FILE.gguf"
    sees = "processor_config.json" in files
    loader, reader = ("ImageTextToText", "Processor") if sees else ("CausalLM", "Tokenizer")
    code = {
        "merged": [
            f"from transformers import AutoModelFor{loader}, Auto{reader}",
            "",
            f'{reader.lower()} = Auto{reader}.from_pretrained("{name}")',
            f'model = AutoModelFor{loader}.from_pretrained("{name}", dtype="auto")',
        ],
        "adapter": [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}", dtype="auto")  # loads its base, too',
        ],
        "gguf": [f"llama-cli -m {file}", f"posttrain chat {file}"],
        "ollama": [f"ollama create {facts.title.lower()} -f Modelfile", f"ollama run {facts.title.lower()}"],
    }[kind]
    language = "python" if kind in ("merged", "adapter") else ""
    return "\n".join(["## Loading\n", f"```{language}", *code, "```", ""])


def _license_section(facts: Facts) -> str:
    """Return the section about the license, or why it is unknown."""
    if facts.license:
        return f"## Licence\n\n{facts.license}\n"
    what = f"{_list_models(facts.bases) or 'its base'} names none that could be read here"
    if len(facts.bases) > 1:
        each = (f"{_list_models([base])} {_known_license(base) or 'names none'}" for base in facts.bases)
        what = f"its bases name no common one ({', '.join(each)})"
    return f"## Licence\n\nUnknown: {what}. Look it up before you pass this model on.\n"


def _versions_section(facts: Facts) -> str:
    env = (read_json(facts.runs[-1] / "env.json") or {}) if facts.runs else {}
    found = env.get("packages") or packages()
    listed = ", ".join(f"{name} {found[name]}" for name in VERSIONS if name in found)
    return f"## Versions\n\n{'Trained' if facts.runs else 'Exported'} with {listed}.\n"


def _read_recipe(run: Path) -> dict[str, Any]:
    return read_json(run / "resolved.json") or {}


def _data_sources(recipe: Mapping[str, Any]) -> list[str]:
    """Return the data sources of a recipe."""
    data = recipe.get("data") or {}
    return [str(source) for source_entry in data.get("mix") or [data] if (source := source_entry.get("source"))]


def _is_hub_set(source: str) -> bool:
    """Return whether a data source is a data set of the hub."""
    plain = ":" not in source and source.count("/") == 1 and hub.looks_like_id(source)
    return (
        plain
        and not hub.is_only_path(source, (".jsonl", ".json", ".csv", ".parquet", ".gz"))
        and not Path(source).exists()
    )


def _drop_folders(name: str | None) -> str:
    """Return a name without this machine's folders: hub ids are unchanged, paths are cut to the last part.

    For `final` and `best` the name of the run precedes it.
    """
    if not name or not (name.startswith(("/", ".", "~")) or Path(name).exists()):
        return name or ""
    path = Path(name)
    return f"{path.parent.name}/{path.name}" if path.name in ("final", "best") else path.name


def _get_key(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _escape_cell(value: Any) -> str:
    """Return a value as a Markdown table cell, with pipes and line breaks escaped."""
    return str(value).replace("|", "\\|").replace("\n", " ")
