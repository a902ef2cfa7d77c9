"""Models whose vocabularies differ: embeddings are merged token by token, in the order of the result's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import MergeError, RecipeError
from posttrain.merge.vocabulary import TEMPLATES
from posttrain.models import tiny
from posttrain.recipe.load import load_dict
from posttrain.recipe.merging import NAMED_TEMPLATES

Merge = Callable[..., dict[str, Any]]
EMBEDDING = "model.embed_tokens.weight"
SIZE = 110  # tokens of `tiny`


def save(folder: Path, seed: int, added: tuple[str, ...] = (), rows: int | None = None, tied: bool = True) -> None:
    """`tiny` with more tokens. rows: of its embeddings; fewer than tokens: the last of them were never trained."""
    model, tokenizer = tiny.build(seed)
    tokenizer.add_tokens(list(added))
    model.resize_token_embeddings(rows or len(tokenizer), mean_resizing=False)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """base; `chat`, with two tokens more; `unused`, whose tokenizer has tokens that its embedding has not."""
    save(tmp_path / "base", 0)
    save(tmp_path / "chat", 1, ("<q>", "<r>"))
    save(tmp_path / "unused", 2, ("<u1>", "<u2>", "<u3>"), rows=SIZE)
    return tmp_path


def models(*names: str) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": 1.0}} for name in names]


ALL = {"merge_method": "linear", "base_model": "base", "models": models("base", "chat", "unused")}


def rows(folder: Path, name: str = EMBEDDING) -> dict[str, torch.Tensor]:
    """Token -> its row."""
    tensor = load_file(folder / "model.safetensors")[name]
    return {
        token: tensor[i] for token, i in AutoTokenizer.from_pretrained(folder).get_vocab().items() if i < len(tensor)
    }


def assert_whole(final: Path, size: int) -> None:
    """transformers loads it, and its sizes are those of its tokens."""
    assert AutoModelForCausalLM.from_pretrained(final).get_input_embeddings().weight.shape[0] == size
    assert AutoConfig.from_pretrained(final).vocab_size == size


def test_union_has_the_tokens_of_all(three: Path, merge: Merge) -> None:
    """A token of one model is its row, one of all three is the mean; tokens that no embedding has are left out."""
    merge(**ALL, tokenizer_source="union")
    base, chat, unused, merged = (rows(three / name) for name in ("base", "chat", "unused", "run/final"))
    assert merged.keys() == base.keys() | {"<q>", "<r>"}
    torch.testing.assert_close(merged["<q>"], chat["<q>"])
    torch.testing.assert_close(merged["7"], (base["7"] + chat["7"] + unused["7"]) / 3)
    assert_whole(three / "run/final", SIZE + 2)


@pytest.mark.parametrize(("source", "size"), [("base", SIZE), ("chat", SIZE + 2), ("model:chat", SIZE + 2)])
def test_the_tokens_of_one_model(three: Path, merge: Merge, source: str, size: int) -> None:
    merge(**ALL, tokenizer_source=source)
    merged = rows(three / "run/final")
    assert merged.keys() == rows(three / ("base" if source == "base" else "chat")).keys()
    assert_whole(three / "run/final", size)


def test_a_token_that_a_model_lacks_is_the_bases(three: Path, merge: Merge) -> None:
    """`other` has <q> and <s>, chat <q> and <r>: of a difference from chat, the <r> that other lacks adds nothing."""
    save(three / "other", 3, ("<s>", "<q>"))
    merge(
        merge_method="task_arithmetic",
        base_model="chat",
        models=models("other"),
        parameters={"lambda": 0.5},
        tokenizer_source="union",
    )
    chat, other, merged = (rows(three / name) for name in ("chat", "other", "run/final"))
    torch.testing.assert_close(merged["<r>"], chat["<r>"])
    torch.testing.assert_close(merged["<q>"], (chat["<q>"] + other["<q>"]) / 2)  # other ids, the same token
    torch.testing.assert_close(merged["<s>"], other["<s>"])


def test_a_token_that_two_of_three_have_is_their_mean_for_the_third(three: Path, merge: Merge) -> None:
    save(three / "other", 3, ("<q>",))
    merge(merge_method="linear", base_model="base", models=models("base", "chat", "other"), tokenizer_source="union")
    chat, other, merged = (rows(three / name) for name in ("chat", "other", "run/final"))
    torch.testing.assert_close(merged["<q>"], (chat["<q>"] + other["<q>"]) / 2)


def test_tokens_with_embeddings_of_their_own(three: Path, merge: Merge) -> None:
    tokens = {
        "8": {"source": "chat", "force": True},
        "9": {"source": {"kind": "model_token", "model": "chat", "token": "<q>"}, "force": True},
        "<r>": {"source": {"kind": "model_token", "model": "base", "token_id": 20}},
        "<new>": {"source": {"kind": "zero"}},
    }
    merge(
        merge_method="linear",
        base_model="base",
        models=models("base", "chat"),
        tokenizer={"source": "union", "tokens": tokens, "pad_to_multiple_of": 16},
    )
    base, chat, merged = (rows(three / name) for name in ("base", "chat", "run/final"))
    torch.testing.assert_close(merged["8"], chat["8"])
    torch.testing.assert_close(merged["9"], chat["<q>"])
    twenty = load_file(three / "base/model.safetensors")[EMBEDDING][20]
    torch.testing.assert_close(merged["<r>"], (twenty + chat["<r>"]) / 2)  # not forced: chat keeps its own
    assert not merged["<new>"].any()
    torch.testing.assert_close(merged["7"], (base["7"] + chat["7"]) / 2)
    assert_whole(three / "run/final", 128)
    whole = load_file(three / "run/final/model.safetensors")[EMBEDDING]
    torch.testing.assert_close(whole[SIZE + 3 :], whole[: SIZE + 3].mean(0).expand(128 - SIZE - 3, -1))


def test_a_head_of_its_own_is_ordered_too(tmp_path: Path, merge: Merge) -> None:
    save(tmp_path / "base", 0, ("<r>",), tied=False)
    save(tmp_path / "chat", 1, ("<q>", "<r>"), tied=False)
    merge(
        merge_method="slerp",
        base_model="base",
        models=models("base", "chat"),
        parameters={"t": 1.0},
        tokenizer_source="union",
    )
    for name in (EMBEDDING, "lm_head.weight"):
        chat, merged = rows(tmp_path / "chat", name), rows(tmp_path / "run/final", name)
        assert merged.keys() == chat.keys()
        assert all(torch.allclose(merged[token], chat[token], atol=1e-6) for token in chat)


def test_without_a_tokenizer_source_the_rows_that_all_have_are_merged(three: Path, merge: Merge) -> None:
    """The tokens of these rows are the same; the base, whose tokenizer it is, has no more rows."""
    summary = merge(**ALL)
    base, chat, unused, merged = (rows(three / name) for name in ("base", "chat", "unused", "run/final"))
    torch.testing.assert_close(merged["7"], (base["7"] + chat["7"] + unused["7"]) / 3)
    assert merged.keys() == base.keys()
    assert any(f"the first {SIZE} are merged" in warning for warning in summary["warnings"])
    assert_whole(three / "run/final", SIZE)


def test_rows_of_other_tokens_are_not_mixed(three: Path, merge: Merge) -> None:
    save(three / "other", 3, ("<s>", "<q>"))
    values = {"merge_method": "linear", "models": models("chat", "other")}
    with pytest.raises(MergeError, match="tokenizer_source: union` merges them by token"):
        merge(**values)
    with pytest.raises(MergeError, match=r"differs from chat in .*embed_tokens"):
        merge(
            three / "two", **{**values, "models": models("chat", "base")}
        )  # chat's tokenizer would have more tokens than rows


def test_a_chat_template_of_the_recipe(three: Path, merge: Merge) -> None:
    turn = [{"role": "user", "content": "Hi"}]

    def rendered(folder: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(three / folder)
        return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    values = {"merge_method": "linear", "models": models("base", "unused")}
    merge(three / "one", **values, chat_template="chatml")
    assert rendered("one/final") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    merge(three / "llama", **values, chat_template="llama3")
    start, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    bos = AutoTokenizer.from_pretrained(three / "llama/final").bos_token
    assert rendered("llama/final") == f"{bos}{start}user{end}Hi<|eot_id|>{start}assistant{end}"
    assert tuple(TEMPLATES) == NAMED_TEMPLATES
    merge(three / "two", **values, chat_template="{{ messages[0]['content'] }}!")
    assert rendered("two/final") == "Hi!"
    for name in ("chat", "unused"):
        path = three / name / "chat_template.jinja"
        path.write_text("{{ 'most of them' }}")
    merge(three / "three", **{**values, "models": models("base", "chat", "unused")}, chat_template="auto")
    assert rendered("three/final") == "most of them"
    merge(three / "four", **values)
    assert rendered("four/final") == rendered("base")


def test_no_tokenizer_to_order_by(three: Path, merge: Merge) -> None:
    for file in (three / "chat").glob("*token*"):
        file.unlink()
    for file in (three / "chat").glob("chat_template*"):
        file.unlink()
    with pytest.raises(MergeError, match="no tokenizer in chat, so embeddings cannot be ordered by token"):
        merge(**ALL, tokenizer_source="union")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"tokenizer_source": "bse"}, "did you mean `base`"),
        ({"tokenizer_source": "base", "tokenizer": {"source": "union"}}, "`tokenizer_source` says the same"),
        ({"tokenizer": {"tokens": {"x": {"source": "cht"}}}}, "did you mean `chat`"),
        ({"tokenizer": {"tokens": {"x": {"source": {"kind": "zero", "token": "y"}}}}}, "nothing"),
        ({"tokenizer": {"tokens": {"x": {"source": {"kind": "model_token", "model": "chat"}}}}}, "one of `token`"),
        ({"chat_template": "chatm"}, "`chatm` is not a template"),
    ],
)
def test_what_does_not_fit_is_told_at_load(tmp_path: Path, values: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        load_dict({"stage": "merge", **ALL, **values}, base_dir=tmp_path, where="test")


@pytest.mark.usefixtures("three")
def test_a_token_that_its_model_does_not_have(merge: Merge) -> None:
    tokens = {"<none>": {"source": "chat"}}
    with pytest.raises(MergeError, match=r"tokens\.<none>\.source: chat has no embedding of '<none>'"):
        merge(**ALL, tokenizer={"source": "union", "tokens": tokens})


def test_the_report_says_so_in_json(three: Path, merge: Merge) -> None:
    """Outputs of another width cannot be compared: null, not NaN, which JSON has not."""
    merge(**ALL, tokenizer_source="union")
    report = json.loads((three / "run/final/merge_report.json").read_text(), parse_constant=pytest.fail)
    assert report["probe"]["logit_gap"] is None and report["probe"]["largest_logit"] > 0
