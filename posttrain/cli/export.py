"""`posttrain export`: a trained model for use elsewhere, with a model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.stage import Json, Overrides
from posttrain.errors import UserError

if TYPE_CHECKING:
    from posttrain.export.run import Plan
    from posttrain.recipe.sections import Model as ModelSection

KINDS = ("merged", "adapter", "gguf", "ollama")
HUB = "hub:"

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run directory, its final/ or a checkpoint, an adapter, or a model.")
]
To = Annotated[
    str,
    typer.Option("--to", metavar="merged|gguf|ollama|hub:OWNER/NAME", help="Export format, or repository on the hub."),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("export")(export)


def export(
    model: Model,
    to: To,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Output directory (default: exports/ in the run directory)."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "q8_0"],
        typer.Option("--dtype", help="Type of the saved weights; auto: as the base model is stored; q8_0: GGUF only."),
    ] = "auto",
    upload_as: Annotated[
        Literal["merged", "adapter", "gguf", "ollama"] | None,
        typer.Option(
            "--as", help="Format to upload (default: adapter if its base model is on the hub, otherwise merged)."
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository on the hub public (default: private).")
    ] = False,
    license: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Licence in the model card (default: the base model's)."),
    ] = None,
    evaluations: Annotated[
        list[Path] | None,
        typer.Option("--eval", metavar="RUN", help="Evaluation run to report in the model card; repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show what would be written; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a trained model with a model card for use elsewhere; the export is loaded again and its logits are
    compared.

    Overrides are keys of `model`: model.chat_template=my.jinja, model.revision=..., model.trust_remote_code=true.
    """
    check_options(to, upload_as, public)
    plan = plan_export(
        model, to, overrides or [], output, dtype, upload_as, license, evaluations or (), overwrite=overwrite
    )
    if dry_run:
        print_preview(plan, public, as_json)
        return
    print_report(run_export(plan, public=public), as_json)


def plan_export(
    model: str,
    to: str,
    overrides: Sequence[str],
    output: Path | None,
    dtype: str,
    upload_as: str | None,
    license: str | None,
    evaluations: Sequence[Path],
    *,
    overwrite: bool,
) -> Plan:
    """Return the plan of an export after all checks that need no model."""
    section = _load_model_section(model, overrides)
    from posttrain.export import card, licenses, run, source
    from posttrain.run.atomic_io import read_json

    if license and (warning := licenses.warn_unknown_license(license)):
        say(f"note: {warning}")
    found = source.find_source(model)
    for path in evaluations:
        stage = (read_json(path / "resolved.json") or {}).get("stage")
        if not (path / "summary.json").is_file() or stage not in (None, "eval", "harness"):
            raise UserError(
                f"--eval: {path} is no finished evaluation", hint="name the run directory of `posttrain eval`"
            )
    repo = to.removeprefix(HUB) if to.startswith(HUB) else ""
    facts = card.collect_facts(found, license=license, evaluations=evaluations)
    where = output or run.default_output(found, f"hub-{repo.replace('/', '-')}" if repo else to)
    run.check_output(where, overwrite=overwrite)
    kind: Any = upload_as if repo else to
    return run.make_plan(found, kind, section, dtype, where, facts, name=repo)


def run_export(plan: Plan, *, public: bool) -> dict[str, Any]:
    """Run the export, and upload it if the plan names a repository on the hub; return the report."""
    from posttrain.export import run, upload

    if not plan.name:
        return run.run(plan)
    upload.check_login()
    report = run.run(plan)
    say(f"uploading {plan.output} to {plan.name}")
    return report | upload.upload(plan.output, plan.name, public=public)


def check_options(to: str, upload_as: str | None, public: bool) -> None:
    """Raise UserError for an unknown target, and for hub options without a hub target."""
    if to.startswith(HUB):
        from posttrain.export import upload

        upload.check_name(to.removeprefix(HUB))
        return
    if to not in KINDS:
        raise UserError(
            f"--to {to} is not known", allowed="merged, gguf, ollama, hub:OWNER/NAME", hint=_suggest_target(to)
        )
    if to == "adapter":
        raise UserError("an adapter is already a folder: copy it", hint="--to merged merges it into its base model")
    for option, given in (("--as", upload_as is not None), ("--public", public)):
        if given:
            raise UserError(f"{option} is for the hub", hint="--to hub:OWNER/NAME")


def _suggest_target(to: str) -> str:
    from posttrain.errors import did_you_mean

    return "the hub is written hub:OWNER/NAME" if "/" in to else did_you_mean(to, ("merged", "gguf", "ollama"))


def _load_model_section(model: str, overrides: Sequence[str]) -> ModelSection:
    """Return the `model` section that loads MODEL, checked like a recipe's: what it names exists, packages are
    installed.
    """
    from posttrain.cli import packages, preflight
    from posttrain.export.source import find_source
    from posttrain.recipe.load import load_dict
    from posttrain.recipe.stages import GenerateRecipe

    for override in overrides:
        if not override.startswith("model."):
            raise UserError(
                f"`{override}` is not a key of the model", allowed="overrides of an export are model.KEY=VALUE"
            )
    values = {  # a generate recipe for the model: one token, from any data
        "stage": "generate",
        "model": {"path": find_source(model).path},
        "data": {"source": "gym:chain_sum"},
        "sampling": {"max_new_tokens": 1},
    }
    loaded = load_dict(values, base_dir=Path.cwd(), where="command line", overrides=list(overrides))
    preflight.check(loaded, without=["data"])
    packages.require(loaded, lambda need: not need[3].startswith("data"))
    return loaded.require(GenerateRecipe).model


def print_preview(plan: Plan, public: bool, as_json: bool) -> None:
    """Print what `--dry-run` shows: which files would be written where, and the model card."""
    from posttrain.cli.show import print_json
    from posttrain.export.card import write_card
    from posttrain.export.run import planned_files

    files, repo = planned_files(plan), plan.name
    if as_json:
        preview = {"source": plan.source.path, "to": plan.kind, "dtype": plan.dtype, "output": str(plan.output)}
        hub = {"repository": repo, "private": not public} if repo else {}
        print_json(
            {**preview, **hub, "files": files, "base": plan.facts.base, "license": plan.facts.license or "unknown"}
        )
        return
    terminal.say(write_card(plan.facts, plan.kind, repo or plan.output.name, [f for f in files if f.endswith(".gguf")]))
    say(f"dry run: {plan.source.path} as {plan.kind} in {plan.dtype} would go to {plan.output}")
    if repo:
        say(f"and to {repo} on the hub ({'public' if public else 'private'}, if it is new)")
    size = f" (weights: about {plan.nbytes / 1e6:.1f} MB)" if plan.nbytes else ""
    say(f"files: {', '.join(files)}{size}; README.md is printed above")


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print the report of a finished export on stdout, as JSON or text."""
    from posttrain.cli.show import print_summary

    shown = report if as_json else {key: value for key, value in report.items() if value is not None}
    print_summary(shown, as_json)
    if report.get("to") == "ollama":
        say(f"next: ollama create NAME -f {report['path']}/Modelfile")
    if report.get("license") == "unknown":
        say("the licence is not known: look up the base model's licence and set it with --license")
