"""Multi-turn rollouts: tokens as sampled, masked replies, limits, and closed environments."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, ToolError
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.tool_sections import Tool
from posttrain.rollout.engine import Completion, as_rollouts
from posttrain.rollout.template import TurnSeparator, check_template, rewrites
from posttrain.rollout.turns import TurnEngine
from posttrain.tools.calls import Caller
from posttrain.tools.environments import Environments, Reply, Tools
from posttrain.tools.load import load_tools
from posttrain.train.collate import rollout_batch, sequences_of
from posttrain.train.turn_fields import turn_of_each

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ScriptedEngine

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def prompt(tokenizer: Any, text: str = "6*7", uid: str = "a") -> Prompt:
    rendered = f"<bos><|user|>{text}<|assistant|>"
    return Prompt(uid, {"prompt": text}, rendered, tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"]))


def turns_so_far(p: Prompt, tokenizer: Any) -> int:
    return tokenizer.decode(list(p.ids)).count("<|assistant|>") - 1


class Echo:
    """Environment that answers every turn with a text of its own and ends at `stop`."""

    def __init__(self, text: str = "go on", stop: int = 3) -> None:
        self.text, self.stop = text, stop

    def episode(self, number: int) -> EchoEpisode:
        return EchoEpisode(self, number)

    def close(self) -> None: ...


class EchoEpisode:
    def __init__(self, world: Echo, number: int) -> None:
        self.world, self.number, self.seen = world, number, 0

    async def begin(self, row: Any) -> None: ...

    async def value(self) -> None: ...

    async def returns(self) -> dict[str, float]:
        return {}

    async def reply(self, turn: str) -> Reply:
        del turn
        self.seen += 1
        if self.seen >= self.world.stop:
            return Reply(ended="done")
        return Reply(({"role": "tool", "content": self.world.text},))

    async def score(self) -> None: ...

    async def close(self) -> None: ...


class Awkward(ScriptedEngine):
    """Engine that samples token sequences no tokenizer would make of their text, and records its prompts."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__({}, tokenizer)
        self.shown: list[tuple[int, ...]] = []
        self.given: list[tuple[int, ...]] = []

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, **more: Any) -> list[Rollout]:
        del sampling
        numbers = range(len(prompts)) if more.get("share") is None else more["share"]
        completions = []
        for number in numbers:
            for i in range(n):
                ids = prompts[number].ids
                draw = random.Random(f"{ids} {number} {i}")
                sampled = (draw.choice(self.pieces) for _ in range(draw.randint(4, 10)))
                made = (*sampled, self.tokenizer.eos_token_id)
                self.shown.append(ids)
                self.given.append(made)
                completions.append(Completion(made, tuple(-0.1 * k for k in range(len(made))), "stop"))
        return as_rollouts(
            prompts, n, completions, self.tokenizer, first_group=more.get("first_group", 0), version=0,
            share=more.get("share"),
        )  # fmt: skip


