"""What another model thinks of an answer: a rating, a rubric, or a comparison with a reference.

rewards:
  - use: judge.rating             # asks about the task, the answer and, if there is one, the column `answer`
    weight: 0.5
    params:
      endpoint:
        url: http://127.0.0.1:8001/v1        # vllm serve MODEL, or any other such server
        model: Qwen/Qwen3-8B
        key_env: JUDGE_API_KEY               # the variable that holds the key; default: none, for OpenAI OPENAI_API_KEY
        budget: 20000                        # requests at most

Replies are kept on disk by everything they depend on, so a resumed or repeated run asks nothing twice. A reply that
cannot be read is no score: the row abstains (`on_none`) and the logged part `unparsed` counts it. A server that stays
away is an error, which stops the run above scoring.max_error_rate. Not for `correct: true`: a judge can be talked to.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.verify import endpoint as server
from posttrain.verify import judging
from posttrain.verify.asking import ask_all, reply_summary
from posttrain.verify.contract import batched, judge
from posttrain.verify.extract import after_think


@judge(timeout_s=900)
async def rating(
    completion: str,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    template: Path | None = None,
    pattern: str = judging.SCORE,
    scale: Sequence[float] = (0, 10),
    samples: int = 1,
    seed: int = 0,
    thought: bool = False,
    longest: int = 20_000,
    concurrency: int = 8,
    **columns: Any,
) -> dict[str, float | None]:
    """The judge's grade as a share of the scale, 0 to 1; None where no reply can be read.

    template: a text file with {prompt}, {completion}, {answer} or other columns, {low} and {high}; it must ask for what
    `pattern` finds (a regular expression with one group, the last match counts). samples: replies that are averaged,
    with seeds from `seed` on. thought: show the judge the thought too. longest: characters of the answer that it sees.
    concurrency: requests at once of each worker. endpoint: url, model, key_env, temperature, max_tokens, request_s,
    retries, budget, cache (a folder; `none`). Logged parts: unparsed, the share of replies that could not be read;
    cached.
    """
    shown = completion if thought else after_think(completion)
    text = _template(template) if template else judging.RATING
    fields = {
        "answer": "none",
        **{name: value for name, value in columns.items() if value is not None},
        "prompt": judging.question(messages),
        "completion": judging.mark_text(shown, longest),
        "low": f"{scale[0]:g}",
        "high": f"{scale[1]:g}",
    }
    replies = await ask_all(endpoint, [judging.fill_template(text, fields)], range(seed, seed + samples), concurrency)
    return reply_summary(replies, [judging.read_score(reply.text, scale, pattern) for reply in replies])


@judge(timeout_s=900)
async def rubric(
    completion: str,
    rubric: Sequence[Any] | str | None,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    seed: int = 0,
    thought: bool = False,
    longest: int = 20_000,
    concurrency: int = 8,
) -> dict[str, float | None] | None:
    """The weighted share of the row's criteria that the judge sees met; None without criteria or a readable reply.

    rubric: texts, or {"text", "weight"}, or lines of one text. All criteria are asked about in one request. The other
    parameters and the logged parts are those of `rating`.
    """
    criteria = judging.criteria_of(rubric)
    if not criteria:
        return None
    shown = completion if thought else after_think(completion)
    fields = {
        "prompt": judging.question(messages),
        "completion": judging.mark_text(shown, longest),
        "criteria": "\n".join(f"{number}. {text}" for number, (text, _) in enumerate(criteria, 1)),
    }
    replies = await ask_all(endpoint, [judging.fill_template(judging.RUBRIC, fields)], [seed], concurrency)
    met = judging.read_checks(replies[0].text, len(criteria))
    total = sum(weight for _, weight in criteria)
    return reply_summary(
        replies, [None if met is None else sum(w for (_, w), yes in zip(criteria, met, strict=True) if yes) / total]
    )


@judge(timeout_s=900)
async def versus(
    completion: str,
    answer: str | None,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    seed: int = 0,
    thought: bool = False,
    longest: int = 20_000,
    concurrency: int = 8,
) -> dict[str, float | None] | None:
    """Is it better than the reference in the column `answer`? 1, 0 or between; None without one or a readable reply.

    Asked twice, with the two in either place, because judges prefer a place; both replies must be readable. Nothing
    is worse than anything, unasked. The other parameters and the logged parts are those of `rating`.
    """
    if not answer:
        return None
    if not completion.strip():
        return {"reward": 0.0, "unparsed": 0.0, "cached": 0.0}
    mine = judging.mark_text(completion if thought else after_think(completion), longest)
    theirs = judging.mark_text(str(answer), longest)
    task = judging.question(messages)
    asked = [
        judging.fill_template(judging.PAIR, {"prompt": task, "first": first, "second": second})
        for first, second in ((mine, theirs), (theirs, mine))
    ]
    replies = await ask_all(endpoint, asked, [seed], concurrency)
    once, again = (judging.read_verdict(reply.text) for reply in replies)
    both = None if once is None or again is None else (once + 1 - again) / 2
    return reply_summary(replies, [once, again]) | {"reward": both}


@judge(timeout_s=3600)
@batched
async def win_rate(
    completions: Sequence[str],
    messages: Sequence[Sequence[Mapping[str, Any]]],
    *,
    endpoint: server.Settings,
    opponents: int | None = None,
    seed: int = 0,
    thought: bool = False,
    longest: int = 20_000,
    concurrency: int = 8,
) -> list[dict[str, float | None]]:
    """How often an answer beats the others of its group, 0 to 1: self-play without a reward model (SPO, 2401.04056).

    Each pair is asked about twice, with the two in either place, because judges prefer a place; a pair without a
    readable reply counts as a tie. Nothing is worse than anything, unasked, and earns 0. opponents: compare each answer
    with the next so many of its group only (default: with all, which is G (G - 1) requests a group of G). Answers to
    one prompt are a group. The other parameters are those of `rating`. Logged parts: unparsed, the share of replies
    about the answer that could not be read; cached.
    """
    shown = [judging.mark_text(text if thought else after_think(text), longest) for text in completions]
    tasks = [judging.question(asked) for asked in messages]
    compared = judging.comparisons(tasks, opponents)
    asked = [(a, b) for a, b in compared if completions[a].strip() and completions[b].strip()]
    texts = [
        judging.fill_template(judging.PAIR, {"prompt": tasks[a], "first": shown[a], "second": shown[b]})
        for a, b in asked
    ]
    replies = dict(zip(asked, await ask_all(endpoint, texts, [seed], concurrency) if texts else [], strict=True))
    verdicts = {
        (a, b): judging.read_verdict(replies[a, b].text)
        if (a, b) in replies
        else judging.blank_preference(completions[a], completions[b])
        for a, b in compared
    }
    wins = judging.win_rates(tasks, verdicts)
    found: list[dict[str, float | None]] = []
    for place, (text, reward) in enumerate(zip(completions, wins, strict=True)):
        mine = [pair for pair in asked if place in pair]
        unread = sum(verdicts[pair] is None for pair in mine) / len(mine) if mine else 0.0
        cached = sum(replies[pair].cached for pair in mine) / len(mine) if mine else 0.0
        found.append({"reward": reward if text.strip() else 0.0, "unparsed": unread, "cached": cached})
    return found


@cache
def _template(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def CHECK(function: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of a judge, told before anything runs."""
    if "endpoint" not in params:
        return ["`endpoint` is missing: write {url: http://HOST:PORT/v1, model: NAME} under params"]
    place = server.Endpoint(**params["endpoint"])
    wrong = [server.problem_of(place)]
    fields = judging.fields_of(_template(params["template"])) if params.get("template") else []
    if params.get("template") and "completion" not in fields:
        wrong.append(f"{params['template']} has no {{completion}}: the judge would see no answer")
    known = {*inspect.signature(globals()[function]).parameters, *fields}
    for name in sorted({*params} - known):
        kept = "; the API key stands in the environment variable that endpoint.key_env names" if "key" in name else ""
        wrong.append(f"unknown parameter `{name}`; known: {', '.join(sorted(known))}{kept}")
    if len(scale := params.get("scale", (0, 10))) != 2 or not scale[0] < scale[1]:
        wrong.append(f"scale {list(scale)} is not [low, high]")
    try:
        if re.compile(params.get("pattern", judging.SCORE)).groups != 1:
            wrong.append("pattern must have one group: the number")
    except re.error as error:
        wrong.append(f"pattern is no regular expression: {error}")
    return [sentence for sentence in wrong if sentence]


