"""Descriptions of the user's rewards, tools and environments, made without importing their scripts into this process.

A script is imported by a worker process with a time limit. A script that exits, hangs or crashes on import therefore
ends only its worker, and the command reports it; what the script prints goes to stderr. Components shipped with
posttrain are described in this process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from posttrain.errors import PosttrainError, Problem, RewardError, ToolError, UserError
from posttrain.path_resolution import is_shipped, split_function

if TYPE_CHECKING:
    from posttrain.recipe.section import Names
    from posttrain.verify.load import LoadedReward
    from posttrain.verify.pool import Pool

TIME_LIMIT_VARIABLE = "POSTTRAIN_IMPORT_SECONDS"  # environment variable that overrides the time limit
DEFAULT_TIME_LIMIT = 30.0
Kind = Literal["reward", "tool", "environment", "function", "script"]
Described = dict[str, Any]
_ENDED = "the worker process ended: "  # prefix of `verify.pool`'s result for a call whose worker has died


@dataclass(frozen=True)
class DescribedReward:
    """A reward as its script describes it.

    reward: without its function and params. names: (path below the section, kind of name, the name) of each param that
    names a model or a file.
    """

    reward: LoadedReward
    names: list[tuple[tuple[str | int, ...], Names, str]]


class Importer:
    """Context manager that owns the worker process. Its methods raise the UserError that an import in this process
    would raise.

    in_pipeline: arguments may name what an earlier stage of the pipeline will make.
    """

    def __init__(self, base_dir: Path | None, *, in_pipeline: bool = False) -> None:
        self.base_dir, self.in_pipeline = base_dir, in_pipeline
        self._pool: Pool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close()

    def reward(self, section: Mapping[str, Any]) -> DescribedReward:
        """Return the reward of a recipe section, as plain values."""
        from posttrain.recipe.section import Names
        from posttrain.verify.load import LoadedReward

        found = self._describe("reward", section, str(section.get("use")))
        facts: dict[str, Any] = found["reward"]
        listed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        reward = LoadedReward(**listed, function=refuse_call)
        names = [(tuple(path), Names(**names), name) for path, names, name in found["names"]]
        return DescribedReward(reward, names)

    def tool(self, section: Mapping[str, Any]) -> str:
        """Return the name of the tool of a recipe section."""
        return str(self._describe("tool", section, str(section.get("use") or ""))["name"])

    def environment(self, section: Mapping[str, Any]) -> None:
        """Check that the environment of a recipe section can be created."""
        self._describe("environment", section, str(section.get("use")))

    def function(self, use: str, what: str) -> None:
        """Check that the function `package.module:name` exists; `what` is the noun for it in errors."""
        self._describe("function", {"use": use, "what": what}, use)

    def script(self, path: Path) -> None:
        """Check that a script can be imported."""
        self._describe("script", {"path": str(path)}, f"{path}:file")

    def _describe(self, kind: Kind, section: Mapping[str, Any], use: str) -> Described:
        """Describe a component: in this process if it is shipped, otherwise in the worker."""
        split = split_function(use)
        asked = {"kind": kind, "section": section, "base_dir": str(self.base_dir or ""), "pipeline": self.in_pipeline}
        request = json.dumps(asked, default=str)
        if split is None or split[0].startswith("posttrain."):
            return _decode_answer(describe(request))
        return _decode_answer(self._in_worker(request, kind, split[0]))

    def _in_worker(self, request: str, kind: Kind, script: str) -> str:
        """Run `describe` in the worker. Raises the kind's error if the import fails, hangs or ends the worker."""
        from posttrain.verify.pool import Pool
        from posttrain.verify.worker import Call, Target

        limit = read_time_limit()
        if self._pool is None:
            target = Target(f"{__name__}:describe", {}, batched=False, is_async=False, limit=limit, text=True)
            self._pool = Pool([target], workers=1)
        error = {"reward": RewardError, "tool": ToolError, "environment": ToolError}.get(kind, UserError)
        result = self._pool.run([Call(0, 0, request, {})])[0]
        if result.kind == "value":
            return str(result.value)
        if result.kind == "timeout":
            raise error(
                f"importing {script} took longer than {limit:g} s",
                hint=f"move slow code into `setup()` or into the function; {TIME_LIMIT_VARIABLE}=300 waits longer",
            )
        message = str(result.value)
        if message.startswith(_ENDED):
            cause = message.removeprefix(_ENDED)
            hint = 'put code that must not run on import under `if __name__ == "__main__":`'
            what = f"importing {script} ended the importing process ({cause})"
            raise error(what, hint=hint if cause.startswith("exit code") else "")
        raise error(f"{script} cannot be imported: {message.strip().splitlines()[-1]}")