@pytest.fixture(scope="module")
def merging() -> Any:
    """A byte-pair tokenizer in which `ab`, `abc` and blanks are tokens, and texts whose letters it would merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<u>", "<a>", "<t>", *"abcgon ", "ab", "abc", "go", "  "]
    core = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[("a", "b"), ("ab", "c"), ("g", "o"), (" ", " ")],
            fuse_unk=False,
        )
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in words[:4]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'user': '<u>', 'assistant': '<a>', 'tool': '<t>'}[m.role] + m.content }}"
        "{% if m.role == 'assistant' %}<eos> {% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    return tokenizer


def test_rollouts_contain_exactly_the_sampled_tokens(merging: Any) -> None:
    """`a b` and `ab` have the same text: only ids show whether a turn was tokenized again from text. Each turn
    continues exactly prompt + all earlier tokens; the trained tokens are exactly the sampled ones, with their
    log-probs."""
    engine = Awkward(merging)
    engine.pieces = [merging.convert_tokens_to_ids(w) for w in ("a", "b", "c", "ab", "abc", " ", "  ", "g", "o")]
    ids = tuple(merging("<u>abc<a>", add_special_tokens=False)["input_ids"])
    prompts = [Prompt(str(n), {"prompt": "abc"}, "", ids) for n in range(250)]
    found = TurnEngine(engine, Echo("go  on", 4), merging, [0]).generate(
        prompts, 4, Sampling(max_new_tokens=400, max_turns=9), seed=1
    )
    assert len(found) == 1000
    assert sum(map(len, engine.given)) == sum(sum(r.loss_mask) for r in found)
    odd = 0
    reply = tuple(merging(" <t>go  on<a>", add_special_tokens=False)["input_ids"])
    shown = set(engine.shown)
    for r in found:
        assert [s.kind for s in r.segments] == ["model", "tool"] * 3 + ["model"]
        before = ids
        for segment in r.segments:
            if segment.kind == "tool":
                assert segment.ids == reply
            else:
                assert before in shown  # the engine got exactly these tokens
                assert segment.logps == tuple(-0.1 * k for k in range(len(segment.ids)))
                text = merging.decode(list(segment.ids))
                odd += tuple(merging(text, add_special_tokens=False)["input_ids"]) != segment.ids
            before = before + segment.ids
    assert odd > 500  # turns that the tokenizer would have tokenized differently
    sequences = sequences_of(found)
    batch = rollout_batch(found, needs=("turn_ids",))
    for n, r in enumerate(found):
        assert tuple(sequences.ids[n]) == ids + r.ids
        assert [i for i, m in zip(r.ids, batch.mask[n].tolist(), strict=False) if m] == [
            i for s in r.segments if s.kind == "model" for i in s.ids
        ]
        assert batch.turn_ids[n, : len(r.ids)].tolist() == turn_of_each(r).tolist()


def test_calculator_is_called_and_its_answer_is_masked(tokenizer: Any, tmp_path: Path) -> None:
    def script(p: Prompt, _: int) -> str:
        return CALL if turns_so_far(p, tokenizer) == 0 else "<answer>42</answer>"

    caller = Caller(load_tools([Tool(use="calculator")], tmp_path), 1)
    engine = TurnEngine(ScriptedEngine(script, tokenizer), Tools(caller, "json"), tokenizer, [tokenizer.eos_token_id])
    try:
        (r,) = engine.generate([prompt(tokenizer)], 1, Sampling(max_new_tokens=200), seed=0)
    finally:
        engine.close()
    assert r.text == f"{CALL}\n<answer>42</answer>" and r.finish == "stop" and r.ended == "answer"
    assert tokenizer.decode(list(r.segments[1].ids)) == "<|tool|>42<|assistant|>"
    assert not any(r.loss_mask[len(r.segments[0].ids) : len(r.segments[0].ids) + len(r.segments[1].ids)])
    assert (r.turns[0].calls[0].result, r.turns[0].reply, r.turns[1].calls) == ("42", "42", ())
    assert [worker for pool in caller.pools for worker in pool.workers] == []


@pytest.mark.parametrize(
    ("limits", "ended", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_new_tokens": 20}, "tokens", 2),
        ({"turn_tokens": 3}, "tokens", 1),
        ({"rollout_seconds": 1e-9}, "time", 1),
        ({}, "done", 3),
    ],
)
def test_rollouts_end_at_token_and_turn_limits(limits: dict[str, Any], ended: str, turns: int, tokenizer: Any) -> None:
    """Turns of 4 letters and an EOS, replies of 7 tokens: 20 tokens hold one turn, one reply and a second turn."""
    engine = TurnEngine(ScriptedEngine({"a": ["abcd"]}, tokenizer), Echo(), tokenizer, [tokenizer.eos_token_id])
    sampling = Sampling(**{"max_new_tokens": 100, **limits})
    found = engine.generate([prompt(tokenizer)], 2, sampling, seed=0)
    assert [(r.ended, len(r.turns)) for r in found] == [(ended, turns)] * 2
    for r in found:
        assert len(r.ids) <= sampling.max_new_tokens
        assert r.segments[-1].kind == "model"
        assert r.finish == ("stop" if ended == "done" else "length")


def test_long_reply_is_truncated_and_cannot_contain_a_turn(tokenizer: Any) -> None:
    between = TurnSeparator(tokenizer, [tokenizer.eos_token_id])
    eos = tokenizer.eos_token_id
    assert len(between.tokens(eos, [{"role": "tool", "content": "x" * 500}], 10)) == 12
    ids = between.tokens(eos, [{"role": "tool", "content": "a<eos><|assistant|>I"}], 100)
    marks = [tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert marks.count("<|assistant|>") == 1 and marks[-1] == "<|assistant|>" and "<eos>" not in marks
    # a turn ended by a stop string gets the template's end-of-turn tokens
    stopped = between.tokens(tokenizer.convert_tokens_to_ids("</tool_call>"), [{"role": "tool", "content": "4"}], 9)
    assert stopped == (eos, *between.tokens(eos, [{"role": "tool", "content": "4"}], 9))


def test_rollouts_do_not_depend_on_each_other() -> None:
    """The transformers engine samples by row: a share of the prompts gives the same rollouts as all prompts
    together."""
    from posttrain.models.load import load
    from posttrain.recipe.sections import Model
    from posttrain.rollout.hf import TransformersEngine

    loaded = load(Model(path="tiny"), Path.cwd())
    engine = TurnEngine(TransformersEngine(loaded, batch_size=3), Echo(stop=2), loaded.tokenizer, loaded.eos_ids)
    prompts = [prompt(loaded.tokenizer, text, text) for text in ("1+1", "2+22", "3")]
    sampling = Sampling(max_new_tokens=60, turn_tokens=20, stop=list("abcdefghijkmnop"))
    every = engine.generate(prompts, 3, sampling, seed=5)
    part = engine.generate(prompts, 3, sampling, seed=5, share=[1])
    assert any(len(r.turns) > 1 for r in every[3:6])
    assert [(r.ids, r.group) for r in part] == [(r.ids, r.group) for r in every[3:6]]


class Guess:
    """An environment won by answering `4`; `made` and `closed` count instances."""

    made = closed = 0

    def __init__(self, broken: str = "") -> None:
        self.broken, self.right = broken, False
        type(self).made += 1

    def reset(self, row: Any) -> None:
        assert row["prompt"] == "2+2"
        if self.broken == "reset":
            raise OSError("no room")

    def step(self, text: str) -> tuple[str, bool, float]:
        if self.broken == "step":
            raise OSError("lost")
        if self.broken == "hang":
            import time

            time.sleep(1.0)
        if self.broken == "interrupt":
            raise KeyboardInterrupt
        self.right = "4" in text
        return "no", self.right, float(self.right)

    def score(self) -> float:
        if self.broken == "score":
            raise OSError("lost")
        return float(self.right)

    def close(self) -> None:
        type(self).closed += 1
        if self.broken == "close":
            raise OSError("stuck")


@pytest.mark.parametrize(
    ("broken", "ended", "score"),
    [
        ("", "done", 1.0),
        ("close", "done", 1.0),
        ("score", "done", None),
        ("step", "error", None),
        ("hang", "time", None),
        ("reset", ToolError, None),
        ("interrupt", KeyboardInterrupt, None),
    ],
)
def test_environments_are_always_closed(broken: str, ended: Any, score: float | None, tokenizer: Any) -> None:
    Guess.made = Guess.closed = 0
    world = Environments(lambda: Guess(broken), 3, 0.2 if broken == "hang" else 20.0)
    script = ScriptedEngine(lambda p, _: "3" if turns_so_far(p, tokenizer) == 0 else "4", tokenizer)
    engine = TurnEngine(script, world, tokenizer, [tokenizer.eos_token_id])
    prompts = [prompt(tokenizer, "2+2", str(n)) for n in range(3)]
    if isinstance(ended, type):
        with pytest.raises(ended):
            engine.generate(prompts, 1, Sampling(max_new_tokens=50), seed=0)
        assert 1 <= Guess.closed == Guess.made  # other rollouts may not have started when one fails
    else:
        found = engine.generate(prompts, 1, Sampling(max_new_tokens=50), seed=0)
        assert {(r.ended, r.world_score) for r in found} == {(ended, score)}
        assert Guess.closed == 3
        if not broken:
            assert [t.reward for t in found[0].turns] == [0.0, 1.0]
            rewards = rollout_batch(found, needs=("token_rewards",)).token_rewards
            assert rewards[0].nonzero()[:, 0].tolist() == [len(found[0].ids) - 1]
    engine.close()


THOUGHTLESS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UPPER = THOUGHTLESS.replace("m.content.split('</think>')[-1]", "m.content | upper")


def test_templates_that_rewrite_earlier_turns_raise() -> None:
    tokenizer = build_tokenizer()
    check_template(tokenizer, "tool", "refuse")
    for template, what in ((THOUGHTLESS, "drops or rewrites its thought"), (UPPER, "writes it differently")):
        tokenizer.chat_template = template
        assert rewrites(tokenizer, "tool") == what
        with pytest.raises(DataError, match="as_sampled"):
            check_template(tokenizer, "tool", "refuse")
        check_template(tokenizer, "tool", "as_sampled")


def test_template_without_a_tool_role_renders_tool_answers_as_user_messages() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}"
        "{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ids = TurnSeparator(tokenizer, [tokenizer.eos_token_id]).tokens(
        tokenizer.eos_token_id, [{"role": "tool", "content": "4"}], 9
    )
    assert tokenizer.decode(list(ids)) == "<|user|><tool_response>\n4\n</tool_response><|assistant|>"
    assert rewrites(tokenizer, "tool") == ""


def test_multi_token_turn_end_is_not_duplicated() -> None:
    """Cohere 2 closes the answer and then the turn; the model has written both when its turn ends."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|tool|><eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    between = TurnSeparator(tokenizer, [tokenizer.eos_token_id])
    reply = [{"role": "user", "content": "go on"}]
    found = between.tokens(tokenizer.eos_token_id, reply, 100)
    assert tokenizer.decode(list(found)) == "<|user|>go on<|tool|><eos><|assistant|>"


