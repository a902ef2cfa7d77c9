"""Language model as a judge in the trainer's process: `judge.rating` and similar rewards without a server.

    rewards:
      - {use: math.accuracy}
      - {use: judge_model, weight: 0.3, params: {path: Qwen/Qwen3-4B}}

Asks the questions of the judges in `rewards/judge.py` and reads replies in the same way, with the transformers engine,
all rows of a step in one call. Its memory is taken from the trainer's device (`device: cpu` takes none). For a judge
with vLLM, or one that several runs share, use `vllm serve MODEL` and `judge.rating`. torch is imported when the model
is loaded.
"""

from __future__ import annotations

import functools
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
MAX_CACHED_REPLIES = 50_000  # per model, so that the same question is not asked twice


@dataclass
class LoadedJudge:
    """A loaded judge. replies: cache of (question, sampling, seed) -> reply."""

    engine: Any  # posttrain.rollout.hf.TransformersEngine
    replies: dict[tuple[Any, ...], str] = field(default_factory=dict)


def open_judge(
    *, path: str = "", base_dir: str = ".", device: str = "auto", dtype: str = "auto", template: str = "", **_: Any
) -> None:
    """Load the model, and read its template, before the policy is loaded. Raises RewardError, ModelError."""
    if template and "completion" not in judging.fields_of(_read_template(template, base_dir)):
        raise RewardError(f"judge_model: {template} has no {{completion}}: the judge would see no answer")
    _load_judge(path, base_dir, device, dtype)


def CHECK(_: str, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of the recipe's parameters (`verify.load`)."""
    if not params.get("path"):
        yield "needs params: {path: MODEL}, a directory, hub id or GGUF file"
    if params.get("samples", 1) > 1 and params.get("temperature", 0.0) == 0:
        yield "`samples` are all equal at temperature 0: set a temperature, or samples: 1"
    scale = params.get("scale", (0, 10))
    if len(scale) != 2 or not scale[0] < scale[1]:
        yield f"scale {list(scale)} is not [low, high]"


def close_judges() -> None:
    """Release all models."""
    _load_judge.cache_clear()


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
    """Return the judgment of the model at `path` on each completion, 0 to 1; None if its reply cannot be parsed.

    ask: rating, a grade as a share of `scale`; rubric, the weighted share of the criteria in column `rubric` that are
    met; versus, whether the completion is better than the column `answer`, asked in both orders. template: for a
    rating, a text file with {prompt}, {completion}, {answer}, {low} and {high}, asking for a reply that `pattern`
    matches. samples: number of ratings averaged, at a temperature. thought: also show the thought. longest: characters
    of the answer shown. max_tokens: of a reply; a reply that is cut there counts as unparsed, and a question that
    leaves no room for a reply gets none. batch_size: questions decoded together. Logged part: unparsed. Replies are
    cached during the run; at a temperature a reply is sampled from `seed` and its position in the call.
    """
    model = _load_judge(path, base_dir, device, dtype)
    shown = completions if thought else [after_think(text) for text in completions]
    absent = [None] * len(completions)
    rows = list(zip(shown, messages, answer or absent, rubric or absent, strict=True))
    text = _read_template(template, base_dir) if template else judging.RATING
    questions = [_build_questions(ask, row, text=text, scale=scale, samples=samples, longest=longest) for row in rows]
    sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens)
    model.engine.batch_size = batch_size
    replies = iter(_ask_judge(model, [question for of_row in questions for question in of_row], sampling, seed))
    by_row = [[next(replies) for _ in of_row] for of_row in questions]
    return [_combine_replies(ask, row, given, pattern, scale) for row, given in zip(rows, by_row, strict=True)]


