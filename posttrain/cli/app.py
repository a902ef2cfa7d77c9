"""The command line: verbs that run a recipe, and commands that look at things. Heavy imports live in command bodies."""

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

# Command groups of other modules, imported only when they are called: name -> (module that holds `app`, help).
LAZY = {
    "reward": ("posttrain.cli.reward", "Test reward scripts before a GPU is busy."),
    "tool": ("posttrain.cli.tool", "Try tools before a model calls them."),
    "data": ("posttrain.cli.data", "See rows as the model sees them, and audit them."),
}

PANELS = {
    "Train": ("sft", "dpo", "reward-model", "rl", "serve", "merge", "run", "sweep"),
    "Data": ("data", "pairs"),
    "Measure": ("eval", "harness", "generate", "chat", "browse"),
    "Pass on": ("export",),
    "Follow": ("report", "runs", "diff", "track"),
    "Inspect": ("recipe", "plan", "preflight", "methods", "compare-methods", "reward", "tool", "doctor", "completion"),
}


class Root(Group):
    """The top command: errors become messages and exit codes here, and `LAZY` groups are imported when called."""

    headings = PANELS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load_group(name) or command, rest

    @staticmethod
    def load_group(name: str | None) -> Any:
        """A group of `LAZY`, its module imported; None for another name."""
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


def _version(wanted: bool) -> None:
    if wanted:
        terminal.say(__version__)
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Post-train reasoning LLMs from YAML recipes: SFT, preference optimisation, RL with verifier rewards, merging,
    evaluation.

    A verb takes a recipe (a file, or the name of a shipped one) and key.path=value overrides:

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
app.add_typer(methods.app, name="methods", help="Which methods there are, and their formulas, papers and keys.")
for _name, (_, _about) in LAZY.items():
    app.add_typer(App(), name=_name, help=_about)
doctor.register(app)
completion.register(app)
