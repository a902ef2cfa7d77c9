"""Command line: verbs that run a recipe, and commands that inspect recipes, data and runs. Heavy imports stay inside
command bodies.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer

from posttrain import __version__, early_interrupt, terminal
from posttrain.cli import (
    browse,
    chat,
    compare_methods,
    completion,
    doctor,
    export,
    generate,
    grid,
    methods,
    plan,
    preflight_run,
    recipe,
    report,
    serve,
    stage,
)
from posttrain.cli.guard import DEBUG, JSON, run_guarded
from posttrain.cli.help import App, Group

# Command groups whose modules are imported only when the group is called: name -> (module that defines `app`, help).
LAZY = {
    "reward": ("posttrain.cli.reward", "Test reward scripts without a GPU."),
    "tool": ("posttrain.cli.tool", "Test tools before a model calls them."),
    "data": ("posttrain.cli.data", "Inspect rows as the model sees them, and audit data before training."),
}

PANELS = {
    "Train": ("sft", "dpo", "reward-model", "rl", "serve", "merge", "run", "sweep"),
    "Data": ("data", "pairs"),
    "Evaluate": ("eval", "harness", "generate", "chat", "browse"),
    "Export": ("export",),
    "Monitor": ("report", "runs", "diff", "track"),
    "Inspect": ("recipe", "plan", "preflight", "methods", "compare-methods", "reward", "tool", "doctor", "completion"),
}


class Root(Group):
    """Top-level command: turns errors into messages and exit codes, and imports `LAZY` groups when they are called."""

    headings = PANELS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load_group(name) or command, rest

    @staticmethod
    def load_group(name: str | None) -> Any:
        """Import the module of a `LAZY` group and return the group; None for any other name."""
        if name not in LAZY:
            return None
        module, about = LAZY[name]
        loaded = typer.main.get_group(importlib.import_module(module).app)
        loaded.name, loaded.help = name, loaded.help or about
        return loaded

    def invoke(self, ctx: Any) -> Any:
        def run() -> Any:
            early_interrupt.raise_on_interrupt()
            return super(Root, self).invoke(ctx)

        ctx.meta[JSON] = "--json" in (*getattr(ctx, "_protected_args", ()), *ctx.args)
        return run_guarded(ctx.meta, run)


app = App(
    cls=Root,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        terminal.say(__version__)
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Post-train reasoning LLMs from YAML recipes: SFT, preference optimization, RL with verifier rewards, merging,
    evaluation.

    Training and evaluation commands take a recipe (a YAML file, or the name of a shipped recipe) and key.path=value
    overrides:

      posttrain rl grpo.yaml optim.lr=1e-6 --output runs/first
    """
    del version
    ctx.meta[DEBUG] = debug


stage.register(app)
grid.register(app)
generate.register(app)
chat.register(app)
export.register(app)
serve.register(app)
plan.register(app)
preflight_run.register(app)
compare_methods.register(app)
browse.register(app)
report.register(app)
app.add_typer(recipe.app, name="recipe", help="List, show, check and copy recipes.")
app.add_typer(methods.app, name="methods", help="List methods, and show their formulas, papers and recipe keys.")
for _name, (_, _about) in LAZY.items():
    app.add_typer(App(), name=_name, help=_about)
doctor.register(app)
completion.register(app)
