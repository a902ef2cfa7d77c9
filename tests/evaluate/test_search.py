"""Step-wise search: the beam by hand, labels by hand, and a search whose best trace is known."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout
from posttrain.cli.existence import check_run
from posttrain.errors import DataError, EngineError, RecipeError
from posttrain.evaluate import generate
from posttrain.evaluate.search import EvidenceReader, SearchEngine, beam_step, step_labels
from posttrain.models import tiny
from posttrain.recipe.eval_sections import Evidence, Search
from posttrain.recipe.load import load_dict
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.section import Names
from posttrain.rollout.engine import Completion
from posttrain.rollout.requests import Request
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import read_rows

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ConcurrentScriptedEngine, MiscountingEngine, ScriptedEngine


def test_best_steps_continue_and_finished_traces_compete():
    """Totals 1.0 + (0.1, 0.4) and a finished 1.2 at index 2: 1.4, 1.2; with a beam of 4 all three."""
    found = beam_step([1.0, 1.2], [[0.1, 0.4], [9.0, 9.0]], beam=2, finished=[False, True])
    assert found.kept == [1, 2] and found.cumulative == pytest.approx([1.4, 1.2])
    assert beam_step([1.0, 1.2], [[0.1, 0.4], [9.0, 9.0]], beam=4, finished=[False, True]).kept == [1, 2, 0]


def test_ties_keep_the_lower_index():
    assert beam_step([0.0, 0.0], [[1.0, 1.0], [1.0, 1.0]], beam=3).kept == [0, 1, 2]


def test_labels():
    """Margins 1, -1, 2 become 2, 1, 2: shifts -1, -2, 0; the median size is 1, only 2 is above it."""
    found = step_labels([1, 0, 2], [0, 1, 0], [2, 1, 2], [0, 0, 0])
    assert (found.reasoning, found.shift, found.threshold, found.search) == ([1, 1, 1], [-1, -2, 0], 1, [0, 1, 0])
    assert step_labels([], [], [], []).search == []


class Steps(ScriptedEngine):
    """A text that ends with a full stop is a step; any other ends with EOS."""

    def _completion(self, prompt: Prompt, sample: int, sampling: Sampling, logprobs: bool) -> Completion:
        del sampling, logprobs
        text = self._text(prompt, sample)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Completion((*ids, *(() if text.endswith(".") else (self.tokenizer.eos_token_id,))), None, "stop")


TOKENIZER = tiny.build_tokenizer()


def prompt_of(text: str) -> Prompt:
    return Prompt(text, {"prompt": text}, text, tuple(TOKENIZER.encode(text, add_special_tokens=False)))


def run_search(judge: Any, *, most: int = 40, **settings: Any) -> tuple[Rollout, Steps]:
    """Each step writes a digit, the sample's number; the third step of a trace ends it with `!`."""

    def script(prompt: Prompt, sample: int) -> str:
        written = TOKENIZER.decode(list(prompt.ids)).count(".")
        return f"{sample}!" if written == 2 else f"{sample}."

    engine = Steps(script, TOKENIZER)
    section = Search(**{"beam": 2, "branch": 3, "ends": ["."], "rewards": [Reward(use="a.b")], **settings})
    search = SearchEngine(engine, section, judge, TOKENIZER, [TOKENIZER.eos_token_id], Sampling(max_new_tokens=most))
    (found,) = search.generate([prompt_of("q")], 1, Sampling(max_new_tokens=most), seed=0, logprobs=False)
    return found, engine


def last_digit(traces: Any) -> list[float]:
    return [float(t.text.rstrip(".!")[-1]) for t in traces]


def test_search_finds_the_best_trace():
    """The judge prefers the digit of each new step: 2 each time, 6 in total, after three steps of two traces at
    most.
    """
    found, engine = run_search(last_digit)
    assert (found.text, found.finish) == ("2.2.2!", "stop")
    assert found.scores == {"search/reward": 6.0, "search/steps": 3.0}
    assert [len(call["prompts"]) for call in engine.calls] == [1, 2, 2]
    assert len({call["seed"] for call in engine.calls}) == 3


