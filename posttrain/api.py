"""Python interface: `import posttrain as pt; run = pt.rl("recipe.yaml", optim={"lr": 1e-6}); run.metrics`.

Each function runs one stage in this process, like its command, and returns the `Run`. Libraries such as torch are
imported when a stage begins. Mistakes raise the errors of `posttrain.errors`; nothing exits the process.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import terminal
from posttrain.errors import MissingExtra, PosttrainError, Problem, UserError, did_you_mean, join_problems

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded


class Rows(list[dict[str, Any]]):
    """Rows of a run: a list of dicts. `rows["reward"]` is a column, `frame` a DataFrame of all columns.

    A column has None for rows that lack it; a column that no row has raises KeyError with the nearest name.
    """

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if self and not any(key in row for row in self):
            hint = did_you_mean(key, self.columns) or f"there are {', '.join(self.columns)}"
            raise KeyError(f"no row has `{key}`: {hint}")
        return [row.get(key) for row in self]

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of first occurrence."""
        return list(dict.fromkeys(name for row in self for name in row))

    @property
    def frame(self) -> Any:
        """The rows as a pandas DataFrame. Raises MissingExtra without pandas."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingExtra("pandas", "a DataFrame of metrics", "train") from error
        return pandas.DataFrame(list(self), columns=self.columns)

    def _repr_html_(self) -> str:
        """Return a table of the first and last rows for a notebook, formatted by pandas if it is installed."""
        try:
            return str(self.frame.to_html(max_rows=10))
        except MissingExtra:
            return f"<pre>{html.escape(repr(list(self[:5])))}</pre>"


class Run:
    """A run directory of a running or finished run. path: the directory."""

    def __init__(self, path: str | Path) -> None:
        from posttrain.run.atomic_io import read_json

        self.path = Path(path)
        resolved = read_json(self.path / "resolved.json")
        if resolved is None:
            raise UserError(f"{self.path} is not a run directory: it has no resolved.json")
        self.recipe: dict[str, Any] = dict(resolved)  # all resolved values

    @property
    def stage(self) -> str:
        """The stage: `rl`, `sft`, ..."""
        return str(self.recipe.get("stage"))

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped`, `failed` or `killed`."""
        from posttrain.run import status

        return status.read(self.path).state

    @property
    def summary(self) -> dict[str, Any] | None:
        """Result of the run; None until it is finished."""
        from posttrain.run.atomic_io import read_json

        found = read_json(self.path / "summary.json")
        return found if found is None else dict(found)

    @property
    def metrics(self) -> Rows:
        """Metrics with one row per step: `run.metrics["reward"]`, `run.metrics.frame`."""
        return self._rows("metrics.jsonl")

    @property
    def samples(self) -> Rows:
        """Generated texts with their scores: samples of a training, or all completions of eval and generate."""
        return self._rows("samples.jsonl") or self._rows("completions.jsonl")

    @property
    def model(self) -> Path | None:
        """Folder of the trained or merged model; None if there is none (yet)."""
        reported = (self.summary or {}).get("model")
        places = [Path(reported)] if isinstance(reported, str) and Path(reported).is_dir() else []
        return next(
            (p for p in [self.path / "final", *places] if p.is_dir() and self.stage not in _STAGES_WITHOUT_MODEL), None
        )

    def _rows(self, name: str) -> Rows:
        from posttrain.run.jsonl import sound_rows

        path = self.path / name
        return Rows(sound_rows(path, stepped=True)[0] if path.is_file() else [])

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.stage}, {self.status})"

    def _repr_html_(self) -> str:
        """Return the report for a notebook, in a sandboxed frame."""
        page = self.path / "report.html"
        head = f"<code>{html.escape(repr(self))}</code>"
        if not page.is_file():
            return head
        text = html.escape(page.read_text(encoding="utf-8"), quote=True)
        return f'{head}<iframe sandbox="allow-scripts" srcdoc="{text}" style="width: 100%; height: 40em"></iframe>'


_STAGES_WITHOUT_MODEL = ("eval", "harness", "generate", "pairs")  # stages that produce no model


