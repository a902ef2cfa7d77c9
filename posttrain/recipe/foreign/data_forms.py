"""Conversion of data sets in the forms of other tools: lists of sections (axolotl, TRL), names with row counts
(ms-swift), names in a registry (LLaMA-Factory), files (verl), names with shares (OpenRLHF)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.recipe.foreign import words
from posttrain.recipe.foreign.draft import Draft, Leaf
from posttrain.recipe.foreign.source import Given

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n"
)

_ALPACA_INPUT = (
    "alpaca rows with a non-empty `input`: axolotl writes them in other words, with the input below `### Input:`; "
    "here it follows the instruction, in the format of rows without one (a source FILE.py:FUNCTION can write both)"
)


def put_sources(draft: Draft, sources: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Write one source as `data.source` and its keys, several sources as `data.mix`."""
    if len(sources) == 1:
        for key, value in sources[0].items():
            path = f"data.{key}"
            if isinstance(value, Mapping):
                for inner, settings in value.items():
                    draft.set_default(f"{path}.{inner}", settings, origin)
            else:
                draft.set_default(path, value, origin)
        return
    draft.values.setdefault("data", {})["mix"] = [
        {key: Leaf(value, origin if key == "source" else "") for key, value in source.items()} for source in sources
    ]
    if not any("weight" in source for source in sources):
        draft.note("data.mix takes rows in equal shares: write `weight`, such as the numbers of rows, to use them all")


def _split(source: dict[str, Any], split: Any) -> None:
    """Write a split such as `train[:1000]` as a split and its first rows."""
    found = re.fullmatch(r"(\w+)\[(\d*):(\d*)\]", str(split))
    if found and found[3]:
        source["split"] = found[1]
        source["size"] = int(found[3]) - int(found[2] or 0)
        if found[2]:
            source["skip"] = int(found[2])
    elif split not in (None, "", "train"):
        source["split"] = str(split)


def _mixture(draft: Draft, given: Given, _: str) -> None:
    """TRL: convert entries with path, name, split, columns."""
    _add_sources(draft, given, given.value, name="path", config="name")


def _open_r1_mixture(draft: Draft, given: Given, _: str) -> None:
    """open-r1: convert entries with id, config, split, columns."""
    if not given.key.endswith(".datasets"):
        draft.leave(given, "rows are shuffled by `run.seed`; a part of them for evaluation is made before")
        return
    if any("weight" in source for source in given.value if isinstance(source, Mapping)):
        draft.leave(Given(f"{given.key}.weight", "", given.line), "the share of a data set's rows: write `size`")
    _add_sources(
        draft,
        given,
        [{k: v for k, v in source.items() if k != "weight"} for source in given.value],
        name="id",
        config="config",
    )


def _add_sources(draft: Draft, given: Given, entries: Sequence[Mapping[str, Any]], *, name: str, config: str) -> None:
    """Convert a list of sections to sources. name, config: their keys for the data set and its configuration."""
    sources = []
    for entry in entries:
        source: dict[str, Any] = {"source": str(entry.get("data_files") or entry.get(name))}
        if entry.get(config):
            source["config"] = str(entry[config])
        _split(source, entry.get("split"))
        for key in entry.keys() - {name, config, "split", "columns", "data_files"}:
            draft.leave(Given(f"{given.key}.{key}", entry[key], given.line), "a source has no such key")
        sources.append(source)
    put_sources(draft, sources, draft.origin(given.key))


# axolotl


def _axolotl(draft: Draft, given: Given, _: str) -> None:
    """axolotl: convert a list of sections with path, type, split, and the names of columns."""
    entries = [entry for entry in given.value if isinstance(entry, Mapping)] if isinstance(given.value, list) else []
    chats = [str(entry.get("type") or "").startswith(_CHATS) for entry in entries]
    sources = []
    for number, entry in enumerate(entries):
        sources.append(_axolotl_source(draft, given, entry, number))
        if any(chats) and not chats[number] and draft.stage == "sft":
            kind = Given(f"{given.key}.{number}.type", entry.get("type"), given.line)
            draft.leave(kind, "one recipe renders all rows alike: these get the chat template, as the conversations do")
        else:
            _axolotl_type(draft, given, entry.get("type"), number)
    put_sources(draft, sources, draft.origin(given.key))


