"""Loading of reward scripts: find them by name or path and match their signatures with the data before any model loads.

A reward is any callable `f(completion, ...)`: a function, partial, callable object or coroutine function. Its other
arguments are resolved in this order: the recipe's `params`; built-ins (see `BUILT_INS`); parameters (keyword-only with
a default); data columns (optional if they have a default). Scripts are loaded under a private module name and their
folder never enters sys.path, so a script may be called `math.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from posttrain.errors import Problem, RewardError, UserError, did_you_mean, nearest
from posttrain.path_resolution import candidate_paths, find, known_files, split_function
from posttrain.recipe.reward_sections import Reward
from posttrain.registry import (
    awaits_stage,
    explain_type_mismatch,
    format_value,
    load_function,
    load_module,
    resolve_annotations,
    resolve_paths,
)
from posttrain.verify import trl_form
from posttrain.verify.kwargs_read import keys_read
from posttrain.verify.reward_classes import make_callable

# Built-in arguments of a reward:
#
# prompt: text as the model saw it. messages: the row's messages, or its prompt as one user message; with tools or an
# environment the whole conversation. finish_reason: stop | length. truncated: finish_reason is length. token_count:
# number of tokens the model generated. step: training step. correct: verdict of the correctness component (True, False
# or None). prefilled_think: the prompt already opens the thought. token_ids: tokens the model generated, in all its
# turns. token_ends: character offset in the completion where each token ends ([] outside training). tool_calls: for a
# rollout with tools, [{name, arguments, result, kind, turn}], else None. turns: number of model turns, else 1.
# world_score: result of the environment's `score`. parts: texts of the model's turns; for a single turn its steps
# (`scoring.split`). turn_rewards: rewards of the environment, one per turn (None if its step gave none), else [].
# transcript: list of `transcript.Message` (role, text, name, kind); for a single turn the prompt and the completion.
# workflow: all calls of a rollout by role (`rollout.workflow`) as `workflow.Workflow`; for a plain completion one call
# with role "".
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

# Column name -> names that other data sets use for the column, most likely first.
_GOLD = ("solution", "ground_truth", "final_answer", "output", "response", "target", "gold", "label", "reference")
COLUMN_ALIASES = {
    "answer": _GOLD,
    "solution": ("answer", *_GOLD),
    "ground_truth": ("answer", *_GOLD),
    "question": ("prompt",),
}

# Names of a first argument that show that it is not meant to be the completion.
_NO_COMPLETION = {*BUILT_INS, "answer", "ground_truth", "question"}

# Rewards that are models; they run in the trainer's process.
MODEL_REWARDS = {
    "reward_model": "posttrain.evaluate.model_reward:score",
    "judge_model": "posttrain.evaluate.model_judge:score",
    "implicit_reward": "posttrain.evaluate.implicit_reward:score",
}


@dataclass(frozen=True)
class LoadedReward:
    """Reward function and what a call of it needs.

    target: `file.py:name` (absolute) or `module:name`, to load the function again in a worker.
    columns: columns the data must have; optional_columns: columns it may have.
    all_columns: the function takes `**kwargs` and receives every column.
    batched: the function has the form `f(completions, ...) -> list`.
    batch_size: rows per call; 1 unless the function is marked `@batched`, so that a returned list is never broadcast
    over rows; 0 = all rows.
    judge_timeout_s: time limit of a function marked `@judge`, else None.
    per_turn: the function is marked `@per_turn` and returns a list with one number for each of `parts`.
    in_trainer: the function runs in this process (`contract.in_trainer`), not in a worker.
    names_gold: the function takes `**kwargs`, and its code names a column of gold answers.
    trl_form: the function has the form `f(completions, ...) -> list` and is not marked `@batched` (`trl_form.py`).
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
        """Whether the reward can recognize a correct answer.

        It must read the data, not be a judge (which only has an opinion), and not read the calls of a workflow (such a
        reward cannot score a completion alone).
        """
        return self.reads_data and not self.is_judge and not self.reads_workflow

    @property
    def reads_workflow(self) -> bool:
        """Whether the reward reads the calls of a workflow."""
        return "workflow" in self.built_ins

    @property
    def is_judge(self) -> bool:
        """Whether the reward asks a model, which can be manipulated by the completion."""
        return self.judge_timeout_s is not None

    def limit(self, section: Reward) -> float:
        """Return the time limit of a call in seconds: the recipe's, else the judge's, else CALL_SECONDS."""
        return section.timeout_s or self.judge_timeout_s or CALL_SECONDS

    @property
    def reads_data(self) -> bool:
        """Whether the reward reads a data column by name.

        A reward that does not, or a model, cannot know the gold answer.
        """
        return bool(self.columns or self.optional_columns or self.names_gold) and not self.in_trainer


