"""`posttrain recipe import`: options of other tools that decide how rows are read and which tokens are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.messages import ROLES
from posttrain.recipe.foreign import words
from posttrain.recipe.stages import DpoRecipe

Import = Callable[..., dict[str, Any]]
AXOLOTL = {"base_model": "tiny", "micro_batch_size": 1, "sequence_len": 256}
LLAMA_FACTORY = {"model_name_or_path": "tiny", "stage": "sft", "finetuning_type": "full", "dataset": "mine"}
TORCHTUNE = {
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 64},
    "checkpointer": {"checkpoint_dir": "models/x"},
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
    "batch_size": 4,
    "epochs": 1,
}
TRL = {"model_name_or_path": "tiny", "dataset_name": "rows.jsonl", "packing": True}


@pytest.fixture
def imported(call: Callable[..., Any], folder: Path) -> Import:
    """Import keys of another tool; returns the parsed output, with `why` of each key that is left out."""

    def run(keys: dict[str, Any], **more: Any) -> dict[str, Any]:
        (folder / "theirs.yaml").write_text(json.dumps({**keys, **more}), encoding="utf-8")
        found = json.loads(call("recipe", "import", "theirs.yaml", "--json").stdout)
        return {**found, "why": {one["key"].rpartition(".")[2]: one["why"] for one in found["left_out"]}}

    return run


def test_axolotl_options_of_turns_that_say_how_rows_are_read_here(imported: Import) -> None:
    source = {
        "path": "rows.jsonl",
        "type": "chat_template",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human"], "assistant": ["gpt", "ai"], "tool": ["observation"]},
        "roles_to_train": ["gpt"],
        "train_on_eos": "turn",
        "message_field_training": "train",
        "drop_system_message": False,
    }
    found = imported(AXOLOTL, datasets=[source])
    assert (found["why"], found["recipe"]["data"]["train_on"]) == ({}, "assistant")


def test_axolotl_inputs_are_trained_on_wherever_the_key_stands(imported: Import) -> None:
    data_sets = {"datasets": [{"path": "rows.jsonl", "type": "chat_template"}]}
    for keys in ({**data_sets, "train_on_inputs": True}, {"train_on_inputs": True, **data_sets}):
        found = imported(AXOLOTL, **keys)
        assert (found["recipe"]["data"]["train_on"], found["why"]) == ("all", {})
    assert imported(AXOLOTL, **data_sets, train_on_inputs=False)["recipe"]["data"]["train_on"] == "assistant"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("message_property_mappings", {"role": "speaker", "content": "text"}, "rename the keys in the rows"),
        ("message_field_content", "text", "rename the keys in the rows"),
        ("roles", {"assistant": ["agent"]}, "rename the roles in the rows"),
        ("roles_to_train", ["assistant", "human"], "on no other role"),
        ("roles_to_train", [], "on no other role"),
        ("train_on_eos", "all", "trained on with the turn"),
        ("train_on_eot", "none", "trained on with the turn"),
        ("message_field_training", "training", "the key is `train`"),
        ("message_field_training_detail", "detail", "a turn is trained on as a whole"),
        ("drop_system_message", True, "leave the system messages out of the rows"),
        ("chat_template", "chatml", "`model.chat_template`"),
    ],
)
def test_axolotl_options_of_turns_without_counterpart(key: str, value: Any, why: str, imported: Import) -> None:
    found = imported(AXOLOTL, datasets=[{"path": "rows.jsonl", "type": "chat_template", key: value}])
    assert why in found["why"][key]


def test_names_of_roles_are_those_of_the_data() -> None:
    own = ("user", "assistant", "system", "tool")
    assert words.values("roles") == {**ROLES, **{role: role for role in own}}


@pytest.mark.parametrize(
    ("kind", "column"), [("chatml.intel", "question"), ("llama3.icr", "input"), ("chatml.ultra", None)]
)
def test_axolotl_strategies_of_pairs_name_the_prompt(kind: str, column: str | None, imported: Import) -> None:
    found = imported(AXOLOTL, rl="dpo", datasets=[{"path": "org/pairs", "type": kind}])
    assert found["valid"] and not found["left_out"]
    assert found["recipe"]["data"].get("columns") == (column and {"prompt": column})
    assert any(f"{kind} writes the texts around the messages itself" in note for note in found["differs"])


def test_axolotl_own_format_of_pairs(imported: Import) -> None:
    kind = {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad", "prompt_format": "<q>{prompt}</q>"}
    found = imported(
        AXOLOTL, rl="dpo", datasets=[{"path": "rows.jsonl", "type": {**kind, "chosen_format": "{chosen}!"}}]
    )
    data = DpoRecipe.model_validate({**found["recipe"], "run": {"output": "x"}}).data
    assert (data.chat, data.prompt_template) == (False, "<q>{prompt}</q>")
    assert data.columns == {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert any("chosen_format is left out" in note for note in found["differs"])
    labeled = {"field_prompt": "q", "field_completion": "a", "field_label": "ok", "prompt_format": "{prompt}"}
    data = imported(AXOLOTL, rl="kto", datasets=[{"path": "rows.jsonl", "type": labeled}])["recipe"]["data"]
    assert data["columns"] == {"prompt": "q", "completion": "a", "label": "ok"}
    assert "prompt_template" not in data


@pytest.mark.parametrize(
    ("keys", "train_on"),
    [
        ({}, "assistant"),
        ({"mask_history": True}, "completion"),
        ({"train_on_prompt": True}, "all"),
        ({"neat_packing": True}, "assistant"),
    ],
)
def test_llamafactory_options_of_trained_tokens(keys: dict[str, Any], train_on: str, imported: Import) -> None:
    found = imported(LLAMA_FACTORY, **keys)
    assert found["recipe"]["data"]["train_on"] == train_on
    assert found["recipe"].get("batch", {}).get("packing", False) == ("neat_packing" in keys)
    assert any("rows of more than 2048 tokens are truncated by LLaMA-Factory" in note for note in found["differs"])


def test_llamafactory_registry_names_columns_and_roles(imported: Import, folder: Path) -> None:
    (folder / "data").mkdir()
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "Bot"}
    entries = {
        "mine": {"file_name": "a.json", "columns": {"prompt": "q", "query": "more", "response": "a", "history": "old"}},
        "talks": {"file_name": "b.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entries), encoding="utf-8")
    found = imported(LLAMA_FACTORY)
    columns = {"instruction": "q", "input": "more", "output": "a", "history": "old"}
    assert found["recipe"]["data"]["columns"] == columns
    assert any("`input` follows the instruction after a blank line" in note for note in found["differs"])
    found = imported(LLAMA_FACTORY, dataset="talks")
    assert found["recipe"]["data"]["columns"] == {"messages": "talk"}
    (note,) = (note for note in found["differs"] if "dataset_info.json" in note)
    assert note == "dataset_info.json, talks: rename in the rows what is not known here (assistant_tag: Bot)"


@pytest.mark.parametrize(
    ("keys", "train_on"),
    [({}, None), ({"assistant_only_loss": True}, "assistant"), ({"completion_only_loss": False}, "all")],
)
def test_trl_options_of_trained_tokens(keys: dict[str, Any], train_on: str | None, imported: Import) -> None:
    """The note on TRL's default is for files that do not say what is trained on."""
    found = imported(TRL, **keys)
    assert found["recipe"]["data"].get("train_on") == train_on
    assert any("TRL trains on all tokens" in note for note in found["differs"]) == (train_on is None)
    assert any("rows of more than 1024 tokens are truncated by TRL" in note for note in found["differs"])
    for strategy, left in (("bfd", False), ("wrapped", True)):
        assert ("packing_strategy" in imported(TRL, packing_strategy=strategy)["why"]) == left


