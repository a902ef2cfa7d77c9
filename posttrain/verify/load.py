"""Reward scripts: found, loaded by path, and their signatures matched with the data before any model loads.

A reward is any callable `f(completion, ...)`: a function, partial, callable object or coroutine function. Its other
arguments are, in this order of precedence: what the recipe's `params` fix; built-ins (see `BUILT_INS`); parameters
(keyword-only with a default); data columns (optional if they have a default). Scripts are loaded under a private module
name; their folder never enters sys.path, so a script may be called `math.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from posttrain.errors import Problem, RewardError, UserError, did_you_mean, nearest
from posttrain.path_resolution import candidates, find, known_files, split_function
from posttrain.recipe.reward_sections import Reward
from posttrain.registry import load_function, load_module, shown_value, types_of, wrong_type
from posttrain.verify import trl_form
from posttrain.verify.kwargs_read import keys_read
from posttrain.verify.reward_classes import make_callable

# prompt: the text the model saw. messages: the row's, or its prompt as one user message. finish_reason: stop | length.
# truncated: finish_reason is length. token_count: that the model wrote. step: of the training run. correct: what the
# correctness component says, True, False or None. prefilled_think: the prompt already ends in `<think>`. token_ids:
# those that the model wrote, in all its turns. token_ends: the character of the completion at which each token ends ([]
# outside training). tool_calls: of a rollout with tools, [{name, arguments, result, kind, turn}], else None. turns: of
# the model, else 1. messages: with tools or an environment the whole conversation. world_score: what the environment's
# `score` gave. parts: the texts of the model's turns; of a single one its steps (`scoring.split`). turn_rewards: the
# environment's, one a turn (None where its step gave none), else []. transcript: who said what, as a list of
# `transcript.Message` (role, text, name, kind); of a single turn the prompt and the completion. workflow: all calls of
# a rollout by role (`rollout.workflow`), as `workflow.Workflow`; of a plain completion one call of the role "".
BUILT_INS = (
    "prompt",
    "messages",
    "finish_reason",
    "truncated",
    "token_count",
    "step",
    "correct",
    "prefilled_think",
    "token_ids",
    "token_ends",
    "tool_calls",
    "turns",
    "world_score",
    "parts",
    "turn_rewards",
    "transcript",
    "workflow",
)


CALL_SECONDS = 10.0

# Column -> what other data sets call it, the likeliest first.
_GOLD = ("solution", "ground_truth", "final_answer", "output", "response", "target", "gold", "label", "reference")
MEANT = {"answer": _GOLD, "solution": ("answer", *_GOLD), "ground_truth": ("answer", *_GOLD), "question": ("prompt",)}

# Rewards that are models: they run in the trainer's process.
MODELS = {
    "reward_model": "posttrain.evaluate.model_reward:score",
    "judge_model": "posttrain.evaluate.model_judge:score",
    "implicit_reward": "posttrain.evaluate.implicit_reward:score",
}


@dataclass(frozen=True)
class LoadedReward:
    """A reward function and what a call needs.

    target: `file.py:name` (absolute) or `module:name`, for loading it again in a worker. columns must be in the data,
    optional_columns may be. all_columns: it takes `**kwargs`, so it gets every column. batched: it has the form
    `f(completions, ...) -> list`. batch_size: rows of one call; 1, so that a list is never stretched over rows, unless
    the function is marked `@batched`; 0 = all. judge_timeout_s: of a function marked `@judge`, else None. per_turn: it
    is marked `@per_turn` and returns a list with a number for each of `parts`. in_trainer: it runs in this process
    (`contract.in_trainer`), not in a worker. names_gold: it takes `**kwargs`, and its code names a column of right
    answers. trl_form: it has the form `f(completions, ...) -> list` and is not marked `@batched` (`trl_form.py`).
    """

    name: str
    target: str
    function: Callable[..., Any]
    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    built_ins: tuple[str, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    all_columns: bool = False
    batched: bool = False
    is_async: bool = False
    batch_size: int = 1
    judge_timeout_s: float | None = None
    per_turn: bool = False
    in_trainer: bool = False
    names_gold: bool = False
    trl_form: bool = False

    @property
    def knows_gold(self) -> bool:
        """It can tell a right answer: it sees the data, and is no judge, who only has an opinion. One that reads who
        said what in a workflow has nothing to say of a completion alone."""
        return self.reads_data and not self.is_judge and not self.reads_workflow

    @property
    def reads_workflow(self) -> bool:
        """It reads the calls of a workflow."""
        return "workflow" in self.built_ins

    @property
    def is_judge(self) -> bool:
        """It asks a model, and a model can be talked to."""
        return self.judge_timeout_s is not None

    def limit(self, section: Reward) -> float:
        """Seconds that a call may take: what the recipe says, else what the script of a judge says, else 10."""
        return section.timeout_s or self.judge_timeout_s or CALL_SECONDS

    @property
    def reads_data(self) -> bool:
        """It reads a data column by name; one that does not cannot know the gold answer, and neither can a model."""
        return bool(self.columns or self.optional_columns or self.names_gold) and not self.in_trainer


def load_reward(section: Reward, base_dir: Path | None) -> LoadedReward:
    """Load the function that `section.use` names and check `section.params` against it. Raises RewardError."""
    target = locate(section.use, base_dir)
    function = _load(target, base_dir)
    params = _files(function, target, section.params, base_dir)
    name = section.name or (section.use if section.use in MODELS else target.rpartition(":")[2])
    reward = describe(function, target, params, name)
    _own_check(reward)
    if not reward.in_trainer or "base_dir" not in inspect.signature(function).parameters:
        return reward
    return dataclasses.replace(reward, params={"base_dir": str(base_dir or Path.cwd()), **reward.params})


def _files(function: Any, target: str, params: dict[str, Any], base_dir: Path | None) -> dict[str, Any]:
    """The parameters, those annotated as a Path found like a script: beside the recipe, then where the user is."""
    hints = types_of(function) if callable(function) else {}
    return {
        key: find(value, base_dir, f"reward {target}: parameter `{key}`: file", RewardError)
        if isinstance(value, str) and Path in (hints.get(key), *typing.get_args(hints.get(key)))
        else value
        for key, value in params.items()
    }


def _own_check(reward: LoadedReward) -> None:
    """What the script itself finds wrong with its parameters: `CHECK(function, params) -> sentences`."""
    file, _, name = reward.target.rpartition(":")
    module = load_script(Path(file)) if file.endswith(".py") else vars(sys.modules[file])
    check = module.get("CHECK")
    if callable(check) and (found := list(check(name, reward.params))):
        raise RewardError.of([Problem(f"reward {reward.name}", what) for what in found])


def locate(use: str, base_dir: Path | None) -> str:
    """`math.accuracy` (shipped), `reward_model`, `file.py:name` or `module:name` -> `absolute/file.py:name` or
    `module:name`."""
    if use in MODELS:
        return MODELS[use]
    split = split_function(use)
    if split is None:
        return _locate_shipped(use, base_dir)
    left, name = split
    if left.endswith(".py"):
        return f"{find(left, base_dir, 'reward script', RewardError)}:{name}"
    return use


def _locate_shipped(use: str, base_dir: Path | None) -> str:
    files = known_files("rewards", [".py"])
    script, dot, name = use.rpartition(".")
    if dot and script in files:
        return f"{files[script]}:{name}"
    if use.endswith(".py"):
        raise RewardError(f"reward `{use}` names no function", hint=f"write {use}:FUNCTION")
    own = dot and next((path for path in candidates(f"{script}.py", base_dir) if path.is_file()), None)
    near = f"./{script}.py:{name}" if own else _near(script, name, files)
    raise RewardError(
        f"unknown reward: {use}",
        allowed=f"shipped scripts: {', '.join(sorted(files))}, as script.function; {', '.join(MODELS)}; or "
        "path/file.py:function",
        hint=f"did you mean `{near}`?" if near else "",
    )


def _near(script: str, name: str, files: Mapping[str, Path]) -> str | None:
    """The shipped reward that was most likely meant: one of a script of nearly that name, else one of that name."""
    if not script:
        return nearest(name, [*MODELS, *files])
    for path in (files[one] for one in [nearest(script, files)] if one):
        if found := nearest(name, _functions(path)):
            return f"{path.stem}.{found}"
    everywhere = {function: f"{path.stem}.{function}" for path in files.values() for function in _functions(path)}
    begins = next((function for function in everywhere if len(name) > 2 and function.startswith(name)), None)
    found = nearest(name, everywhere, alike=0.8) or begins
    return everywhere[found] if found else None


def _functions(path: Path) -> list[str]:
    """The reward functions of a shipped script, read off its text."""
    return re.findall(r"^(?:async )?def ([a-z]\w*)\(\s*completions?\b", path.read_text(encoding="utf-8"), re.MULTILINE)


def shipped_function(use: str) -> Callable[..., Any]:
    """The function behind a shipped reward's name, e.g. `length.cosine`."""
    return _load(_locate_shipped(use, None), None)


