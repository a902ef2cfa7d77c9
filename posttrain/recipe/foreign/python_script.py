"""Keys of a Python script that trains with TRL.

The script is parsed, never imported or run: literal values are read, and computed values are reported with their line.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import RecipeError
from posttrain.recipe.foreign import words
from posttrain.recipe.foreign.script_rewards import ScriptReward, extract_reward
from posttrain.recipe.foreign.script_values import PARSERS, NotLiteral, Script
from posttrain.recipe.yaml import display_path

_FILES = ("json", "csv", "parquet")  # names of file formats in load_dataset
_CHANGED = (
    "rows are changed by code: give them by a source FILE.py:FUNCTION (docs/recipes.md), or save them as JSON lines"
)
_DIVIDES = ("train_test_split", "select", "take", "skip", "shard", "filter")  # methods that select some of the rows


def read_script(path: Path, text: str, stage: str | None = None) -> Training:
    """Return the training run that a script defines. stage: selects one if the script defines several.

    Raises RecipeError for text that is not Python, and for a script without a trainer of TRL.
    """
    try:
        script = Script(ast.parse(text), text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise RecipeError(f"not readable as Python: {error.args[0]}", where=f"{display_path(path)}{line}") from None
    trainer, command = _find_trainer(script, path, stage)
    found = Training(script, path, command)
    found.read_config(trainer)
    found.read_trainer(trainer)
    return found


def _find_trainer(script: Script, path: Path, stage: str | None) -> tuple[ast.Call, str]:
    """Return the call of a trainer (or of its configuration if the script has none) and the equivalent command."""
    trainers = words.values("trainers")
    for ending in ("Trainer", "Config"):
        calls = [(call, trainers[name]) for name in trainers for call in script.calls(f"{name}{ending}")]
        stages = words.table("trl").stages["commands"]
        wanted = [(call, command) for call, command in calls if stage in (None, stages[command])]
        if len({stages[command] for _, command in wanted}) > 1:
            lines = ", ".join(f"{command} in line {call.lineno}" for call, command in wanted)
            raise RecipeError(
                f"it trains several times: {lines}", where=display_path(path), hint="say which one: --stage sft"
            )
        if wanted:
            return wanted[0] if ending == "Trainer" else (ast.Call(wanted[0][0].func, [], []), wanted[0][1])
    names = ", ".join(f"{name}Trainer" for name in trainers)
    parsed = any(script.calls(name) for name in ("TrlParser", "HfArgumentParser"))
    hint = "its values come from the command line: give the line that starts it in a .sh file"
    raise RecipeError(
        "no trainer of TRL with values in it", where=display_path(path), allowed=f"known: {names}", hint=hint * parsed
    )


class Unread(NamedTuple):
    """A key that is left out because its value is computed or it has no counterpart: its source text, and the
    reason."""

    key: str
    text: str
    line: int
    why: str


class Training:
    """One training run of a script. command: the equivalent command of `trl`. given: key -> (value, line). functions:
    the reward functions that the script defines. notes: comments for the top of the recipe."""

    def __init__(self, script: Script, path: Path, command: str) -> None:
        self.script, self.path, self.command = script, path, command
        self.table = words.table("trl")
        self.given: dict[str, tuple[Any, int]] = {}
        self.unread: list[Unread] = []
        self.functions: dict[str, ScriptReward] = {}
        self.notes: list[str] = []

    def set_literal(self, key: str, value: ast.expr) -> None:
        """Set a key to a literal value; a computed value is left out."""
        try:
            self.given.setdefault(key, (self.script.value(value), value.lineno))
        except NotLiteral as computed:
            self.leave(key, value, f"{computed}: write the value")

    def leave(self, key: str, value: ast.expr, why: str) -> None:
        """Record a key that is left out."""
        self.unread.append(Unread(key, self.script.text_of(value), value.lineno, why))

    def set_keywords(self, call: ast.Call, renamed: Mapping[str, str] | None = None) -> None:
        """Set the keywords of a call as keys."""
        for keyword in call.keywords:
            if keyword.arg is None:
                self.leave("**", keyword.value, "its keys are computed")
            elif isinstance(keyword.value, ast.Dict) and keyword.arg == "model_init_kwargs":
                self.put_entries(keyword.value)
            else:
                self.set_literal((renamed or {}).get(keyword.arg, keyword.arg), keyword.value)

    def put_entries(self, entries: ast.Dict) -> None:
        """Set the entries of a dictionary as keys."""
        for key, value in zip(entries.keys, entries.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.set_literal(key.value, value)
            else:
                self.leave("**", value, "its keys are computed")

    def read_config(self, trainer: ast.Call) -> None:
        """Read the configuration: the call passed as `args`, or the only configuration call, and attributes assigned
        later."""
        named = next((keyword.value for keyword in trainer.keywords if keyword.arg == "args"), None)
        found = self.script.resolve(named) if named is not None else None
        kinds = [name for name, command in words.values("trainers").items() if command == self.command]
        others = [call for kind in (f"{kinds[0]}Config", "TrainingArguments") for call in self.script.calls(kind)]
        call = found if isinstance(found, ast.Call) else next(iter(others), None)
        if call is None or self.script.name_of(call) in PARSERS:
            if named is not None:
                self.leave("args", named, "its values come from the command line: import a .sh file with that line")
            return
        if call.args:
            self.set_literal("output_dir", call.args[0])
        self.set_keywords(call)
        for key, value in self.script.attributes_set_on(call):
            self.given.pop(key, None)
            self.set_literal(key, value)

    def read_trainer(self, call: ast.Call) -> None:
        """Read the arguments of the trainer besides its configuration."""
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if call.args:
            arguments.setdefault("model", call.args[0])
        for key, value in arguments.items():
            if isinstance(value, ast.Constant) and value.value is None:
                continue
            if key == "model":
                self.read_model(value)
            elif key == "peft_config":
                self.read_adapter(value)
            elif key == "train_dataset":
                self.read_rows(value)
            elif key == "reward_funcs":
                self.read_rewards(value)
            elif key == "eval_dataset" and self.is_own_split(value, arguments.get("train_dataset")):
                continue
            elif key in words.values("objects"):
                if why := words.values("objects")[key]:
                    self.leave(key, value, why)
            elif key in ("quantization_config",):
                self.read_quantization(value)
            elif self.table.entry(key):
                self.set_literal(key, value)
            else:
                self.leave(key, value, "an object of the script")

    def read_model(self, value: ast.expr) -> None:
        """Read a model name, or the from_pretrained call that creates the model, also if get_peft_model wraps it."""
        found = self.script.resolve(value)
        if isinstance(found, ast.Name):  # model = get_peft_model(model, ...), after model = ...from_pretrained(...)
            steps = [call for call in self.script.names.get(found.id, []) if isinstance(call, ast.Call)]
            loads = [call for call in steps if self.script.name_of(call) == "from_pretrained"]
            wraps = [call for call in steps if self.script.name_of(call) == "get_peft_model"]
            if len(loads) == len(wraps) == 1 and len(self.script.names[found.id]) == 2:
                self.read_adapter(wraps[0].args[1] if len(wraps[0].args) > 1 else wraps[0])
                found = loads[0]
        if not isinstance(found, ast.Call):
            self.set_literal("model_name_or_path", value)
            return
        if self.script.name_of(found) == "get_peft_model":
            self.read_adapter(found.args[1] if len(found.args) > 1 else found)
            if found.args:
                self.read_model(found.args[0])
            return
        if self.script.name_of(found) != "from_pretrained":
            self.leave("model", value, "the model is made by code: write `model.path`")
            return
        if found.args:
            self.set_literal("model_name_or_path", found.args[0])
        for keyword in found.keywords:
            if keyword.arg == "quantization_config":
                self.read_quantization(keyword.value)
            elif keyword.arg in ("device_map", "use_cache", "low_cpu_mem_usage", "cache_dir"):
                continue  # device placement and caching depend on the machine
            elif keyword.arg is not None:
                self.set_literal({"revision": "model_revision"}.get(keyword.arg, keyword.arg), keyword.value)
        if self.is_unsloth(found) and not any(keyword.arg == "full_finetuning" for keyword in found.keywords):
            self.given.setdefault("load_in_4bit", (True, found.lineno))

    def is_unsloth(self, call: ast.Call) -> bool:
        """Return whether a call is a method of Unsloth's FastLanguageModel, FastModel or FastVisionModel."""
        owner = getattr(getattr(call.func, "value", None), "id", "")
        return self.script.imports.get(owner, "").startswith("unsloth.")

    def read_quantization(self, value: ast.expr) -> None:
        """Read the keywords of a BitsAndBytesConfig."""
        found = self.script.resolve(value)
        if isinstance(found, ast.Call) and self.script.name_of(found) == "BitsAndBytesConfig":
            shown = [keyword for keyword in found.keywords if keyword.arg != "bnb_4bit_compute_dtype"]  # model.dtype
            self.set_keywords(ast.Call(found.func, [], shown), {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"})
        else:
            self.leave("quantization_config", value, "write `model.quantize: nf4` with `model.lora`")

    def read_adapter(self, value: ast.expr) -> None:
        """Read the keywords of a LoraConfig, or of a function with the same keywords."""
        found = self.script.resolve(value)
        if isinstance(found, ast.Constant) and found.value is None:
            return
        if not isinstance(found, ast.Call):
            self.leave("peft_config", value, "it is computed: write `model.lora`")
            return
        self.given.setdefault("use_peft", (True, found.lineno))
        noop = words.values("lora_noop")
        for keyword in found.keywords:
            if keyword.arg is None:
                self.leave("**", keyword.value, "its keys are computed")
            elif keyword.arg not in noop or not self._is(keyword.value, noop[keyword.arg]):
                self.set_literal(words.values("lora").get(keyword.arg, keyword.arg), keyword.value)
        of = "lora" if self.script.name_of(found) == "LoraConfig" else "unsloth" if self.is_unsloth(found) else ""
        if of:
            for key, default in words.values(f"{of}_defaults").items():
                self.given.setdefault(key, (default, found.lineno))

    def _is(self, value: ast.expr, literal: Any) -> bool:
        try:
            return bool(self.script.value(value) == literal) or ast.unparse(value).endswith(str(literal))
        except NotLiteral:
            return ast.unparse(value).endswith(f".{literal}")

    def read_rows(self, value: ast.expr) -> None:
        """Read the load_dataset call that creates the rows, and the dataset methods applied to them."""
        chain = list(self.script.chain(value))
        for call in chain:
            name = self.script.name_of(call)
            if name in words.values("row_methods") or name in ("map", "filter", "select", "take"):
                self.read_row_method(name, call)
        load = next((call for call in chain if self.script.name_of(call) == "load_dataset"), None)
        if load is None:
            self.leave(
                "train_dataset", value, "rows are made by code: save them as JSON lines, and write `data.source`"
            )
            return
        named = {keyword.arg: keyword.value for keyword in load.keywords if keyword.arg}
        path = load.args[0] if load.args else named.get("path")
        files = named.get("data_files")
        if isinstance(files, ast.Dict) and len(files.values) == 1:
            files = files.values[0]
        if files is not None and isinstance(path, ast.Constant) and path.value in _FILES:
            self.set_literal("dataset_name", files)
        elif path is not None:
            self.set_literal("dataset_name", path)
            if files is not None:
                self.leave("data_files", files, "name the file itself as `data.source`")
        if (config := load.args[1] if len(load.args) > 1 else named.get("name")) is not None:
            self.set_literal("dataset_config", config)
        split = named.get("split") or self.script.subscript_of(load)
        if split is not None:
            self.set_literal("dataset_train_split", split)

    def is_own_split(self, value: ast.expr, trained: ast.expr | None) -> bool:
        """Return whether the evaluation rows are another split of the same data set, and set `dataset_test_split` to
        its name.

        Such as `rows["test"]` or `load_dataset(NAME, split="test")`, if no code divides the rows.
        """
        found = self.script.resolve(value)
        found = self.script.resolve(found.body) if isinstance(found, ast.IfExp) else found
        evaluated, training = self._source_of(found), self._source_of(trained) if trained is not None else None
        if evaluated is None or training is None or evaluated[0] != training[0]:
            return False
        split, trained_split = evaluated[1], training[1]
        if split is None:
            return False
        try:
            name = self.script.value(split)
        except NotLiteral:
            return isinstance(split, ast.Attribute) and split.attr == "dataset_test_split"  # an option of TRL
        other = trained_split is None or ast.unparse(trained_split) != ast.unparse(split)
        if not (isinstance(name, str) and name.isidentifier() and name != "train" and other):
            return False
        self.given.setdefault("dataset_test_split", (name, value.lineno))
        return True

    def _source_of(self, rows: ast.expr) -> tuple[list[str], ast.expr | None] | None:
        """Return the arguments of load_dataset as text, and the split; None if code selects some of the rows."""
        chain = list(self.script.chain(rows))
        load = next((call for call in chain if self.script.name_of(call) == "load_dataset"), None)
        if load is None or any(self.script.name_of(call) in _DIVIDES for call in chain):
            return None
        split = next((keyword.value for keyword in load.keywords if keyword.arg == "split"), None)
        named = [ast.unparse(keyword) for keyword in load.keywords if keyword.arg != "split"]
        found = self.script.resolve(rows)
        subscript = found.slice if isinstance(found, ast.Subscript) else None
        return [*map(ast.unparse, load.args), *named], split or self.script.subscript_of(load) or subscript

    def read_row_method(self, name: str, call: ast.Call) -> None:
        """Read a dataset method: a number of rows, or a hint on what to write instead."""
        if name in ("select", "take"):
            inside = call.args[0] if call.args else None
            if isinstance(inside, ast.Call) and self.script.name_of(inside) == "range" and len(inside.args) == 1:
                inside = inside.args[0]
            if inside is not None:
                self.set_literal("max_samples", inside)
        elif why := words.values("row_methods").get(name, _CHANGED):
            changed = call.args[0] if call.args else call
            self.leave(f"dataset.{name}", changed, why)
            if name == "train_test_split":
                where = f"line {call.lineno}: `train_test_split` holds rows out there"
                self.notes.append(f"{where}; this recipe trains on all rows of its source: divide them in two files")
            if why == _CHANGED:
                where = f"line {changed.lineno}: `dataset.{name}` changes the rows there"
                self.notes.append(f"{where}; this recipe takes them as the source has them (see its end)")

    def read_rewards(self, value: ast.expr) -> None:
        """Read the reward functions; functions that the script defines are stored in `functions` with their source."""
        found = self.script.resolve(value)
        entries = found.elts if isinstance(found, ast.List | ast.Tuple) else [value]
        names: list[str] = []
        models: list[ast.expr] = []
        for entry in entries:
            name = self.name_reward(entry)
            if name:
                names.append(name)
            elif isinstance(literal := self.script.resolve(entry), ast.Constant) and isinstance(literal.value, str):
                models.append(literal)
            else:
                names.append(self.name_made_reward(entry, names))
        if names:
            self.given["reward_funcs"] = (names, value.lineno)
        for model in models:
            self.set_literal("reward_model_name_or_path", model)

    def name_made_reward(self, entry: ast.expr, names: Sequence[str]) -> str:
        """Choose a name for a reward that code creates, such as an instance of a class. The name must not exist in the
        script, because an unrelated function of that name would be taken for the reward."""
        made = self.script.resolve(entry)
        name = (self.script.name_of(made) if isinstance(made, ast.Call) else "") or "reward"
        taken = {*names, *self.script.functions, *self.script.imports}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        name = next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)
        why = f"`{' '.join(self.script.text_of(entry).split())}` is made by code: write it as a function of that name"
        self.functions[name] = ScriptReward(self.path.name, why=why)
        return name

    def name_reward(self, entry: ast.expr) -> str:
        """Return the name of a reward that is a function of the script (its source is stored) or an import; "" for
        anything else."""
        if not isinstance(entry, ast.Name):
            return ""
        if entry.id in self.script.functions:
            self.functions[entry.id] = extract_reward(self.script, entry.id, self.path)
            return entry.id
        module = self.script.imports.get(entry.id)
        if module is None:
            return ""
        origin, _, name = module.rpartition(".")
        return name if origin.split(".")[0] == "trl" else module
