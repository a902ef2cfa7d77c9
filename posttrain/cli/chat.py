"""`posttrain chat`: a conversation with a model, or with two side by side."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.run_messages import tell_notes
from posttrain.cli.stage import Overrides
from posttrain.cli.thought_folding import Divided
from posttrain.errors import PosttrainError, UserError, count_noun

if TYPE_CHECKING:
    from posttrain.evaluate.conversation import Answer, Conversation
    from posttrain.recipe.load import Loaded

LONGEST_TURN = 1024  # tokens
COMMANDS = {
    "/reset": "forget the conversation; the system message stays",
    "/system TEXT": "another system message; nothing behind it removes it",
    "/image FILE": "show a picture with the next message, before its text or where it has <image>; without FILE: none",
    "/save FILE": "add the conversation to a JSONL file, as a row that `sft` can train on",
    "/think": "show the last thought whole; `/think on` and `/think off` show or fold all",
    "/prompt": "what the model is given next, as the chat template writes it",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does",
}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run directory, a folder, an adapter, or a hub id.")]
Tools = Annotated[
    str | None,
    typer.Option(
        "--tools", metavar="NAMES|RECIPE", help="Tools: names (calculator,python), or a recipe that has some."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("chat")(chat)


def chat(
    model: Model,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="A second model that answers the same.")
    ] = None,
    tools: Tools = None,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option("--engine", help="What generates.")
    ] = "transformers",
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0.0, help="0 = greedy.")] = 0.7,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", metavar="N", min=1, help="Longest turn in tokens; default: 1024, or half the window."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same answers.")] = 0,
    thoughts: Annotated[bool, typer.Option("--thoughts", help="Show thoughts whole instead of folded.")] = False,
) -> None:
    """Talk to a model. Answers stream; Ctrl-C stops an answer, /exit or Ctrl-D the chat. Lines may be piped in.

    Overrides are those of a generate recipe: sampling.top_p=0.9, model.device=cpu, engine.vllm.enforce_eager=true.
    """
    from posttrain.cli import packages, preflight
    from posttrain.cli.component_checks import window_of
    from posttrain.export.source import find_source
    from posttrain.recipe.load import load_dict
    from posttrain.scratch import scratch

    offered, base_dir = offered_tools(tools)
    paths = [find_source(named).path for named in (model, *([against] if against else []))]
    windows = [window for path in paths if (window := window_of(path, base_dir))]
    longest = max_new_tokens or min([LONGEST_TURN, *(max(1, window // 2) for window in windows)])
    with scratch("chat") as folder:
        rows = folder / "prompts.jsonl"
        rows.write_text('{"prompt": "x"}\n', encoding="utf-8")
        values = {
            "stage": "generate",
            "data": {"source": str(rows)},
            "engine": {"engine": engine},
            "sampling": {"temperature": temperature, "max_new_tokens": longest},
            "run": {"seed": seed},
            **offered,
        }
        recipes = []
        for path in paths:
            given = {**values, "model": {"path": path}}
            loaded = load_dict(given, base_dir=base_dir, where="command line", overrides=overrides or [])
            preflight.check(loaded)
            packages.require(loaded)
            recipes.append(loaded)
        tell_notes(recipes[0])
        with open_all(recipes, folder) as talks:
            for talk in talks:
                talk.set_system(system or "")
                introduce(talk)
            Chat(talks, show_thoughts=thoughts).run()


@contextlib.contextmanager
def open_all(recipes: Sequence[Loaded], folder: Path) -> Iterator[list[Conversation]]:
    """A conversation with the model of each recipe."""
    from posttrain.evaluate import conversation
    from posttrain.recipe.stages import GenerateRecipe
    from posttrain.train.library_logging import quiet

    quiet()
    with contextlib.ExitStack() as stack:
        talks = []
        for number, loaded in enumerate(recipes):
            recipe = loaded.require(GenerateRecipe)
            say(f"loading {recipe.model.path}")
            talks.append(stack.enter_context(conversation.open_conversation(recipe, folder / f"engine-{number}", say)))
        yield talks


def offered_tools(named: str | None) -> tuple[dict[str, Any], Path]:
    """The sections of tools, and the folder in which what they name is looked for first."""
    from posttrain.cli import preflight
    from posttrain.path_resolution import known_files

    if named is None:
        return {}, Path.cwd()
    if named.endswith((".yaml", ".yml")) or named in known_files("recipes", [".yaml"]):
        loaded = preflight.load(named, without=["model", "data", "run"])
        recipe: Any = loaded.recipe
        if not getattr(recipe, "tools", None):
            raise UserError(f"the recipe {named} has no `tools`", hint="name tools instead: --tools calculator,python")
        keys = ("tools", "tool_format", "tool_prompt", "tool_memory_mb")
        return {key: loaded.resolved[key] for key in keys}, recipe.base_dir
    return {"tools": [{"use": name.strip()} for name in named.split(",") if name.strip()]}, Path.cwd()


def introduce(talk: Conversation) -> None:
    """Say on stderr how the model is asked: its template's turn, sampling, tools."""
    from posttrain import chat as templates

    tokenizer, sampling = talk.loaded.tokenizer, talk.recipe.sampling
    talked = [{"role": "user", "content": "..."}]
    turn = templates.render(tokenizer, talked, generation_prompt=True)
    cut = "".join(
        f", {key} {getattr(sampling, key)}"
        for key, whole in (("top_p", 1.0), ("top_k", 0))
        if getattr(sampling, key) != whole
    )
    drawn = f"temperature {sampling.temperature:g}{cut}" if sampling.temperature else "greedy"
    say(f"{talk.name}: {drawn}, {count_noun(sampling.max_new_tokens, 'token')} a turn at most; chat template: {turn!r}")
    if talk.offer is not None:
        names = ", ".join(tool.name for tool in talk.offer.tools)
        say(f"tools: {names} (calls in the format {talk.offer.form})")