def check_script(path: Path) -> None:
    """Raise UserError if a user's script cannot be imported, before this process imports it."""
    if not is_shipped(path):
        with Importer(None) as importer:
            importer.script(path)


def read_time_limit() -> float:
    """Return the time limit for importing a script, in seconds."""
    given = os.environ.get(TIME_LIMIT_VARIABLE, "")
    try:
        return max(0.1, min(float(given), 86_400.0)) if given else DEFAULT_TIME_LIMIT
    except ValueError:
        raise UserError(f"{TIME_LIMIT_VARIABLE} is `{given}`, not a number of seconds") from None


def refuse_call(*_: Any, **__: Any) -> float:
    """Stand in for the function of a reward that was only described; raises AssertionError when called."""
    raise AssertionError("this reward was described, not imported")


def describe(request: str) -> str:
    """In the worker: import what a request names; return the description, or the problems, as JSON."""
    asked = json.loads(request)
    base_dir = Path(asked["base_dir"]) if asked["base_dir"] else None
    try:
        return json.dumps({"found": _DESCRIBERS[asked["kind"]](asked["section"], base_dir, asked["pipeline"])})
    except PosttrainError as error:
        return json.dumps({"error": type(error).__name__, "problems": [asdict(problem) for problem in error.problems]})
    except OSError as error:
        problem = Problem("", f"{error.strerror or error}: {error.filename}")
        return json.dumps({"error": "UserError", "problems": [asdict(problem)]})


def _decode_answer(text: str) -> Described:
    """Return the description from `describe`'s JSON, or raise the error that it holds."""
    from posttrain import errors

    answer = json.loads(text)
    if "found" in answer:
        return dict(answer["found"])
    raised = getattr(errors, answer["error"], UserError)
    raise (raised if issubclass(raised, UserError) and raised is not errors.MissingExtra else UserError).of(
        [Problem(**problem) for problem in answer["problems"]]
    )


def _describe_reward(section: Mapping[str, Any], base_dir: Path | None, in_pipeline: bool) -> Described:
    from posttrain.recipe.reward_sections import Reward
    from posttrain.verify.load import load_reward

    reward = load_reward(Reward.model_validate(section), base_dir, in_pipeline=in_pipeline)
    facts = vars(replace(reward, params={}))
    names: list[tuple[Any, ...]] = []
    if params := section.get("params"):
        from posttrain.recipe import references  # imports all recipe sections: a quarter of the worker's start-up time

        found = references.arguments(reward.function, params, ("params",))
        names = [(path, asdict(mark), name) for path, mark, name in found]
    return {"reward": {key: facts[key] for key in facts if key not in ("function", "params")}, "names": names}


def _describe_tool(section: Mapping[str, Any], base_dir: Path | None, in_pipeline: bool) -> Described:
    from posttrain.recipe.tool_sections import Tool
    from posttrain.tools.load import load_tool

    return {"name": load_tool(Tool.model_validate(section), base_dir, in_pipeline=in_pipeline).name}


def _check_environment(section: Mapping[str, Any], base_dir: Path | None, in_pipeline: bool) -> Described:
    from posttrain.recipe.tool_sections import Environment
    from posttrain.tools.load import load_environment

    load_environment(Environment.model_validate(section), base_dir, in_pipeline=in_pipeline)
    return {}


def _check_function(section: Mapping[str, Any], base_dir: Path | None, _: bool) -> Described:
    from posttrain.registry import load_function

    load_function(section["use"], base_dir, what=section["what"])
    return {}


def _check_script(section: Mapping[str, Any], _: Path | None, __: bool) -> Described:
    from posttrain.registry import load_module

    load_module(Path(section["path"]))
    return {}


_DESCRIBERS = {
    "reward": _describe_reward,
    "tool": _describe_tool,
    "environment": _check_environment,
    "function": _check_function,
    "script": _check_script,
}