def load_reward(section: Reward, base_dir: Path | None, *, in_pipeline: bool = False) -> LoadedReward:
    """Load the function that `section.use` names and check `section.params`. Raises RewardError.

    in_pipeline: the params may name what an earlier stage will make.
    """
    target = locate(section.use, base_dir)
    function = _load(target, base_dir)
    params = resolve_paths(function, section.params, base_dir, f"reward {target}", RewardError, in_pipeline=in_pipeline)
    name = section.name or (section.use if section.use in MODEL_REWARDS else target.rpartition(":")[2])
    reward = describe(function, target, params, name)
    if not (in_pipeline and awaits_stage(params)):
        _run_script_check(reward)
    if not reward.in_trainer or "base_dir" not in inspect.signature(function).parameters:
        return reward
    return dataclasses.replace(reward, params={"base_dir": str(base_dir or Path.cwd()), **reward.params})


def _run_script_check(reward: LoadedReward) -> None:
    """Raise RewardError with the problems that the script's own `CHECK(function, params) -> sentences` finds."""
    file, _, name = reward.target.rpartition(":")
    module = load_script(Path(file)) if file.endswith(".py") else vars(sys.modules[file])
    check = module.get("CHECK")
    if callable(check) and (problems := list(check(name, reward.params))):
        raise RewardError.of([Problem(f"reward {reward.name}", what) for what in problems])


def locate(use: str, base_dir: Path | None) -> str:
    """Resolve the `use` of a reward to `absolute/file.py:name` or `module:name`.

    use: `math.accuracy` (shipped), `reward_model`, `file.py:name` or `module:name`.
    """
    if use in MODEL_REWARDS:
        return MODEL_REWARDS[use]
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
    own = dot and next((path for path in candidate_paths(f"{script}.py", base_dir) if path.is_file()), None)
    near = f"./{script}.py:{name}" if own else _nearest_shipped(script, name, files)
    raise RewardError(
        f"unknown reward: {use}",
        allowed=f"shipped scripts: {', '.join(sorted(files))}, as script.function; {', '.join(MODEL_REWARDS)}; or "
        "path/file.py:function",
        hint=f"did you mean `{near}`?" if near else "",
    )


def _nearest_shipped(script: str, name: str, files: Mapping[str, Path]) -> str | None:
    """Return the shipped reward most likely meant, or None.

    Prefers a function of a script with a similar name over a function with a similar name in any script.
    """
    if not script:
        return nearest(name, [*MODEL_REWARDS, *files])
    for path in (files[name] for name in [nearest(script, files)] if name):
        if found := nearest(name, _function_names(path)):
            return f"{path.stem}.{found}"
    functions = {function: f"{path.stem}.{function}" for path in files.values() for function in _function_names(path)}
    begins = next((function for function in functions if len(name) > 2 and function.startswith(name)), None)
    found = nearest(name, functions, alike=0.8) or begins
    return functions[found] if found else None


def _function_names(path: Path) -> list[str]:
    """Return the names of the reward functions in a shipped script, found in its source text."""
    return re.findall(r"^(?:async )?def ([a-z]\w*)\(\s*completions?\b", path.read_text(encoding="utf-8"), re.MULTILINE)


def shipped_function(use: str) -> Callable[..., Any]:
    """Return the function of a shipped reward, e.g. `length.cosine`."""
    return _load(_locate_shipped(use, None), None)