def test_late_reward_needs_a_beam():
    """The first step 0 has no reward and is the only way to a 5 in the second: one trace misses it, three do not."""

    def judge(traces):
        return [
            5.0 if t.text.startswith("0.1") and t.text.count(".") == 2 else 0.1 * last_digit([t])[0] for t in traces
        ]

    assert run_search(judge, beam=1)[0].text.startswith("2.")
    assert run_search(judge, beam=3)[0].text.startswith("0.1.")


def test_search_limits():
    found, _ = run_search(last_digit, most=3)
    assert (found.text, found.finish) == ("2.2", "length")
    found, _ = run_search(last_digit, max_steps=2)
    assert (found.text, found.finish) == ("2.2.", "length")


def test_mean_score_does_not_favor_long_traces():
    """Sample 2 ends immediately and scores 0.9; the others continue at 0.5 per step: 1.5 in total, 0.5 on average."""

    def script(prompt: Prompt, sample: int) -> str:
        written = TOKENIZER.decode(list(prompt.ids)).count(".")
        return "end!" if sample == 2 and written == 0 else "on!" if written == 2 else "on."

    def judge(traces):
        return [0.9 if t.text == "end!" else 0.5 for t in traces]

    def best(mean: bool) -> str:
        section = Search(beam=3, branch=3, ends=["."], rewards=[Reward(use="a.b")], mean=mean)
        sampling = Sampling(max_new_tokens=40)
        engine = SearchEngine(Steps(script, TOKENIZER), section, judge, TOKENIZER, [TOKENIZER.eos_token_id], sampling)
        return engine.generate([prompt_of("q")], 1, sampling, seed=0, logprobs=False)[0].text

    assert best(mean=True) == "end!" and best(mean=False).startswith("on.")


def test_search_in_a_generation_on_the_tiny_model(tmp_path):
    """The judge counts `e`: the search writes more of them than sampling, and the record contains the search."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(3)))
    (tmp_path / "e.py").write_text("def e(completion):\n    return float(completion.count('e'))\n")
    recipe: dict[str, Any] = {
        "stage": "generate", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"},
        "sampling": {"max_new_tokens": 24},
    }  # fmt: skip
    search = {"beam": 2, "branch": 6, "step_tokens": 4, "ends": ["\n"], "rewards": [{"use": "e.py:e"}],
              "scoring": {"workers": 1}}  # fmt: skip

    def run(name: str, **more: Any) -> list[dict[str, Any]]:
        loaded = load_dict({**recipe, **more}, base_dir=tmp_path, where="test")
        with RunDirectory.open(tmp_path / name, name="g", text="", resolved=loaded.resolved) as directory:
            generate.run(loaded.recipe, directory)
        return read_rows(tmp_path / name / "completions.jsonl")

    plain, found = run("plain"), run("search", search=search)
    assert len(found) == 3 and all(r["tokens"] <= 24 for r in found)
    assert sum(r["completion"].count("e") for r in found) > sum(r["completion"].count("e") for r in plain)
    assert found[0]["search"]["search/steps"] >= 1 and "search" not in plain[0]
    with pytest.raises(RecipeError, match="one completion per prompt"):
        load_dict({**recipe, "samples": 2, "search": search}, base_dir=tmp_path, where="test")


EVIDENCE = """
def informed(completion, messages):
    return float(messages[0]["content"].startswith("Evidence")) + completion.count("e")

def unsure(completion):
    return float("a" in completion)