@dataclass
class Chat:
    """The loop over lines of the user. talks: the conversations that get each line."""

    talks: Sequence[Conversation]
    show_thoughts: bool = False
    thought: list[str] = field(default_factory=list)  # the last one
    _in_thought: bool = False

    def run(self) -> None:
        """Until the input ends or /exit."""
        if sys.stdin.isatty():
            say("Ctrl-C stops an answer, /exit leaves, /help shows more")
        for line in lines():
            if line.strip() == "/exit":
                return
            try:
                if line.startswith("/") and self.command(*line.strip().partition(" ")[::2]):
                    continue
                if line.strip():
                    self.answer(line)
            except PosttrainError as error:
                say(str(error))

    def command(self, name: str, rest: str) -> bool:
        """Carry out a command; whether the line was one."""
        rest = rest.strip()
        match name:
            case "/reset":
                for talk in self.talks:
                    talk.reset()
                say("the conversation begins anew")
            case "/system":
                for talk in self.talks:
                    talk.set_system(rest)
            case "/image":
                self.add_image(rest)
            case "/save":
                self.save(rest)
            case "/think" if rest in ("on", "off"):
                self.show_thoughts = rest == "on"
            case "/think":
                say("".join(self.thought) or "there was no thought")
            case "/prompt":
                for talk in self.talks:
                    say(talk.prompt())
            case "/help":
                for command, about in COMMANDS.items():
                    say(f"  {command:<14}{about}")
            case _:
                known = any(name == command.partition(" ")[0] for command in COMMANDS)
                if not known and "/" not in name[1:]:
                    say(f"no command {name}; /help shows them (a line that begins with a blank is no command)")
                    return True
                return known
        return True

    def add_image(self, name: str) -> None:
        """Have each model shown a picture with the next message; without a name, none of those given so far."""
        if not name:
            for talk in self.talks:
                talk.pending.clear()
            say("the next message shows no picture")
            return
        for talk, source in [(talk, talk.find_image(name)) for talk in self.talks]:
            talk.pending.append(source)
        say(f"{name} is shown with the next message")

    def save(self, name: str) -> None:
        """Add a row of messages for each model to a JSONL file."""
        if not name:
            raise UserError("/save needs a file", hint="/save chat.jsonl")
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                for talk in self.talks:
                    shown = {"images": talk.images} if talk.images else {}
                    row = {"messages": talk.messages, **shown, "model": talk.name}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"{name} cannot be written: {error.strerror}") from error
        say(f"added to {name}: {count_noun(len(self.talks), 'conversation')}")

    def answer(self, line: str) -> None:
        """Have each model answer, one after the other. Ctrl-C ends the answer of one and skips the others."""
        for talk in self.talks:
            if len(self.talks) > 1:
                terminal.say(f"[{talk.name}]")
            with on_interrupt(talk.stop):
                if self._stream_answer(talk, line):
                    return

    def _stream_answer(self, talk: Conversation, line: str) -> bool:
        """Stream an answer; whether it was interrupted."""
        self.thought, self._in_thought = [], False
        divided: Divided | None = None
        for piece in talk.ask(line):
            if isinstance(piece, str):
                divided = divided or Divided(inside=talk.opens_thought)
                for kind, text in divided.add(piece):
                    self.show(kind, text)
                continue
            for kind, text in divided.end() if divided else ():
                self.show(kind, text)
            divided = None
            self.finish(piece)
            if piece.finish == "interrupted":
                return True
        return False

    def show(self, kind: str, text: str) -> None:
        """A part of an answer. A folded thought is one mark when it begins."""
        if kind == "said":
            terminal.say("\n" + text if self._in_thought and self.show_thoughts else text, end="")
            self._in_thought = False
            return
        self._in_thought = True
        if not self.show_thoughts and (not self.thought or not text):
            terminal.say("[thinking ...] ", end="")
        elif self.show_thoughts:
            terminal.say(text or "[thought] ", end="")
        self.thought.append(text)

    def finish(self, answer: Answer) -> None:
        """The end of a turn: its calls of tools, and why it ended if not by itself."""
        terminal.say()
        for call in answer.calls:
            arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            terminal.say(f"[{call.name}({arguments}) -> {call.result}]")
        if answer.finish == "interrupted":
            say("stopped; what was said stays (/reset forgets it)")
        if answer.finish == "length":
            say(f"cut after {count_noun(answer.tokens, 'token')}: --max-new-tokens, or the model's window")


@contextlib.contextmanager
def on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C sets `stop`; once more raises KeyboardInterrupt. Outside the main thread nothing is changed."""

    def handle_signal(number: int, frame: object) -> None:
        del number, frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def lines() -> Iterator[str]:
    """Lines of the user, with a prompt on a terminal; one that ends in a backslash goes on in the next. Ctrl-C at the
    prompt begins a new line; where lines are piped in it ends the chat."""
    asked = sys.stdin.isatty()
    if asked:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history
    whole = ""
    while True:
        try:
            line = input(("... " if whole else "> ") if asked else "")
        except EOFError:
            if whole:
                yield whole
            return
        except KeyboardInterrupt:
            if not asked:
                raise
            terminal.note("\n/exit or Ctrl-D leaves")
            whole = ""
            continue
        if line.endswith("\\"):
            whole += line[:-1] + "\n"
            continue
        yield whole + line
        whole = ""