_TASK = {"messages": [{"role": "user", "content": "Name a colour of the sky."}]}


def _says(text: str) -> dict[str, Any]:
    return {"endpoint": {"url": f"scripted:{text}", "model": "none"}}


EXAMPLES = {
    "rating": [
        ("Blue.", {**_TASK, "answer": "blue"}, {"reward": 0.9, "unparsed": 0.0}, _says("Right.\nScore: 9")),
        ("Blue.", _TASK, 0.5, _says("**Score:** 2") | {"scale": [1, 3]}),
        ("Green, score: 10!", _TASK, {"reward": None, "unparsed": 1.0}, _says("I cannot say.")),
        ("Green.", _TASK, None, _says("Score: 11")),
        ("", _TASK, 0.0, _says("Nothing there. Score: 0")),
    ],
    "rubric": [
        ("Blue.", {**_TASK, "rubric": ["a colour", "short"]}, 1.0, _says("1: yes\n2: yes")),
        ("Blue", {"rubric": [{"text": "a colour", "weight": 3}, "a full stop"]}, 0.75, _says("1. Yes\n2. No")),
        ("Blue", {"rubric": "a colour\na full stop"}, {"reward": None, "unparsed": 1.0}, _says("1: yes")),
        ("", {"rubric": ["a colour"]}, 0.0, _says("1: no")),
        ("Blue", {"rubric": []}, None, _says("1: yes")),
    ],
    "versus": [
        ("Blue.", {**_TASK, "answer": "Azure."}, 0.5, _says("Verdict: A")),  # whoever comes first: it knows nothing
        ("Blue.", {**_TASK, "answer": "Azure."}, 0.5, _says("Verdict: tie")),
        ("Blue.", {**_TASK, "answer": "Azure."}, {"reward": None, "unparsed": 1.0}, _says("Both are fine.")),
        ("", {"answer": "Azure."}, 0.0, _says("Verdict: A")),
        ("Blue.", {"answer": ""}, None, _says("Verdict: A")),
    ],
    "win_rate": [  # each an only answer of its group
        ("Blue.", _TASK, {"reward": 0.5, "unparsed": 0.0}, _says("Verdict: A")),
        ("", _TASK, 0.0, _says("Verdict: A")),
    ],
}

_ROW = {"prompt": "Name a colour of the sky.", "answer": "blue", "rubric": ["a colour", "short"]}

ROWS = {
    "rating": {"rows": [_ROW], "params": _says("Score: 9")},
    "rubric": {"rows": [_ROW], "params": _says("1: yes\n2: no")},
    "versus": {"rows": [_ROW], "params": _says("Verdict: A")},
    "win_rate": {"rows": [_ROW], "params": _says("Verdict: A"), "correct": "math.accuracy"},
}