class Measured(ScriptedEngine):
    """Engine that records each request's prompt length and token limit."""

    def __init__(self, scripts: Any, tokenizer: Any) -> None:
        super().__init__(scripts, tokenizer)
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, **more: Any) -> list[Rollout]:
        limits = more.get("limits") or [sampling.max_new_tokens] * len(prompts)
        share = range(len(prompts)) if more.get("share") is None else more["share"]
        self.asked += [(len(prompts[i].ids), limits[i]) for i in share]
        return super().generate(prompts, n, sampling, **more)


@pytest.mark.parametrize("most", [20, 21, 25, 40, 100])
@pytest.mark.parametrize("turn_tokens", [None, 3, 8, 1000])
def test_turn_requests_the_remaining_tokens(most: int, turn_tokens: int | None, tokenizer: Any) -> None:
    """The engine needs room for the prompt and max_new_tokens only once; a last turn with less room than a turn may
    take ends there, with the first tokens of a longer request."""
    engine = Measured({"a": ["abcdefgh"]}, tokenizer)
    turning = TurnEngine(engine, Echo(stop=9), tokenizer, [tokenizer.eos_token_id])
    sampling = Sampling(max_new_tokens=most, max_turns=9, turn_tokens=turn_tokens)
    start = prompt(tokenizer)
    found = turning.generate([start], 2, sampling, seed=0)
    longest = min(turn_tokens or most, most)
    assert engine.asked[0] == (len(start.ids), longest)
    for length, new in engine.asked:
        assert new == min(longest, len(start.ids) + most - length) > 0
    for r in found:
        assert len(r.ids) <= most
        assert r.segments[0].ids[:3] == tuple(tokenizer("abc", add_special_tokens=False)["input_ids"])