"""


@pytest.mark.parametrize("asks", [False, True])
def test_judge_reads_evidence_for_each_step(tmp_path: Path, asks: bool) -> None:
    """Passages that share words with the question and the newest step precede the question; with `rewards`, only for
    traces that need it by those rewards. Without a passage the judge reads the plain question.
    """
    (tmp_path / "corpus.txt").write_text("Oslo lies in Norway.\nRome lies in Italy.\n\nLira was money of Italy.\n")
    asked: list[str] = []

    def judge(traces: Any) -> list[float]:
        asked.extend("".join(t.text) for t in traces)
        return [float("lira" in t.text) for t in traces]

    section = Evidence(corpus="corpus.txt", top=1, above=0.5, rewards=[Reward(use="a.b")] if asks else [])
    reader = EvidenceReader.from_section(section, ["."], tmp_path, judge if asks else None)
    prompt = Prompt("a", {"prompt": "Where does it lie?"}, "", (1,))
    texts = ["Rome is old.", "Rome is old.It paid in lira.", "Nothing else."]
    traces = [Rollout(prompt, 0, (), text, "stop", 0) for text in texts]
    shown = [trace.prompt.row["prompt"] for trace in reader.inform(traces)]
    with_rome = [{"role": "user", "content": "Evidence:\nRome lies in Italy.\n\nWhere does it lie?"}]
    with_lira = [{"role": "user", "content": "Evidence:\nLira was money of Italy.\n\nWhere does it lie?"}]
    plain = "Where does it lie?"
    assert shown == ([plain, with_lira, plain] if asks else [with_rome, with_lira, plain])
    assert asked == (texts if asks else []) and prompt.row == {"prompt": plain}


def test_a_corpus_in_another_encoding_and_a_column_of_lists(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Rome\nZ\u00fcrich\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt:2  not UTF-8: byte 0xfc at place 2 of the line"):
        EvidenceReader.from_section(Evidence(corpus="latin.txt"), ["."], tmp_path)
    mark = Names("file", "corpus")
    with pytest.raises(DataError, match=r"latin.txt:2  not UTF-8: byte 0xfc at place 2 of the line"):
        check_run("latin.txt", mark, tmp_path)
    (tmp_path / "braces.txt").write_text("a {% that is no template\n")
    check_run("braces.txt", mark, tmp_path)
    reader = EvidenceReader.from_section(Evidence(column="found"), ["."], tmp_path)
    for value, shown in (
        (["Rome is old.", ["Oslo", 7], None], "Rome is old.\nOslo\n7"),
        ({"town": "Z\u00fcrich"}, '{"town": "Z\u00fcrich"}'),
    ):
        trace = Rollout(Prompt("a", {"prompt": "Where?", "found": value}, "", (1,)), 0, (), "", "stop", 0)
        (informed,) = reader.inform([trace])
        assert informed.prompt.row["prompt"][0]["content"] == f"Evidence:\n{shown}\n\nWhere?"


def test_evidence_of_a_column_in_a_generation(tmp_path: Path) -> None:
    """A judge that rewards only evidence: every step gets 1 with it, and without it only its count."""
    rows = [{"prompt": f"{n}", "hint": f"hint {n}"} for n in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "e.py").write_text(EVIDENCE)
    search = {"beam": 1, "branch": 2, "step_tokens": 4, "max_steps": 3, "ends": ["\n"], "scoring": {"workers": 1},
              "rewards": [{"use": "e.py:informed"}]}  # fmt: skip
    recipe: dict[str, Any] = {
        "stage": "generate", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"},
        "sampling": {"max_new_tokens": 24},
    }  # fmt: skip

    def run(name: str, evidence: Any) -> list[dict[str, Any]]:
        loaded = load_dict({**recipe, "search": {**search, "evidence": evidence}}, base_dir=tmp_path, where="test")
        with RunDirectory.open(tmp_path / name, name="g", text="", resolved=loaded.resolved) as directory:
            generate.run(loaded.recipe, directory)
        return read_rows(tmp_path / name / "completions.jsonl")

    for record in run("always", {"column": "hint"}):
        assert record["search"]["search/reward"] >= record["search"]["search/steps"]
        assert record["prompt"].count("Evidence") == 0, "the policy reads none"
    with pytest.raises(DataError, match="no row has a column `hnt`"):
        run("wrong", {"column": "hnt", "rewards": [{"use": "e.py:unsure"}]})
    with pytest.raises(RecipeError, match="either `corpus` or `column`"):
        run("none", {})


def test_step_requests_the_remaining_tokens(monkeypatch):
    """Prompt and max_new_tokens are the window with which the engine was started."""
    asked = []
    generate = Steps.generate

    def measured(self, prompts, *args, **keys):
        asked.extend(zip((len(p.ids) for p in prompts), keys["limits"], strict=True))
        return generate(self, prompts, *args, **keys)

    monkeypatch.setattr(Steps, "generate", measured)
    run_search(last_digit, most=5, step_tokens=4)
    start = len(prompt_of("q").ids)
    assert asked[0] == (start, 4) and {new for _, new in asked} == {4, 3, 1}
    assert all(length + new <= start + 5 for length, new in asked)


def test_prompts_do_not_wait_for_each_other_with_a_concurrent_engine():
    """The second prompt's first step comes when the first answer is complete.

    The results equal a batch's, and the judge always gets the traces of one prompt, in the caller's thread.
    """
    judged: list[tuple[set[str], bool]] = []
    ended = threading.Event()

    def judge(traces):
        judged.append(({t.prompt.uid for t in traces}, threading.current_thread() is threading.main_thread()))
        if all(t.text.endswith("!") for t in traces):
            ended.set()
        return last_digit(traces)

    def script(request: Request, sample: int) -> str:
        written = TOKENIZER.decode(list(request.ids)).count(".")
        return f"{sample}!" if written == 2 else f"{sample}."

    async def before_token(request: Request, *_: int) -> None:
        while request.number >= 2 and not ended.is_set():
            await asyncio.sleep(0.001)

    class ConcurrentSteps(ConcurrentScriptedEngine):
        async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
            found = await super().complete(request, sampling)
            texts = [self.script(request, sample) for sample in range(request.n)]
            return [
                Completion(c.ids[:-1] if text.endswith(".") and c.finish == "stop" else c.ids, None, "stop")
                for c, text in zip(found, texts, strict=True)
            ]

    def found(engine: Any) -> list[tuple[Any, ...]]:
        section = Search(beam=2, branch=3, ends=["."], rewards=[Reward(use="a.b")])
        sampling = Sampling(max_new_tokens=40)
        search = SearchEngine(engine, section, judge, TOKENIZER, [TOKENIZER.eos_token_id], sampling)
        rollouts = search.generate([prompt_of("q"), prompt_of("r")], 1, sampling, seed=0, logprobs=False)
        return [(r.prompt.uid, r.ids, r.finish, r.scores) for r in rollouts]

    engine = ConcurrentSteps(script, TOKENIZER, before_token=before_token)
    alone = found(engine)
    assert [uids for uids, _ in judged] == [{"q"}] * 3 + [{"r"}] * 3 and all(main for _, main in judged)
    assert len({(r.seed, r.number) for r in engine.asked}) == len(engine.asked) == 10
    judged.clear()
    assert found(Steps(lambda p, i: script(request_of(p), i), TOKENIZER)) == alone
    assert [uids for uids, _ in judged] == [{"q", "r"}] * 3


def test_another_number_of_steps_than_requested_raises():
    engine = MiscountingEngine(lambda *_: "7.", TOKENIZER)
    section = Search(beam=2, branch=3, ends=["."], rewards=[Reward(use="a.b")])
    sampling = Sampling(max_new_tokens=40)
    search = SearchEngine(engine, section, last_digit, TOKENIZER, [TOKENIZER.eos_token_id], sampling)
    for engine.count in (0, 2):
        number = 3 * engine.count
        with pytest.raises(EngineError, match=rf"^the engine returned {number} of 3 completions of prompt q$"):
            search.generate([prompt_of("q")], 1, sampling, seed=0, logprobs=False)


def request_of(prompt: Prompt) -> Request:
    return Request(0, prompt.ids, 3, 0, 40, False)