def load_recipe(recipe: str | Path | Mapping[str, Any], **overrides: Any) -> Loaded:
    """Read, merge and check a recipe and everything it names, without running it.

    recipe: a file, the name of a shipped recipe, or values with their `stage`. overrides: values by key; sections as
    dicts (`optim={"lr": 1e-6}`) or with two underscores for the dot (`optim__lr=1e-6`). Returns the recipe (`.recipe`)
    with all values (`.resolved`) and the origin of each (`.origins`). Raises RecipeError or UserError that lists all
    mistakes.
    """
    with _translate_errors():
        return _load(recipe, None, overrides)


# Pattern of a command-line option in a message -> the argument of the Python function.
_OPTION_TRANSLATIONS = (
    (r"the same command (?:with|and) --resume", "the same call with resume=True"),
    (r"--output ([^\s;,)]+) --resume", r"output='\1', resume=True"),
    (r"--output (NEW_NAME|DIR(?:ECTORY)?)\b", r"output='\1'"),
    (r"another --output\b", "another output"),
    (r"--output\b", "output="),
    (r"--(resume|overwrite)\b", r"\1=True"),
    (r"--allow-changed\b", "allow_changed=True"),
    (r"\(rm -r '?([^')]+)'?\)", r"(shutil.rmtree('\1'))"),
)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Rewrite command-line options in errors as Python arguments: `resume=True` for `--resume`."""
    try:
        yield
    except PosttrainError as error:
        error.problems = tuple(_translate_problem(problem) for problem in error.problems)
        error.args = (join_problems(error.problems),)
        raise


def _translate_problem(problem: Problem) -> Problem:
    """Return a problem with command-line options rewritten as arguments."""

    def translate(text: str) -> str:
        for pattern, ours in _OPTION_TRANSLATIONS:
            text = re.sub(pattern, ours, text)
        return text

    where = (
        f"overrides{problem.where[len('command line') :]}"
        if problem.where.startswith("command line")
        else problem.where
    )
    return Problem(where, translate(problem.what), translate(problem.allowed), translate(problem.hint))


def train(*_: Any, **__: Any) -> Any:
    """Raise UserError that names the training functions: `posttrain.train` is the package of the training loops."""
    raise UserError(
        "posttrain.train is a package; a function of its stage trains with a recipe",
        hint="write pt.sft(recipe), pt.dpo(recipe), pt.reward_model(recipe) or pt.rl(recipe)",
    )


def _make_stage_function(verb: str, about: str) -> Callable[..., Run]:
    """Return the function that runs recipes of one stage."""

    def run(
        recipe: str | Path | Mapping[str, Any] | Loaded,
        output: str | Path | None = None,
        *,
        resume: bool = False,
        allow_changed: bool = False,
        **overrides: Any,
    ) -> Run:
        with _translate_errors():
            return _run(verb, recipe, output, resume, allow_changed, overrides)

    run.__name__ = run.__qualname__ = _FUNCTION_NAMES.get(verb, verb)
    run.__doc__ = f"""{about}

    recipe: a file, the name of a shipped recipe, values as a dict, or what `load_recipe` returned. output: the run
    directory (default: `run.output` of the recipe, or runs/NAME/TIME-HASH). resume: continue the run in `output`;
    allow_changed: even if rewards, tools or data have changed since its start. overrides: values by key, as for
    `load_recipe`. Returns the finished Run. Raises UserError for mistakes, RunError for a failed run, Interrupted after
    Ctrl-C (resume=True continues the run).
    """
    return run


_FUNCTION_NAMES = {"reward-model": "reward_model", "eval": "evaluate"}  # verb -> name of its function

sft = _make_stage_function("sft", "Run supervised fine-tuning.")
dpo = _make_stage_function("dpo", "Run preference optimisation on pairs: DPO and its relatives.")
reward_model = _make_stage_function("reward-model", "Train a reward model on pairs or labels.")
rl = _make_stage_function("rl", "Run reinforcement learning with verifier rewards.")
evaluate = _make_stage_function("eval", "Evaluate a model's accuracy on rows graded by reward scripts.")
harness = _make_stage_function("harness", "Evaluate a model on lm-eval benchmarks.")
generate = _make_stage_function("generate", "Complete the prompts of a recipe.")
merge = _make_stage_function("merge", "Merge models.")


def export(
    model: str | Path,
    to: str = "merged",
    output: str | Path | None = None,
    *,
    dtype: str = "auto",
    upload_as: str | None = None,
    public: bool = False,
    license: str | None = None,
    evaluations: Sequence[str | Path] = (),
    overwrite: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Export a trained model for use elsewhere, like `posttrain export` and with its options.

    to: merged, gguf, ollama or hub:OWNER/NAME. overrides: keys of `model` (model={"revision": "v1"}). Returns the
    contents of export.json, `path` first. Raises UserError for a model that cannot be exported in this form, RunError
    for a failure.
    """
    from posttrain.cli import export as command

    command.check_options(to, upload_as, public)
    plan = command.plan_export(
        str(model),
        to,
        list(_flatten_overrides(overrides)),
        Path(output) if output else None,
        dtype,
        upload_as,
        license,
        [Path(path) for path in evaluations],
        overwrite=overwrite,
    )
    return command.run_export(plan, public=public)