@pytest.mark.parametrize(
    ("builder", "keys", "data"),
    [
        ("chat", {"conversation_column": "talk"}, {"train_on": "assistant", "columns": {"messages": "talk"}}),
        ("chat", {"conversation_column": "conversations", "train_on_input": True}, {"train_on": "all"}),
        ("chat", {"conversation_column": "messages", "masking_strategy": "train_on_last"}, {"train_on": "completion"}),
        (
            "instruct",
            {"column_map": {"input": "q", "output": "a"}},
            {"train_on": "assistant", "columns": {"prompt": "q", "completion": "a"}},
        ),
        ("text_completion", {"column": "body"}, {"train_on": "all", "chat": False, "columns": {"text": "body"}}),
    ],
)
def test_torchtune_data_sets(builder: str, keys: dict[str, Any], data: dict[str, Any], imported: Import) -> None:
    section = {"_component_": f"torchtune.datasets.{builder}_dataset", "source": "org/x", "packed": True, **keys}
    found = imported(TORCHTUNE, dataset=section)
    assert (found["tool"], found["stage"], found["problems"]) == ("torchtune", "sft", [])
    assert found["recipe"]["data"] == {"source": "org/x", "max_length": 64, **data}
    assert found["recipe"]["batch"] == {"size": 4, "micro_size": 4, "packing": True}


def test_torchtune_alpaca_and_several_data_sets(imported: Import) -> None:
    alpaca = {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}
    data = imported(TORCHTUNE, dataset=alpaca)["recipe"]["data"]
    assert (data["source"], data["train_on"]) == ("yahma/alpaca-cleaned", "all")  # the builder's default
    assert data["prompt_template"].endswith("### Instruction:\n{prompt}\n\n### Response:\n")
    slim = {"_component_": "torchtune.datasets.slimorca_dataset"}
    mixed = imported(TORCHTUNE, dataset=[slim, {**slim, "source": "org/x"}])["recipe"]["data"]
    assert [source["source"] for source in mixed["mix"]] == ["Open-Orca/SlimOrca-Dedup", "org/x"]


def test_torchtune_preferences(imported: Import) -> None:
    builder = {"_component_": "torchtune.datasets.stack_exchange_paired_dataset", "column_map": {"chosen": "best"}}
    found = imported(TORCHTUNE, dataset=builder, loss={"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2})
    assert found["stage"] == "dpo"
    assert found["recipe"]["data"]["columns"] == {"prompt": "question", "chosen": "best", "rejected": "response_k"}
    assert found["recipe"]["loss"] == {"beta": 0.2}


SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    "keys",
    [
        TRL | SILENT,
        AXOLOTL | SILENT | {"datasets": [{"path": "rows.jsonl", "type": "chat_template"}]},
        LLAMA_FACTORY | {"enable_thinking": False},
    ],
    ids=["TRL", "axolotl", "LLaMA-Factory"],
)
def test_variables_of_the_chat_template(keys: dict[str, Any], imported: Import) -> None:
    found = imported(keys)
    assert found["recipe"]["model"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"chat_template_kwargs", "enable_thinking"} & found["why"].keys()
