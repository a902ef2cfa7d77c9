"""A language model in the trainer's process that grades answers: `judge.rating` and its like without a server.

    rewards:
      - {use: math.accuracy}
      - {use: judge_model, weight: 0.3, params: {path: Qwen/Qwen3-4B}}

It asks what the judges of `rewards/judge.py` ask and reads replies as they do, with the transformers engine, all rows
of a step in one call. Its memory is taken from the trainer's device (`device: cpu` takes none). For a judge with vLLM,
or one that several runs share, `vllm serve MODEL` and `judge.rating`. torch is imported when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.data.render import render_prompt
from posttrain.errors import RewardError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.section import ModelName, TemplateName
from posttrain.recipe.sections import Data, Model
from posttrain.verify import judging
from posttrain.verify.contract import Score, in_trainer, judge
from posttrain.verify.extract import after_think

if TYPE_CHECKING:
    from posttrain.batch import Prompt

Ask = Literal["rating", "rubric", "versus"]
MAX_CACHED_REPLIES = 50_000  # replies of a model that are kept, so that the same question is not asked twice


@dataclass
class LoadedJudge:
    """A judge, ready. replies: (question, sampling, seed) -> what it said."""

    engine: Any  # posttrain.rollout.hf.TransformersEngine
    replies: dict[tuple[Any, ...], str] = field(default_factory=dict)


_loaded: dict[tuple[str, ...], LoadedJudge] = {}  # (path, base_dir, device, dtype) -> judge, while a scorer is open


def open_judge(
    *, path: str = "", base_dir: str = ".", device: str = "auto", dtype: str = "auto", template: str = "", **_: Any
) -> None:
    """Load the model, and read its template, before the policy is loaded. Raises RewardError, ModelError."""
    if template and "completion" not in judging.fields_of(_read_template(template, base_dir)):
        raise RewardError(f"judge_model: {template} has no {{completion}}: the judge would see no answer")
    _load_judge(path, base_dir, device, dtype)


def CHECK(_: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the recipe's parameters (`verify.load`)."""
    if not params.get("path"):
        yield "needs params: {path: MODEL}, a directory, hub id or GGUF file"
    if params.get("samples", 1) > 1 and params.get("temperature", 0.0) == 0:
        yield "`samples` are all the same at temperature 0: write a temperature, or 1"
    scale = params.get("scale", (0, 10))
    if len(scale) != 2 or not scale[0] < scale[1]:
        yield f"scale {list(scale)} is not [low, high]"


def close_judges() -> None:
    """Let all models go."""
    _loaded.clear()


@judge(timeout_s=900)
@in_trainer(open_judge, close_judges)
def score(
    completions: Sequence[str],
    messages: Sequence[Any],
    answer: Sequence[Any] | None = None,
    rubric: Sequence[Any] | None = None,
    *,
    path: ModelName = "",
    ask: Ask = "rating",
    template: TemplateName = "",
    pattern: str = judging.SCORE,
    scale: Sequence[float] = (0, 10),
    samples: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    thought: bool = False,
    longest: int = 20_000,
    max_tokens: int = 256,
    batch_size: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    base_dir: str = ".",
) -> list[Score]:
    """What the model at `path` says of each completion, 0 to 1; None where its reply cannot be read.

    ask: rating, a grade as a share of `scale`; rubric, the weighted share of the column `rubric` that it sees met;
    versus, is it better than the column `answer`, asked in both orders. template: of a rating, a text file with
    {prompt}, {completion}, {answer}, {low} and {high}, that asks for what `pattern` finds. samples: ratings that are
    averaged, at a temperature. thought: show it the thought too. longest: characters of the answer that it sees.
    max_tokens: of a reply; a question that leaves no room for it has none. batch_size: questions decoded together.
    Logged part: unparsed. A reply is remembered while the run goes on; at a temperature it is drawn from `seed` by its
    place in the call.
    """
    model = _load_judge(path, base_dir, device, dtype)
    shown = completions if thought else [after_think(text) for text in completions]
    absent = [None] * len(completions)
    rows = list(zip(shown, messages, answer or absent, rubric or absent, strict=True))
    text = _read_template(template, base_dir) if template else judging.RATING
    asked = [_build_questions(ask, row, text=text, scale=scale, samples=samples, longest=longest) for row in rows]
    sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens)
    model.engine.batch_size = batch_size
    replies = iter(_ask_judge(model, [question for questions in asked for question in questions], sampling, seed))
    given = [[next(replies) for _ in questions] for questions in asked]
    return [_combine_replies(ask, row, said, pattern, scale) for row, said in zip(rows, given, strict=True)]