def describe(function: Callable[..., Any], target: str, params: dict[str, Any], name: str) -> LoadedReward:
    """Read a callable's signature. Raises RewardError if it cannot be a reward or `params` do not fit it."""
    if not callable(function):
        raise RewardError(f"reward {target} is {type(function).__name__}, not a function")
    given = params
    function, params = _make_callable(function, target, params)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as cause:
        raise RewardError(f"reward {target}: its signature cannot be read: {cause}") from cause
    arguments = list(signature.parameters.values())
    batched = "completions" in signature.parameters
    if not batched:
        if not arguments or arguments[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise RewardError(f"reward {target}{signature} takes no completion", hint="its first argument is the text")
        arguments = arguments[1:]
    groups = _sort_arguments(
        [a for a in arguments if a.name not in ("completions", "prompts") or not batched], params, batched
    )
    if rest_name := next((a.name for a in arguments if a.kind is inspect.Parameter.VAR_KEYWORD), ""):
        known = {*(a.name for a in arguments), *params, *BUILT_INS, *trl_form.BUILT_INS, "prompts", "completions"}
        groups["columns"] += [one for one in keys_read(function, rest_name) if one not in known]
    rest, in_trl_form = bool(groups["rest"]), batched and not hasattr(function, "posttrain_batch_size")
    _check_params(function, target, params, groups)
    by_turn = hasattr(function, "posttrain_per_turn")
    if by_turn and (batched or "parts" not in groups["built_ins"]):
        raise RewardError(
            f"reward {target} is marked @per_turn and takes no `parts`", hint="def f(completion, parts, ...) -> list"
        )
    built_ins = groups["built_ins"] + (["prompts"] if batched and "prompts" in signature.parameters else [])
    if rest and in_trl_form:
        built_ins += [name for name in ("prompts", *trl_form.BUILT_INS) if name not in built_ins]
    return LoadedReward(
        name=name,
        target=target,
        function=function,
        columns=tuple(groups["columns"]),
        optional_columns=tuple(groups["optional"]),
        built_ins=tuple(built_ins),
        params=dict(given),
        all_columns=rest,
        names_gold=rest and trl_form.names_gold(_code(function)),
        trl_form=in_trl_form,
        batched=batched,
        batch_size=_batch_size(function, target, batched),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        judge_timeout_s=getattr(function, "posttrain_judge_timeout_s", None),
        per_turn=by_turn,
        in_trainer=hasattr(function, "posttrain_in_trainer"),
    )


def _make_callable(
    function: Callable[..., Any], target: str, params: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A class made into its object. Raises RewardError where it cannot be made, or called."""
    if inspect.isclass(function) and "__call__" not in dir(function):
        raise RewardError(f"reward {target} is a class without `__call__`", hint="def __call__(self, completion, ...)")
    try:
        return make_callable(function, params)
    except Exception as cause:
        what = f"reward {target} cannot be made: {type(cause).__name__}: {cause}"
        raise RewardError(what, hint="its arguments are the recipe's `params`") from cause


def _code(function: Any) -> CodeType | None:
    """The code behind a function, a partial or an object that is called."""
    inner = getattr(function, "func", function)
    inner = inner if inspect.isroutine(inner) else type(inner).__call__
    return getattr(inspect.unwrap(inner), "__code__", None)


def _batch_size(function: Callable[..., Any], target: str, batched: bool) -> int:
    size = getattr(function, "posttrain_batch_size", None)
    if size is not None and not batched:
        raise RewardError(f"reward {target} is marked @batched and takes no `completions`")
    return 1 if size is None else int(size)


def _sort_arguments(
    arguments: Sequence[inspect.Parameter], params: dict[str, Any], batched: bool = False
) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {k: [] for k in ("fixed", "built_ins", "params", "optional", "columns", "rest")}
    for argument in arguments:
        has_default = argument.default is not inspect.Parameter.empty
        if argument.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if argument.kind is inspect.Parameter.VAR_KEYWORD:
            kind = "rest"
        elif argument.name in params:
            kind = "fixed"
        elif argument.name in BUILT_INS or (batched and argument.name in trl_form.BUILT_INS):
            kind = "built_ins"
        elif argument.kind is inspect.Parameter.KEYWORD_ONLY and has_default:
            kind = "params"
        else:
            kind = "optional" if has_default else "columns"
        groups[kind].append(argument.name)
    return groups


def _check_params(
    function: Callable[..., Any], target: str, params: dict[str, Any], groups: dict[str, list[str]]
) -> None:
    known = [n for kind in ("fixed", "params", "built_ins", "optional", "columns") for n in groups[kind]]
    problems = []
    for key in params:
        if key not in known and not groups["rest"]:
            hint = did_you_mean(key, known)
            problems.append(
                Problem(f"reward {target}", f"unknown parameter `{key}`", f"known: {', '.join(known)}", hint)
            )
    hints = types_of(function)
    for key in groups["fixed"]:
        if message := wrong_type(hints.get(key), params[key]):
            got = "" if "no key of this section" in message else f", got {shown_value(params[key])}"
            problems.append(Problem(f"reward {target}", f"parameter `{key}`: {message}{got}"))
    if problems:
        raise RewardError.of(problems)


def check_columns(rewards: Iterable[LoadedReward], known_columns: Iterable[str], key: str = "data") -> None:
    """Raise RewardError if a reward reads a column that the data lacks; all missing ones at once. key: of the data."""
    known = sorted(set(known_columns))
    problems = []
    for reward in rewards:
        for column in reward.columns:
            if column not in known:
                near = nearest(column, known) or next((name for name in MEANT.get(column, ()) if name in known), None)
                problems.append(
                    Problem(
                        f"reward {reward.name}",
                        f"{'the data' if key == 'data' else key} has no column `{column}`",
                        f"columns: {', '.join(known)}; always there: {', '.join(BUILT_INS)}",
                        f"did you mean `{near}`? map it: {key}.columns: {{{column}: {near}}}"
                        if near
                        else f"say which column holds it: {key}.columns: {{{column}: COLUMN}}"
                        if column in (*MEANT, *_GOLD)
                        else f"if `{column}` is a setting, write it under params",
                    )
                )
    if problems:
        raise RewardError.of(problems)


def first_argument_is_completion(function: Any) -> bool:
    """Whether `function` looks like a reward: what the list form of EXAMPLES belongs to."""
    if not callable(function) or inspect.isclass(function):
        return False
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in ("completion", "completions", "prompts")


def load_script(path: Path) -> dict[str, Any]:
    """Everything at the top level of the script at `path`. Raises RewardError if it cannot be imported."""
    try:
        return vars(load_module(path))
    except UserError as error:
        raise RewardError(error.problems[0].what) from error


def _load(target: str, base_dir: Path | None) -> Callable[..., Any]:
    file = target.rpartition(":")[0]
    if file.endswith(".py"):
        load_script(Path(file))
    return load_function(target, base_dir, what="reward", error=RewardError)