def describe(function: Callable[..., Any], target: str, params: dict[str, Any], name: str) -> LoadedReward:
    """Describe a callable by its signature. Raises RewardError if it cannot be a reward or `params` do not fit it."""
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
        if (first := arguments[0].name) in _NO_COMPLETION or "prompt" in first:
            raise RewardError(
                f"reward {target}{signature}: its first argument gets the completion, and is called `{first}`",
                allowed="the first argument is the completion; the others are columns of the data, or of the rollout:"
                f" {', '.join(BUILT_INS)}",
                hint="write the completion first: "
                f"(completion, {', '.join(a.name for a in arguments if a.name != 'completion')})",
            )
        arguments = arguments[1:]
    groups = _sort_arguments(
        [a for a in arguments if a.name not in ("completions", "prompts") or not batched], params, batched
    )
    if rest_name := next((a.name for a in arguments if a.kind is inspect.Parameter.VAR_KEYWORD), ""):
        known = {*(a.name for a in arguments), *params, *BUILT_INS, *trl_form.BUILT_INS, "prompts", "completions"}
        groups["columns"] += [column for column in keys_read(function, rest_name) if column not in known]
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
        names_gold=rest and trl_form.names_gold(_code_object(function)),
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
    """Instantiate a reward class.

    Raises RewardError if the class cannot be instantiated or its instances cannot be called.
    """
    if inspect.isclass(function) and "__call__" not in dir(function):
        raise RewardError(f"reward {target} is a class without `__call__`", hint="def __call__(self, completion, ...)")
    try:
        return make_callable(function, params)
    except Exception as cause:
        what = f"reward {target} cannot be instantiated: {type(cause).__name__}: {cause}"
        raise RewardError(what, hint="its arguments are the recipe's `params`") from cause


def _code_object(function: Any) -> CodeType | None:
    """Return the code object of a function, a partial or a callable object."""
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
    hints = resolve_annotations(function)
    for key in groups["fixed"]:
        if message := explain_type_mismatch(hints.get(key), params[key]):
            got = "" if "no key of this section" in message else f", got {format_value(params[key])}"
            problems.append(Problem(f"reward {target}", f"parameter `{key}`: {message}{got}"))
    if problems:
        raise RewardError.of(problems)


def check_columns(rewards: Iterable[LoadedReward], known_columns: Iterable[str], key: str = "data") -> None:
    """Raise RewardError if a reward reads a column that the data lacks; lists all missing columns.

    key: recipe key of the data.
    """
    known = sorted(set(known_columns))
    problems = []
    for reward in rewards:
        for column in reward.columns:
            if column not in known:
                near = nearest(column, known) or next(
                    (name for name in COLUMN_ALIASES.get(column, ()) if name in known), None
                )
                problems.append(
                    Problem(
                        f"reward {reward.name}",
                        f"{'the data' if key == 'data' else key} has no column `{column}`",
                        f"columns: {', '.join(known)}; always available: {', '.join(BUILT_INS)}",
                        "this is verl's signature; add to the file and use: def score(completion, answer): return "
                        f'{reward.name}("", completion, answer)'
                        if column == "solution_str"
                        else f"did you mean `{near}`? map it: {key}.columns: {{{column}: {near}}}"
                        if near
                        else f"say which column holds it: {key}.columns: {{{column}: COLUMN}}"
                        if column in (*COLUMN_ALIASES, *_GOLD)
                        else f"if `{column}` is a setting, write it under params",
                    )
                )
    if problems:
        raise RewardError.of(problems)


def first_argument_is_completion(function: Any) -> bool:
    """Return whether `function` looks like a reward, to which the list form of EXAMPLES applies."""
    if not callable(function) or inspect.isclass(function):
        return False
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in ("completion", "completions", "prompts")


def load_script(path: Path) -> dict[str, Any]:
    """Return the module-level names of the script at `path`. Raises RewardError if it cannot be imported."""
    try:
        return vars(load_module(path))
    except UserError as error:
        raise RewardError(error.problems[0].what) from error


def _load(target: str, base_dir: Path | None) -> Callable[..., Any]:
    file = target.rpartition(":")[0]
    if file.endswith(".py"):
        load_script(Path(file))
    return load_function(target, base_dir, what="reward", error=RewardError)
