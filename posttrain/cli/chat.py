"""`posttrain chat`: a conversation with a model, or with two models side by side."""

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
from posttrain.cli.run_messages import print_notes
from posttrain.cli.stage import Overrides
from posttrain.cli.thought_folding import ThoughtSplitter
from posttrain.errors import PosttrainError, UserError, count_noun

if TYPE_CHECKING:
    from posttrain.evaluate.conversation import Answer, Conversation
    from posttrain.recipe.load import Loaded

DEFAULT_MAX_TOKENS = 1024  # tokens
COMMANDS = {
    "/reset": "forget the conversation but keep the system message",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/image FILE": "attach an image to the next message, before its text or at <image>; without FILE: attach none",
    "/save FILE": "append the conversation to a JSONL file, as a row that `sft` can train on",
    "/think": "show the last thought in full; `/think on` and `/think off` show or fold all thoughts",
    "/prompt": "show the next prompt as the chat template renders it",
    "/help": "show this list",
    "/exit": "leave the chat (as Ctrl-D does)",
}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run directory, a folder, an adapter, or a hub id.")]
Tools = Annotated[
    str | None,
    typer.Option(
        "--tools",
        metavar="NAMES|RECIPE",
        help="Tools for the model: names (calculator,python), or a recipe with a `tools` section.",
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
        str | None, typer.Option("--against", metavar="MODEL", help="A second model that answers the same messages.")
    ] = None,
    tools: Tools = None,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option("--engine", help="Generation engine.")
    ] = "transformers",
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="Sampling temperature; 0 = greedy.")
    ] = 0.7,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Maximum tokens of an answer (default: 1024, or half of the context window if that is less).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Sampling seed: equal seeds, equal answers.")] = 0,
    thoughts: Annotated[bool, typer.Option("--thoughts", help="Show thoughts in full instead of folded.")] = False,
) -> None:
    """Chat with a model. Answers stream; Ctrl-C stops an answer, /exit or Ctrl-D ends the chat. Input may be piped in.

    Overrides are those of a generate recipe: sampling.top_p=0.9, model.device=cpu, engine.vllm.enforce_eager=true.
    """
    from posttrain.cli import packages, preflight
    from posttrain.cli.component_checks import read_window
    from posttrain.export.source import find_source
    from posttrain.recipe.load import load_dict
    from posttrain.scratch import scratch

    offered, base_dir = read_tool_sections(tools)
    paths = [find_source(named).path for named in (model, *([against] if against else []))]
    windows = [window for path in paths if (window := read_window(path, base_dir))]
    longest = max_new_tokens or min([DEFAULT_MAX_TOKENS, *(max(1, window // 2) for window in windows)])
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
        print_notes(recipes[0])
        with open_conversations(recipes, folder) as conversations:
            for conversation in conversations:
                conversation.set_system(system or "")
                print_introduction(conversation)
            Chat(conversations, show_thoughts=thoughts).run()


@contextlib.contextmanager
def open_conversations(recipes: Sequence[Loaded], folder: Path) -> Iterator[list[Conversation]]:
    """Open a conversation with the model of each recipe."""
    from posttrain.evaluate import conversation as chatting
    from posttrain.recipe.stages import GenerateRecipe
    from posttrain.train.library_logging import quiet

    quiet()
    with contextlib.ExitStack() as stack:
        conversations = []
        for number, loaded in enumerate(recipes):
            recipe = loaded.require(GenerateRecipe)
            say(f"loading {recipe.model.path}")
            opened = chatting.open_conversation(recipe, folder / f"engine-{number}", say)
            conversations.append(stack.enter_context(opened))
        yield conversations


def read_tool_sections(named: str | None) -> tuple[dict[str, Any], Path]:
    """Return the recipe sections that configure tools, and the directory against which their files are resolved first.

    named: value of `--tools`: comma-separated tool names or a recipe.
    """
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


def print_introduction(conversation: Conversation) -> None:
    """Print on stderr how the model is prompted: the chat template's turn, sampling settings, tools."""
    from posttrain import chat as templates

    tokenizer, sampling = conversation.loaded.tokenizer, conversation.recipe.sampling
    messages = [{"role": "user", "content": "..."}]
    turn = templates.render(tokenizer, messages, generation_prompt=True)
    truncation = "".join(
        f", {key} {getattr(sampling, key)}"
        for key, default in (("top_p", 1.0), ("top_k", 0))
        if getattr(sampling, key) != default
    )
    sampled = f"temperature {sampling.temperature:g}{truncation}" if sampling.temperature else "greedy"
    limit = count_noun(sampling.max_new_tokens, "token")
    say(f"{conversation.name}: {sampled}, at most {limit} per turn; chat template: {turn!r}")
    if conversation.offer is not None:
        names = ", ".join(tool.name for tool in conversation.offer.tools)
        say(f"tools: {names} (calls in the format {conversation.offer.form})")


@dataclass
class Chat:
    """Read-eval loop of the chat. conversations: the conversations that receive every line of the user."""

    conversations: Sequence[Conversation]
    show_thoughts: bool = False
    thought: list[str] = field(default_factory=list)  # parts of the last answer's thought
    _in_thought: bool = False

    def run(self) -> None:
        """Answer lines until the input ends or /exit is entered."""
        if sys.stdin.isatty():
            say("Ctrl-C stops an answer, /exit ends the chat, /help lists the commands")
        for line in read_lines():
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
        """Run a /command; return whether the line was a command."""
        rest = rest.strip()
        match name:
            case "/reset":
                for conversation in self.conversations:
                    conversation.reset()
                say("the conversation starts over")
            case "/system":
                for conversation in self.conversations:
                    conversation.set_system(rest)
            case "/image":
                self.add_image(rest)
            case "/save":
                self.save(rest)
            case "/think" if rest in ("on", "off"):
                self.show_thoughts = rest == "on"
            case "/think":
                say("".join(self.thought) or "the last answer had no thought")
            case "/prompt":
                for conversation in self.conversations:
                    say(conversation.prompt())
            case "/help":
                for command, about in COMMANDS.items():
                    say(f"  {command:<14}{about}")
            case _:
                known = any(name == command.partition(" ")[0] for command in COMMANDS)
                if not known and "/" not in name[1:]:
                    say(f"no command {name}; /help lists the commands (start the line with a space to send it as text)")
                    return True
                return known
        return True

    def add_image(self, name: str) -> None:
        """Attach an image to the next message of each model; an empty name removes all images attached so far."""
        if not name:
            for conversation in self.conversations:
                conversation.pending.clear()
            say("the next message has no image")
            return
        sources = [conversation.find_image(name) for conversation in self.conversations]
        for conversation, source in zip(self.conversations, sources, strict=True):
            conversation.pending.append(source)
        say(f"{name} is attached to the next message")

    def save(self, name: str) -> None:
        """Append each model's conversation to a JSONL file as a row of messages."""
        if not name:
            raise UserError("/save needs a file", hint="/save chat.jsonl")
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                for conversation in self.conversations:
                    shown = {"images": conversation.images} if conversation.images else {}
                    row = {"messages": conversation.messages, **shown, "model": conversation.name}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"{name} cannot be written: {error.strerror}") from error
        say(f"appended to {name}: {count_noun(len(self.conversations), 'conversation')}")

    def answer(self, line: str) -> None:
        """Let each model answer in turn. Ctrl-C stops the current answer and skips the remaining models."""
        for conversation in self.conversations:
            if len(self.conversations) > 1:
                terminal.say(f"[{conversation.name}]")
            with on_interrupt(conversation.stop):
                if self._stream_answer(conversation, line):
                    return

    def _stream_answer(self, conversation: Conversation, line: str) -> bool:
        """Stream one answer; return whether it was interrupted."""
        self.thought, self._in_thought = [], False
        splitter: ThoughtSplitter | None = None
        for piece in conversation.ask(line):
            if isinstance(piece, str):
                splitter = splitter or ThoughtSplitter(inside=conversation.opens_thought)
                for kind, text in splitter.add(piece):
                    self.show(kind, text)
                continue
            for kind, text in splitter.end() if splitter else ():
                self.show(kind, text)
            splitter = None
            self.finish(piece)
            if piece.finish == "interrupted":
                return True
        return False

    def show(self, kind: str, text: str) -> None:
        """Print a part of an answer. A folded thought is printed as one marker when it begins."""
        if kind == "answer":
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
        """Print the end of a turn: its tool calls, and the reason if it did not end at an end-of-sequence token."""
        terminal.say()
        for call in answer.calls:
            arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            terminal.say(f"[{call.name}({arguments}) -> {call.result}]")
        if answer.finish == "interrupted":
            say("stopped; the partial answer stays in the conversation (/reset forgets it)")
        if answer.finish == "length":
            say(f"cut after {count_noun(answer.tokens, 'token')} by --max-new-tokens or the model's context window")


@contextlib.contextmanager
def on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C set `stop`; a second Ctrl-C raises KeyboardInterrupt. Does nothing outside the main thread."""

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


def read_lines() -> Iterator[str]:
    """Yield the user's lines, with a prompt on a terminal. A line that ends in a backslash continues on the next line.

    Ctrl-C at the prompt discards the line; with piped input it ends the chat.
    """
    asked = sys.stdin.isatty()
    if asked:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history
    text = ""
    while True:
        try:
            line = input(("... " if text else "> ") if asked else "")
        except EOFError:
            if text:
                yield text
            return
        except KeyboardInterrupt:
            if not asked:
                raise
            terminal.note("\n/exit or Ctrl-D ends the chat")
            text = ""
            continue
        if line.endswith("\\"):
            text += line[:-1] + "\n"
            continue
        yield text + line
        text = ""