def _run(
    verb: str,
    recipe: Any,
    output: str | Path | None,
    resume: bool,
    allow_changed: bool,
    overrides: Mapping[str, Any],
) -> Run:
    """Run one stage in this process, in a new or resumed run directory."""
    from posttrain.cli import packages
    from posttrain.cli.run_messages import print_notes
    from posttrain.cli.stage import locate_errors
    from posttrain.run import ranks
    from posttrain.run.directory import RunDirectory

    if ranks.world() > 1:
        raise UserError("this process is one of several", hint=f"use `posttrain {verb} RECIPE --gpus N`, or torchrun")
    loaded = _load(recipe, verb, overrides)
    packages.require(loaded)
    print_notes(loaded)
    from posttrain.pipeline import run_stage
    from posttrain.train.launch_fingerprint import named_files

    where = output or loaded.recipe.run.output
    with RunDirectory.open(
        Path(where) if where else None,
        name=loaded.name,
        text=loaded.text or json.dumps(loaded.resolved, indent=2) + "\n",
        resolved=loaded.resolved,
        resume=resume,
        inputs=named_files(loaded),
        allow_changed=allow_changed,
    ) as directory:
        terminal.note(f"run directory: {directory.path}")
        with locate_errors(loaded):
            run_stage(loaded.recipe, directory)
        return Run(directory.path)


def _load(recipe: Any, verb: str | None, overrides: Mapping[str, Any]) -> Loaded:
    """Return the checked recipe; `verb`: the stage it must belong to, None for any."""
    from posttrain.cli import preflight
    from posttrain.recipe import load as loading
    from posttrain.recipe.stages import STAGES

    changes = list(_flatten_overrides(overrides))
    if isinstance(recipe, loading.Loaded):
        if changes:
            raise UserError("the recipe is loaded already", hint="give overrides to load_recipe")
        if verb is not None:
            recipe.require(STAGES[verb])
        return recipe
    if isinstance(recipe, Mapping):
        values = {"name": verb or str(recipe.get("stage", "recipe")), **recipe}
        if verb is not None:
            values.setdefault("stage", verb.replace("-", "_"))
        loaded = loading.load_dict(values, base_dir=Path.cwd(), where="values", overrides=changes)
        preflight.check(loaded)
        if verb is not None:
            loaded.require(STAGES[verb])
        return loaded
    if not isinstance(recipe, str | Path):
        raise UserError(f"a recipe cannot be {type(recipe).__name__}", allowed="a file, a name, or a dict of values")
    return preflight.load(str(recipe), changes, stage=verb)


def _flatten_overrides(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `key.path=VALUE` for each value, as on a command line: `{"optim": {"lr": 1e-6}}` -> `optim.lr=1e-06`."""
    for name, value in values.items():
        key = f"{above}.{name}" if above else name.replace("__", ".")
        if isinstance(value, Mapping) and value:
            yield from _flatten_overrides(value, key)
            continue
        try:
            yield f"{key}={json.dumps(value, default=_to_json_value)}"
        except TypeError as error:
            raise UserError(f"{key}: {error}", allowed="numbers, texts, lists and dicts of them") from None


def _to_json_value(value: Any) -> Any:
    """Return a path as text, and a numpy or torch number as a Python number."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not callable(value):
        return value.item()
    how = ": write it as FILE.py:FUNCTION" if callable(value) else ""
    raise TypeError(f"{type(value).__name__} is not a recipe value{how}")