_CHATS = ("chat_template", "sharegpt")  # types whose rows are conversations
_AXOLOTL_READ = {"path", "name", "split", "type", "ds_type", "data_files", "train_on_split"}


def _axolotl_source(draft: Draft, given: Given, entry: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return one source of axolotl's list, recording the keys that are left out."""
    files = entry.get("data_files")
    named = files[0] if isinstance(files, list) and len(files) == 1 else files
    source: dict[str, Any] = {"source": str(named or entry.get("path"))}
    if entry.get("name"):
        source["config"] = str(entry["name"])
    _split(source, entry.get("split") or entry.get("train_on_split"))
    columns = words.values("columns")["axolotl"]
    renamed = {ours: str(entry[theirs]) for theirs, ours in columns.items() if entry.get(theirs)}
    source |= _needed_renames({**renamed, **_columns_of_type(draft.stage, entry.get("type"))})
    for key in sorted(entry.keys() - _AXOLOTL_READ - set(columns)):
        if not _is_ours(key, entry[key]):
            why = words.values("axolotl_sources").get(key, "a source has no such key")
            draft.leave(Given(f"{given.key}.{number}.{key}", entry[key], given.line), why)
    return source


def _columns_of_type(stage: str, kind: Any) -> dict[str, str]:
    """Return our column -> the column that a prompt strategy of pairs or labeled answers reads in its place."""
    if stage not in ("dpo", "reward_model"):
        return {}
    if isinstance(kind, Mapping):
        names = ("prompt", "chosen", "rejected", "completion", "label")
        return {name: str(kind[f"field_{name}"]) for name in names if kind.get(f"field_{name}")}
    prompt = words.values("axolotl_prompts").get(str(kind).rpartition(".")[2])
    return {"prompt": str(prompt)} if prompt else {}


def _is_ours(key: str, value: Any) -> bool:
    """Return whether rows are read as this key of axolotl's source says."""
    roles = words.values("roles")
    if key == "roles_to_train":
        return {roles.get(name, name) for name in value} == {"assistant"}
    if key == "roles":
        return all(roles.get(name, name) == ours for ours, names in value.items() for name in names)
    if key == "message_property_mappings":
        return all(_is_ours(f"message_field_{ours}", name) or ours == name for ours, name in value.items())
    return value in words.values("axolotl_known").get(key, ())


def _needed_renames(columns: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return `columns` of a source without the names that need no renaming."""
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if renamed.get("messages") == "conversations":  # a known column name
        del renamed["messages"]
    return {"columns": renamed} if renamed else {}


_PAIRS = "columns are prompt, chosen and rejected (kto: prompt, completion, label)"


def _axolotl_type(draft: Draft, given: Given, kind: Any, number: int) -> None:
    """Write what a prompt strategy of axolotl reads and trains on as keys of `data`, which all sources share."""
    whole = Given(f"{given.key}.{number}.type", kind, given.line)
    if isinstance(kind, Mapping):
        _axolotl_own(draft, kind, whole.key)
        return
    text, origin = str(kind or ""), f"{whole.key}: {kind}"
    if not text:
        return
    if draft.stage == "rl":
        draft.leave(whole, "a function of axolotl's form: write `data.source: file.py:function`, or `data.columns`")
    elif draft.stage != "sft":
        if text.startswith(("chatml.", "llama3.")):
            draft.note(f"{text} writes the texts around the messages itself: here the model's chat template does")
        elif not text.startswith("chat_template"):
            draft.leave(whole, f"{_PAIRS}: `data.columns` renames others")
    elif text.startswith(_CHATS):
        if draft.get("train_on_inputs") is not True:  # that key is copied, wherever it stands
            draft.set_default("data.train_on", "assistant", origin)
    elif text == "completion":
        draft.set_default("data.train_on", "all", origin)
        draft.set_default("data.chat", False, origin)
    elif text.startswith("alpaca"):
        draft.set_default("data.chat", False, origin)
        draft.set_default("data.prompt_template", ALPACA, origin)
        draft.note(_ALPACA_INPUT)
        if text != "alpaca":
            draft.note(f"the prompts of {text} are written as those of alpaca: change data.prompt_template")
    else:
        draft.leave(whole, "rows are read by their columns: `data.prompt_template` and `data.completion_template`")


def _axolotl_own(draft: Draft, kind: Mapping[str, Any], origin: str) -> None:
    """Convert a user-defined axolotl type: `field_*` name columns, `format` contains {instruction} and {input}."""
    if draft.stage != "sft":
        draft.set_default("data.chat", False, origin)
        if kind.get("prompt_format") not in (None, "", "{prompt}"):
            draft.set_default("data.prompt_template", str(kind["prompt_format"]), origin)
        for side in ("chosen", "rejected", "completion"):
            if kind.get(f"{side}_format") not in (None, "", f"{{{side}}}"):
                why = "an answer is its column and the end token: a source FILE.py:FUNCTION can write more"
                draft.note(f"{origin}.{side}_format is left out: {why}")
        return
    names = {name: str(kind.get(f"field_{name}") or name) for name in ("instruction", "input", "system")}
    alone = kind.get("no_input_format") if not kind.get("field_input") else None
    form = str(alone or kind.get("format") or "{instruction}")
    draft.set_default("data.chat", False, origin)
    draft.set_default(
        "data.prompt_template", re.sub(r"\{(\w+)\}", lambda m: f"{{{names.get(m[1], m[1])}}}", form), origin
    )
    draft.set_default("data.completion_template", f"{{{kind.get('field_output') or 'output'}}}", origin)
    if kind.get("system_prompt"):
        draft.set_default("data.system", str(kind["system_prompt"]), origin)


# ms-swift


def _swift(draft: Draft, given: Given, _: str) -> None:
    """Convert ms-swift's dataset names: `AI-ModelScope/name:subset#500`."""
    sources = []
    for name in given.value if isinstance(given.value, list) else [given.value]:
        text, _hash, size = str(name).partition("#")
        text = re.sub(r"^(HF|MS)::", "", text)
        source: dict[str, Any] = {"source": text}
        if not text.endswith((".jsonl", ".json", ".csv")) and ":" in text:
            source = {"source": text.partition(":")[0], "config": text.partition(":")[2]}
        if size.isdigit():
            source["size"] = int(size)
        sources.append(source)
    put_sources(draft, sources, draft.origin(given.key))
    if any("/" in source["source"] for source in sources) and not draft.get("use_hf"):
        draft.note("ms-swift reads names from ModelScope; here they are those of the Hugging Face hub")


def _swift_columns(draft: Draft, given: Given, _: str) -> None:
    """ms-swift: convert a mapping from the file's column names to ms-swift's."""
    value = given.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        draft.leave(given, "write `data.columns: {ours: theirs}`")
        return
    for theirs, name in value.items():
        ours = words.values("columns")["ms_swift"].get(str(name), str(name))
        draft.set_default(f"data.columns.{ours}", str(theirs), draft.origin(given.key))


# LLaMA-Factory


def _read_dataset_info(draft: Draft, given: Given, _: str) -> None:
    """Convert names in LLaMA-Factory's dataset_info.json, which lies in dataset_dir."""
    names = given.value if isinstance(given.value, list) else str(given.value).split(",")
    folder, known = _registry(draft)
    sources: list[dict[str, Any]] = []
    for name in (str(listed).strip() for listed in names):
        entry = known.get(name)
        if entry is None:
            draft.note(f"`{name}` is a name of dataset_info.json, which is not here: write the file that it stands for")
            sources.append({"source": name})
        else:
            sources.append(_registered_source(entry, folder))
            _note_rows(draft, name, entry)
    shares = _shares(draft)
    if len(shares) == len(sources) > 1:
        sources = [{**source, "weight": share} for source, share in zip(sources, shares, strict=True)]
    put_sources(draft, sources, draft.origin(given.key))


def _note_rows(draft: Draft, name: str, entry: Mapping[str, Any]) -> None:
    """Add a note for names of roles that are not known here, and for Alpaca rows, whose input is joined differently."""
    tags, roles = entry.get("tags") or {}, words.values("roles")
    names = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
    wrong = [tag for tag, role in names.items() if tag in tags and roles.get(tags[tag]) != role]
    wrong += [tag for tag in ("role_tag", "content_tag") if tag in tags
              and not _is_ours(f"message_field_{tag[:-4]}", tags[tag])]  # fmt: skip
    wrong += ["function_tag"] if tags.get("function_tag", "function_call") not in ("function_call", "tool_call") else []
    if wrong:
        unknown = ", ".join(f"{tag}: {tags[tag]}" for tag in wrong)
        draft.note(f"dataset_info.json, {name}: rename in the rows what is not known here ({unknown})")
    if entry.get("formatting", "alpaca") == "alpaca":
        draft.note("Alpaca rows: `input` follows the instruction after a blank line, in LLaMA-Factory on the next line")


def _shares(draft: Draft) -> list[float]:
    """Return the shares of sources that LLaMA-Factory interleaves; other mix strategies do not read them."""
    strategy, shares = str(draft.get("mix_strategy", default="concat")), draft.get("interleave_probs")
    if shares is None or not strategy.startswith("interleave"):
        return []
    return [float(share) for share in (shares if isinstance(shares, list) else str(shares).split(","))]


def _registry(draft: Draft) -> tuple[Path, dict[str, Any]]:
    """Return (folder, entries) of LLaMA-Factory's dataset_info.json, or no entries if the file is not found."""
    named = str(draft.get("dataset_dir", default="data"))
    for base in (Path.cwd(), *draft.foreign.path.resolve().parents):
        file = base / named / "dataset_info.json"
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                break
            return file.parent, found if isinstance(found, dict) else {}
    return Path(named), {}


def _registered_source(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the source of one entry in dataset_info.json."""
    file, elsewhere = entry.get("file_name"), entry.get("hf_hub_url") or entry.get("ms_hub_url")
    source: dict[str, Any] = {"source": str(folder / file) if file else str(elsewhere)}
    if entry.get("subset"):
        source["config"] = str(entry["subset"])
    if entry.get("split") not in (None, "train"):
        source["split"] = str(entry["split"])
    if entry.get("num_samples"):
        source["size"] = int(entry["num_samples"])
    named, known = entry.get("columns") or {}, words.values("columns")["llamafactory"]
    return source | _needed_renames({ours: str(named[theirs]) for theirs, ours in known.items() if theirs in named})


# verl and OpenRLHF


def _verl_files(draft: Draft, given: Given, _: str) -> None:
    value = given.value
    if isinstance(value, str) and value.startswith("["):
        value = [file.strip(" '\"") for file in value.strip("[]").split(",")]
    put_sources(
        draft,
        [{"source": str(file)} for file in (value if isinstance(value, list) else [value])],
        draft.origin(given.key),
    )


def _openrlhf(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert comma-separated names (`NAME@TYPE`) with comma-separated shares."""
    names = str(given.value).split(",")
    shares = str(draft.get("data.dataset_probs", "data.prompt_probs", default="")).split(",")
    sources: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        text, _at, _type = name.strip().partition("@")
        source: dict[str, Any] = {"source": text}
        if len(names) > 1 and number < len(shares) and re.fullmatch(r"[\d.]+", shares[number].strip()):
            source["weight"] = float(shares[number])
        sources.append(source)
    put_sources(draft, sources, draft.origin(given.key))


def _openrlhf_input(draft: Draft, given: Given, _: str) -> None:
    column = (
        "messages"
        if draft.get("data.multiturn") or (draft.stage == "sft" and not draft.get("data.output_key"))
        else "prompt"
    )
    if column != given.value:
        draft.set_default(f"data.columns.{column}", str(given.value), draft.origin(given.key))


def _openrlhf_template(draft: Draft, given: Given, _: str) -> None:
    if draft.get("data.apply_chat_template"):
        draft.leave(given, "the chat template writes the prompt")
        return
    text = str(given.value).removeprefix("$").replace("\\n", "\n")
    draft.set_default("data.prompt_template", text.replace("{}", "{prompt}"), draft.origin(given.key))


def _template_variable(draft: Draft, given: Given, target: str) -> None:
    """Convert a variable of the chat template, whose name is the last part of the key."""
    draft.set_default(f"{target}.{given.key.rpartition('.')[2]}", given.value, draft.origin(given.key))


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "axolotl_datasets": _axolotl,
    "mixture": _mixture,
    "open_r1_mixture": _open_r1_mixture,
    "openrlhf_dataset": _openrlhf,
    "openrlhf_input": _openrlhf_input,
    "openrlhf_template": _openrlhf_template,
    "registered_datasets": _read_dataset_info,
    "swift_columns": _swift_columns,
    "swift_datasets": _swift,
    "template_variable": _template_variable,
    "verl_files": _verl_files,
}
