"""Rounds of a pipeline: a list of stages that is repeated, each round starting from the model of the previous round.

    - name: improve
      rounds: 3
      start: stage:sft            # the policy of round 1
      reference: initial          # reference of the dpo stages
      stages:
        - {name: answers, stage: eval, model: {path: round:policy}, ...}
        - {name: pairs, stage: pairs, completions: stage:answers/completions.jsonl}
        - {name: train, stage: dpo, model: {path: round:policy}, data: {source: stage:pairs/pairs.jsonl}, ...}

Rounds are expanded when the recipe is read: stage `answers` of round 2 becomes the stage `improve.2.answers`, which is
validated, run and resumed like any other. `stage:improve` is the model of the last round, `stage:improve.1` that of the
first.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, ValidationError

from posttrain.errors import Problem, count_noun, did_you_mean
from posttrain.recipe import layers
from posttrain.recipe.problems import convert_errors
from posttrain.recipe.section import Positive, Section, Share
from posttrain.recipe.stages import Stage
from posttrain.recipe.tree import Node, Origin, Path_, from_plain, plain

MODEL_MAKERS = ("sft", "dpo", "rl", "merge")
SAMPLERS = ("eval", "generate")
REFERENCE = re.compile(r"stage:([\w.-]+)(?:/(.+))?$")
_ROUND = re.compile(r"round:(.*)$")
POLICY_NAMES = ("policy", "initial", "reference")
Reference = Literal["previous", "initial", "extrapolated", "random_past", "average"]


class Rounds(Section):
    """Stages that are repeated, each time starting from the model of the previous round."""

    verb: ClassVar = "run"
    unused: ClassVar[dict[str, str]] = {}
    stage: Literal["rounds"] = "rounds"
    name: str
    rounds: Positive = Field(description="number of rounds")
    start: str = Field(description="policy of the first round: stage:NAME, or a model")
    reference: Reference = Field(
        "previous",
        description="reference of dpo stages: the round's own policy (previous), the policy of the first "
        "round (initial), a random earlier policy (random_past), the moving average of the "
        "policies (average); extrapolated: as previous, and each round's model is extrapolated "
        "along its last change",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        0.3, description="extrapolated: length of the extrapolation, relative to the last change"
    )
    decay: Share = Field(0.5, description="average: decay of the moving average per round")
    history: Positive = Field(2, description="maximum number of earlier policies for a loss with a history (mnpo)")
    extragradient: bool = Field(
        False,
        description="run the stages of a round twice: the second time the model of the first pass generates "
        "the answers, and training starts from the round's policy again (EGPO)",
    )
    result: str | None = Field(None, description="stage whose model the next round starts from; default: the last")
    by_round: dict[str, list[Any]] = Field(
        default_factory=dict, description="NAME.key.path of a stage: its value in each round"
    )
    stages: list[dict[str, Any]] = Field(
        min_length=1, description="stages as in a pipeline; round:policy is the round's model"
    )


@dataclass(frozen=True)
class Entry:
    """A stage of a pipeline with its path in the recipe, its round, and the other policies of that round."""

    node: Node
    path: Path_
    round: int = 1
    reference: str | None = None
    history: tuple[str, ...] = ()


@dataclass
class Expanded:
    """The stages of all rounds. results: NAME or NAME.ROUND -> reference to the model that it stands for."""

    entries: list[Entry] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)


def is_rounds(entry: Node) -> bool:
    return "rounds" in entry.mapping


def model_names(entry: Node) -> list[str]:
    """Return the names that later stages may use for models of the rounds, as far as the entry can be read."""
    name, count = (entry.mapping[key].value if key in entry.mapping else None for key in ("name", "rounds"))
    most = max(count, 9) if isinstance(count, int) else 9  # the number itself may be invalid
    return [str(name), *(f"{name}.{number}" for number in range(1, most + 1))]


def expand(entry: Node, path: Path_, problems: list[Problem]) -> Expanded:
    """Return the stages of all rounds in order; none if the entry is invalid."""
    try:
        settings = Rounds.model_validate(plain(entry))
    except ValidationError as error:
        problems += convert_errors(error, entry, cast(type[Stage], Rounds), path)
        return Expanded()
    faults = list(_check_rounds(entry, settings, path))
    problems += faults
    return Expanded() if faults else _Expander(entry, path, settings).write()


def _check_rounds(entry: Node, settings: Rounds, path: Path_) -> Iterator[Problem]:
    """Yield the problems that the schema cannot express."""
    head = ".".join(map(str, path))
    for position, node in enumerate(cast(list[Node], entry.mapping["stages"].value)):
        yield from _check_stage(node, f"{head}.stages.{position}")
    yield from _check_result(entry, settings, head)
    yield from _check_idle(entry, settings, head)
    if settings.start in ("tiny", "tiny-vision"):
        what = (
            f"{head}.start: `{settings.start}` is newly created from the seed of each stage: rounds need a fixed model"
        )
        yield Problem(entry.mapping["start"].origin.mark, what, hint="train it first, and write `stage:NAME`")
    yield from _check_by_round(entry, settings, head)


def _check_stage(node: Node, head: str) -> Iterator[Problem]:
    """Check one stage of the rounds: no nested rounds, no `.` in its name, known `round:` policies."""
    if is_rounds(node):
        yield Problem(node.origin.mark, f"{head}: rounds within rounds")
    name = node.mapping.get("name")
    if name is not None and "." in str(name.value):
        yield Problem(name.origin.mark, f"{head}.name: the name of a stage in rounds cannot contain `.`")
    for text, place in _texts(node):
        word = _ROUND.match(text)
        if word and word[1] not in POLICY_NAMES:
            hint = did_you_mean(word[1], POLICY_NAMES, "round:{}")
            allowed = ", ".join(f"round:{w}" for w in POLICY_NAMES)
            yield Problem(place.mark, f"`{text}` is not a policy of a round", f"known: {allowed}", hint)


def _check_result(entry: Node, settings: Rounds, head: str) -> Iterator[Problem]:
    makers = [str(stage.get("name")) for stage in settings.stages if stage.get("stage") in MODEL_MAKERS]
    if not makers:
        mark = entry.mapping["stages"].at_key.mark
        yield Problem(mark, f"{head}.stages: none of them produces a model", ", ".join(MODEL_MAKERS))
    elif settings.result is not None and settings.result not in makers:
        what = f"{head}.result: `{settings.result}` does not produce a model"
        yield Problem(entry.mapping["result"].origin.mark, what, f"those that do: {', '.join(makers)}")


def _check_idle(entry: Node, settings: Rounds, head: str) -> Iterator[Problem]:
    """Yield a problem for each setting that has no effect."""
    compares = any(stage.get("stage") == "dpo" for stage in settings.stages)
    if settings.reference in ("initial", "random_past", "average") and not compares:
        what = f"{head}.reference: does nothing: no stage of the rounds is a dpo"
        yield Problem(entry.mapping["reference"].at_key.mark, what, hint="remove it")
    for key, reader in (("alpha", "extrapolated"), ("decay", "average")):
        if getattr(settings, key) != Rounds.model_fields[key].default and settings.reference != reader:
            what = f"{head}.{key}: does nothing with reference {settings.reference}"
            yield Problem(entry.mapping[key].origin.mark, what, hint=f"write `reference: {reader}`, or remove it")
    if settings.history != Rounds.model_fields["history"].default and not compares:
        what = f"{head}.history: does nothing: no stage of the rounds is a dpo"
        yield Problem(entry.mapping["history"].origin.mark, what, hint="remove it")


def _check_by_round(entry: Node, settings: Rounds, head: str) -> Iterator[Problem]:
    """Check that `by_round` names keys of the stages, with one value per round."""
    stages = [str(stage.get("name")) for stage in settings.stages]
    for key, values in settings.by_round.items():
        node = entry.mapping["by_round"].mapping[key]
        stage, _, below = key.partition(".")
        if stage not in stages or not below:
            what = f"{head}.by_round: `{key}` is not a key of a stage of these rounds"
            yield Problem(node.at_key.mark, what, f"write NAME.key.path; names: {', '.join(stages)}")
        elif len(values) != settings.rounds:
            what = (
                f"{head}.by_round.{key}: {count_noun(len(values), 'value')} for {count_noun(settings.rounds, 'round')}"
            )
            yield Problem(node.origin.mark, what)


class _Expander:
    """Expands the rounds in order. Its lists hold the models (`stage:NAME`) of the rounds so far."""

    def __init__(self, entry: Node, path: Path_, settings: Rounds) -> None:
        self.entry, self.path, self.settings = entry, path, settings
        self.stages = cast(list[Node], entry.mapping["stages"].value)
        makers = [s["name"] for s in settings.stages if s.get("stage") in MODEL_MAKERS]
        self.result = settings.result or makers[-1]
        self.names = {s.get("name") for s in settings.stages}
        self.policies = [settings.start]  # start model of each round
        self.trained = [settings.start]  # trained model of each round, before extrapolation
        self.averages = [settings.start]
        self.out = Expanded()

    def write(self) -> Expanded:
        for number in range(1, self.settings.rounds + 1):
            self._round(number)
            self.out.results[f"{self.settings.name}.{number}"] = self.policies[-1]
        self.out.results[self.settings.name] = self.policies[-1]
        return self.out

    def _round(self, number: int) -> None:
        """Expand one round: rename its stages, resolve their references, and add them to the result."""
        policy, sampler = self.policies[-1], self.policies[-1]
        reference = self._reference(number)
        history = tuple(reversed(self.policies))[: self.settings.history]
        for half in ("half.", "") if self.settings.extragradient else ("",):
            prefix = f"{self.settings.name}.{number}.{half}"
            for position, node in enumerate(self.stages):
                kind = node.mapping["stage"].value if "stage" in node.mapping else None
                meaning = {
                    "policy": sampler if kind in SAMPLERS else policy,
                    "initial": self.settings.start,
                    "reference": reference or policy,
                }
                stage = self._rename_for_round(self._apply_by_round(node, number), prefix, meaning)
                if kind == "pairs" and "not_in" not in stage.mapping and number > 1:
                    stage = self._with(stage, "not_in", self._earlier_pairs(str(stage.mapping["name"].value), number))
                path = (*self.path, "stages", position)
                self.out.entries.append(Entry(stage, path, number, reference, history))
            sampler = f"stage:{prefix}{self.result}"
        self.trained.append(sampler)
        self._next_policy(number)

    def _reference(self, number: int) -> str | None:
        """Return the reference model of a round's dpo stages; None if it is the model that they start from."""
        found = {
            "initial": self.settings.start,
            "average": self.averages[-1],
            # The same random choice for all seeds of a pipeline, so that they differ only in the seed.
            "random_past": random.Random(f"random past {self.settings.name} {number}").choice(self.policies),
        }.get(self.settings.reference)
        return None if found == self.policies[-1] else found

    def _next_policy(self, number: int) -> None:
        """Add the start model of the next round, and the moving average that it is compared with."""
        name = f"{self.settings.name}.{number}"
        if self.settings.reference == "extrapolated":
            merge: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": self.trained[-2]}
            merge |= {"models": [{"model": self.trained[-1]}], "parameters": {"lambda": 1 + self.settings.alpha}}
            self.policies.append(self._add_merge_stage(f"{name}.extrapolated", number, merge))
            return
        self.policies.append(self.trained[-1])
        if self.settings.reference == "average" and number < self.settings.rounds:
            shares = ((self.averages[-1], self.settings.decay), (self.trained[-1], 1 - self.settings.decay))
            models = [{"model": model, "parameters": {"weight": share}} for model, share in shares]
            self.averages.append(
                self._add_merge_stage(f"{name}.average", number, {"merge_method": "linear", "models": models})
            )

    def _add_merge_stage(self, name: str, number: int, values: dict[str, Any]) -> str:
        """Add a merge stage and return a reference to its model."""
        at = self.entry.mapping["reference"].origin
        self.out.entries.append(Entry(from_plain({"name": name, "stage": "merge", **values}, at), self.path, number))
        return f"stage:{name}"

    def _apply_by_round(self, node: Node, number: int) -> Node:
        """Return the stage with the values that `by_round` gives for this round."""
        given = self.entry.mapping["by_round"].mapping if "by_round" in self.entry.mapping else {}
        for key, values in given.items():
            name, _, below = key.partition(".")
            if "name" in node.mapping and node.mapping["name"].value == name:
                value = cast(list[Node], values.value)[number - 1]
                node = layers.set_value(node, below.split("."), value)
        return node

    def _rename_for_round(self, node: Node, prefix: str, meaning: dict[str, str]) -> Node:
        """Return the stage renamed for this round, with `stage:` and `round:` references resolved."""

        def change(text: str) -> str:
            if (word := _ROUND.match(text)) and word[1] in meaning:
                return meaning[word[1]]
            found = REFERENCE.match(text)
            if found and found[1] in self.names:
                return f"stage:{prefix}{text.removeprefix('stage:')}"
            return text

        name = node.mapping.get("name")
        changed = map_texts(node, change)
        return changed if name is None else self._with(changed, "name", f"{prefix}{name.value}", name)

    def _earlier_pairs(self, name: str, number: int) -> list[str]:
        """Return references to the pairs of the same stage in the previous rounds."""
        stage = name.removeprefix(f"{self.settings.name}.{number}.")
        return [f"stage:{self.settings.name}.{past}.{stage}/pairs.jsonl" for past in range(1, number)]

    @staticmethod
    def _with(node: Node, key: str, value: Any, like: Node | None = None) -> Node:
        made = from_plain(value, (like or node).origin)
        return Node({**node.mapping, key: made}, node.origin, node.key_origin)


def map_texts(node: Node, change: Callable[[str], str]) -> Node:
    """Return the tree with `change` applied to every text."""
    if isinstance(node.value, dict):
        value: Any = {key: map_texts(below, change) for key, below in node.value.items()}
    elif isinstance(node.value, list):
        value = [map_texts(below, change) for below in node.value]
    else:
        value = change(node.value) if isinstance(node.value, str) else node.value
    return dataclasses.replace(node, value=value)


def with_results(entry: Node, results: dict[str, str]) -> Node:
    """Return the entry with `stage:NAME` of whole rounds replaced by the model that they produce."""

    def change(text: str) -> str:
        found = REFERENCE.match(text)
        if found is None or found[1] not in results:
            return text
        return results[found[1]] + (f"/{found[2]}" if found[2] else "")

    return map_texts(entry, change)


def _texts(node: Node) -> Iterator[tuple[str, Origin]]:
    if isinstance(node.value, str):
        yield node.value, node.origin
    children: Sequence[Node] = node.value if isinstance(node.value, list) else list(node.mapping.values())
    for below in children:
        yield from _texts(below)