def _build_questions(
    ask: Ask, row: Sequence[Any], *, text: str, scale: Sequence[float], samples: int, longest: int
) -> list[tuple[str, int]]:
    """Return the questions about a row, each with its sample number; none if the row lacks what they need."""
    completion, messages, answer, rubric = row
    task, marked = judging.question(messages), judging.mark_text(completion, longest)
    if ask == "rating":
        fields = {"prompt": task, "completion": marked, "answer": "none" if answer is None else answer}
        fields |= {"low": f"{scale[0]:g}", "high": f"{scale[1]:g}"}
        return [(judging.fill_template(text, fields), number) for number in range(samples)]
    if ask == "rubric":
        criteria = judging.criteria_of(rubric)
        listed = "\n".join(f"{number}. {what}" for number, (what, _) in enumerate(criteria, 1))
        fields = {"prompt": task, "completion": marked, "criteria": listed}
        return [(judging.fill_template(judging.RUBRIC, fields), 0)] if criteria else []
    if not answer or not completion.strip():
        return []
    reference = judging.mark_text(str(answer), longest)
    orders = ((marked, reference), (reference, marked))
    return [(judging.fill_template(judging.PAIR, {"prompt": task, "first": a, "second": b}), 0) for a, b in orders]


def _combine_replies(
    ask: Ask, row: Sequence[Any], replies: Sequence[str], pattern: str, scale: Sequence[float]
) -> Score:
    """Parse the replies about a row and return its score."""
    if ask == "versus" and row[2] and not row[0].strip():
        return {"reward": 0.0, "unparsed": 0.0}  # an empty completion always loses
    if not replies:
        return None
    read: list[float | None]
    if ask == "rating":
        read = [judging.read_score(reply, scale, pattern) for reply in replies]
    elif ask == "rubric":
        criteria = judging.criteria_of(row[3])
        met = judging.read_checks(replies[0], len(criteria))
        total = sum(weight for _, weight in criteria)
        read = [None if met is None else sum(w for (_, w), yes in zip(criteria, met, strict=True) if yes) / total]
    else:
        first, swapped = map(judging.read_verdict, replies)
        read = [first, None if swapped is None else 1 - swapped]
    known = [value for value in read if value is not None]
    enough = known and (ask != "versus" or len(known) == 2)
    return {"reward": sum(known) / len(known) if enough else None, "unparsed": 1 - len(known) / len(read)}


def _ask_judge(model: LoadedJudge, questions: Sequence[tuple[str, int]], sampling: Sampling, seed: int) -> list[str]:
    """Return the judge's reply to each (question, sample), cached; '' for a question without room, or a reply that was
    cut at max_tokens."""
    engine, settings = model.engine, (sampling.temperature, sampling.max_new_tokens, seed)
    room = engine.window - sampling.max_new_tokens
    replies = {asked: model.replies.get((*asked, *settings)) for asked in questions}
    new: list[tuple[tuple[str, int], Prompt]] = []
    for number, asked in enumerate(call for call, reply in replies.items() if reply is None):
        section = Data(source="asked", chat=bool(engine.tokenizer.chat_template))
        prompt = render_prompt({"uid": str(number), "prompt": asked[0]}, engine.tokenizer, section)
        replies[asked] = ""
        if len(prompt.ids) <= room:
            new.append((asked, prompt))
    if new:
        rollouts = engine.generate([prompt for _, prompt in new], 1, sampling, seed=seed, logprobs=False)
        for (asked, _), rollout in zip(new, rollouts, strict=True):
            replies[asked] = "" if rollout.finish == "length" else after_think(rollout.text)
            model.replies[(*asked, *settings)] = replies[asked] or ""
    while len(model.replies) > MAX_CACHED_REPLIES:
        del model.replies[next(iter(model.replies))]
    return [replies[asked] or "" for asked in questions]


def _read_template(path: str, base_dir: str) -> str:
    """Return the text of a template file."""
    from posttrain.path_resolution import find

    return find(path, Path(base_dir), "judge_model: template", RewardError).read_text(encoding="utf-8")


@functools.cache
def _load_judge(path: str, base_dir: str, device: Any, dtype: Any) -> LoadedJudge:
    """Load a judge; cached while a scorer is open."""
    from posttrain.models.load import load
    from posttrain.rollout.hf import TransformersEngine

    loaded = load(Model(path=path, device=device, dtype=dtype), Path(base_dir))
    return LoadedJudge(TransformersEngine(loaded, batch_size=32))