def _build_questions(
    ask: Ask, row: Sequence[Any], *, text: str, scale: Sequence[float], samples: int, longest: int
) -> list[tuple[str, int]]:
    """What is asked about a row, each with the number of its sample; nothing where the row has nothing to ask."""
    completion, messages, answer, rubric = row
    task, mine = judging.question(messages), judging.mark_text(completion, longest)
    if ask == "rating":
        fields = {"prompt": task, "completion": mine, "answer": "none" if answer is None else answer}
        fields |= {"low": f"{scale[0]:g}", "high": f"{scale[1]:g}"}
        return [(judging.fill_template(text, fields), number) for number in range(samples)]
    if ask == "rubric":
        criteria = judging.criteria_of(rubric)
        listed = "\n".join(f"{number}. {what}" for number, (what, _) in enumerate(criteria, 1))
        fields = {"prompt": task, "completion": mine, "criteria": listed}
        return [(judging.fill_template(judging.RUBRIC, fields), 0)] if criteria else []
    if not answer or not completion.strip():
        return []
    theirs = judging.mark_text(str(answer), longest)
    orders = ((mine, theirs), (theirs, mine))
    return [(judging.fill_template(judging.PAIR, {"prompt": task, "first": a, "second": b}), 0) for a, b in orders]


def _combine_replies(ask: Ask, row: Sequence[Any], said: Sequence[str], pattern: str, scale: Sequence[float]) -> Score:
    """What the replies about a row come to."""
    if ask == "versus" and row[2] and not row[0].strip():
        return {"reward": 0.0, "unparsed": 0.0}  # nothing is worse than anything, unasked
    if not said:
        return None
    read: list[float | None]
    if ask == "rating":
        read = [judging.read_score(reply, scale, pattern) for reply in said]
    elif ask == "rubric":
        criteria = judging.criteria_of(row[3])
        met = judging.read_checks(said[0], len(criteria))
        total = sum(weight for _, weight in criteria)
        read = [None if met is None else sum(w for (_, w), yes in zip(criteria, met, strict=True) if yes) / total]
    else:
        once, again = map(judging.read_verdict, said)
        read = [once, None if again is None else 1 - again]
    known = [one for one in read if one is not None]
    enough = known and (ask != "versus" or len(known) == 2)
    return {"reward": sum(known) / len(known) if enough else None, "unparsed": 1 - len(known) / len(read)}


def _ask_judge(model: LoadedJudge, questions: Sequence[tuple[str, int]], sampling: Sampling, seed: int) -> list[str]:
    """The judge's reply to each (question, sample); '' for a question without room. Known ones are not asked again."""
    engine, how = model.engine, (sampling.temperature, sampling.max_new_tokens, seed)
    room = engine.window - sampling.max_new_tokens
    found = {asked: model.replies.get((*asked, *how)) for asked in questions}
    new: list[tuple[tuple[str, int], Prompt]] = []
    for number, asked in enumerate(one for one, reply in found.items() if reply is None):
        section = Data(source="asked", chat=bool(engine.tokenizer.chat_template))
        prompt = render_prompt({"uid": str(number), "prompt": asked[0]}, engine.tokenizer, section)
        found[asked] = ""
        if len(prompt.ids) <= room:
            new.append((asked, prompt))
    if new:
        rollouts = engine.generate([prompt for _, prompt in new], 1, sampling, seed=seed, logprobs=False)
        for (asked, _), rollout in zip(new, rollouts, strict=True):
            found[asked] = after_think(rollout.text)
            model.replies[(*asked, *how)] = after_think(rollout.text)
    while len(model.replies) > MAX_CACHED_REPLIES:
        del model.replies[next(iter(model.replies))]
    return [found[asked] or "" for asked in questions]


def _read_template(path: str, base_dir: str) -> str:
    from posttrain.path_resolution import find

    return find(path, Path(base_dir), "judge_model: template", RewardError).read_text(encoding="utf-8")


def _load_judge(path: str, base_dir: str, device: Any, dtype: Any) -> LoadedJudge:
    key = (path, base_dir, device, dtype)
    if key not in _loaded:
        from posttrain.models.load import load
        from posttrain.rollout.hf import TransformersEngine

        loaded = load(Model(path=path, device=device, dtype=dtype), Path(base_dir))
        _loaded[key] = LoadedJudge(TransformersEngine(loaded, batch_size=32))
    return _loaded[key]
