"""Samples every prompt of a data section, chunk by chunk, into completions.jsonl, from which a stopped run resumes.

A chunk is a fixed range of prompts with its own seed, and it counts only if all of its rows are written. A resumed run
therefore samples the same completions as an uninterrupted one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from posttrain import source_locations, terminal
from posttrain.batch import Prompt, Rollout
from posttrain.batch.records import turn_records
from posttrain.data.prepare import Prepared, prepare_prompts
from posttrain.data.render import prompt_value
from posttrain.errors import Interrupted, count_noun
from posttrain.evaluate.shaped import ShapedEngine, load_shape
from posttrain.evaluate.summary import verdict
from posttrain.images import thumbnail_url
from posttrain.models.load import LoadedModel, config_of, load, load_image_reader, load_tokenizer
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.engine_sections import VLLM_CHUNK, EngineSection
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import EvalRecipe, GenerateRecipe
from posttrain.rollout import turns
from posttrain.rollout.continuation import rehearse_shape
from posttrain.rollout.engine import Engine, check_fits, needed_length
from posttrain.rollout.make_engine import check_engine, make_engine, start_early, start_note
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.jsonl import StepLog, sound_rows
from posttrain.run.progress import Progress
from posttrain.seeds import derive
from posttrain.tools.tool_set import load_tool_set
from posttrain.verify.captured_output import OutputLog

COMPLETIONS = "completions.jsonl"

Record = dict[str, Any]
Grade = Callable[[Sequence[Rollout]], Sequence[Mapping[str, Any]]]
EngineWrapper = Callable[[Engine, LoadedModel], Any]


def prepare(recipe: EvalRecipe | GenerateRecipe) -> Prepared[Prompt]:
    """Prepare the prompts in the order of their rows, with only the tokenizer.

    Data errors are thus raised before the model loads.
    """
    check_engine(recipe.engine, lambda: config_of(recipe.model, recipe.base_dir), base_dir=recipe.base_dir)
    tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
    offer = load_tool_set(recipe, tokenizer, recipe.base_dir)
    turns.check_start(offer, tokenizer)
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prepared = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, offer.row if offer else None, reader)
    refuse_with_images(recipe, prepared.rows)
    for cause, uids in [*prepared.dropped.items(), *prepared.cut.items(), *prepared.noted.items()]:
        terminal.note(f"{count_noun(len(uids), 'prompt')}: {cause} ({source_locations.describe_rows(uids)})")
    return prepared


def prompt_rows(prepared: Prepared[Prompt], data: Data) -> list[dict[str, Any]]:
    """Return the rows of problems.jsonl: `uid`, the rendered `prompt`, and the data `row` with all its columns."""
    return [
        {"uid": p.uid, "prompt": prompt_value(p.row, p.text, data), "row": json.loads(json.dumps(p.row, default=str))}
        for p in prepared.items
    ]


def sample(
    recipe: EvalRecipe | GenerateRecipe,
    directory: RunDirectory,
    prompts: Sequence[Prompt],
    n: int,
    grade: Grade,
    columns: Sequence[str] = (),
    *,
    file: str = COMPLETIONS,
    around: EngineWrapper | None = None,
    room: int = 0,
) -> list[Record]:
    """Sample n completions of every prompt into `file` and return their records, in the order of the prompts.

    grade: what to add to the record of each rollout of a chunk (nothing, or scores). A record has `step` (the number of
    its chunk), `problem` (the prompt's position), `uid`, `prompt`, `sample`, `completion`, `finish` and `tokens`; the
    first record of a prompt with images also has `pictures`, as thumbnails for pages. around: wraps the recipe's
    engine, given that engine and its model. room: tokens by which the wrapped engine may exceed a prompt and
    max_new_tokens. columns: numeric keys of records whose running mean the display shows. Raises Interrupted after
    Ctrl-C; every finished chunk is saved.
    """
    if recipe.sampling.shape is not None:
        tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
        reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
        shape = load_shape(recipe.sampling.shape, tokenizer, recipe.base_dir, reader=reader)
        rehearse_shape(shape, prompts[0], recipe.sampling)
        around, room = (lambda engine, _: ShapedEngine(engine, shape)), shape.room
    path = directory.path / file
    chunks = split_chunks(len(prompts), n, recipe.engine)
    records = completed_records(sound_rows(path, stepped=True)[0], chunks, n)  # an incomplete chunk is sampled again
    done = len({record["step"] for record in records})
    log = StepLog(path, done - 1 if done else None, directory.logs)
    try:
        if done < len(chunks):
            if done:
                terminal.note(f"resumed with {count_noun(len(records), 'completion')}")
            records += _sample_chunks(recipe, directory, prompts, n, grade, chunks, done, log, columns, around, room)
    finally:
        log.close()
    return records


def split_chunks(prompts: int, n: int, engine: EngineSection) -> list[range]:
    """Split the positions of the prompts into chunks that fill the engine's batch with n completions each."""
    sequences = max(engine.batch_size, VLLM_CHUNK) if engine.engine == "vllm" else engine.batch_size
    size = max(1, sequences // n)
    return [range(start, min(start + size, prompts)) for start in range(0, prompts, size)]


def completed_records(rows: Sequence[Record], chunks: Sequence[range], n: int) -> list[Record]:
    """Return the records of the leading complete chunks."""
    by_chunk: defaultdict[int, list[Record]] = defaultdict(list)
    for row in rows:
        by_chunk[row["step"]].append(row)
    records: list[Record] = []
    for number, chunk in enumerate(chunks):
        if len(by_chunk[number]) != len(chunk) * n:
            break
        records += by_chunk[number]
    return records


def open_print_log(directory: RunDirectory, what: str) -> OutputLog:
    """Open the run's log of the output that rewards or tools print."""
    return OutputLog(directory.logs, what, lambda line: terminal.note(line))


@contextmanager
def _open_engine(
    recipe: EvalRecipe | GenerateRecipe,
    directory: RunDirectory,
    prompts: Sequence[Prompt],
    around: EngineWrapper | None,
    room: int,
) -> Iterator[Engine]:
    """Load the model and yield its engine, wrapped by tools and `around`; closed at the end of the block."""
    engine_options: dict[str, Any] = {
        "scratch": directory.path / "engine",
        "max_len": needed_length(prompts, recipe.sampling) + room,
    }
    if note := start_note(recipe.engine):
        terminal.note(note)
    with start_early(recipe.engine, recipe.model, recipe.base_dir, training=False, **engine_options) as begun:
        loaded = load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
        offer = load_tool_set(recipe, loaded.tokenizer, recipe.base_dir)
        offer = replace(offer, output_log=open_print_log(directory, "tools")) if offer else None
        engine: Any = make_engine(recipe.engine, loaded, begun=begun, base_dir=recipe.base_dir, **engine_options)
        has_tree = getattr(recipe, "tree", None) is not None  # a tree acts in the environment itself
        engine = turns.with_turns(engine, None if has_tree else offer, loaded)
        engine = around(engine, loaded) if around else engine
        try:
            check_fits(prompts, recipe.sampling, engine.window)
            yield engine
        finally:
            engine.close()


def _sample_chunks(
    recipe: EvalRecipe | GenerateRecipe,
    directory: RunDirectory,
    prompts: Sequence[Prompt],
    n: int,
    grade: Grade,
    chunks: Sequence[range],
    done: int,
    log: StepLog,
    columns: Sequence[str],
    around: EngineWrapper | None,
    room: int,
) -> list[Record]:
    """Sample the chunks that are not done yet."""
    records: list[Record] = []
    means = RunningMeans(columns)
    shown = ("tokens", "truncated", *columns)
    with (
        _open_engine(recipe, directory, prompts, around, room) as engine,
        GracefulStop() as stop,
        Progress(recipe.verb, len(chunks), shown) as progress,
    ):
        counts = (count_noun(len(prompts), "prompt"), count_noun(n, "completion"), count_noun(len(chunks), "chunk"))
        progress.note("{} x {} in {}".format(*counts))
        for number in range(done, len(chunks)):
            part = chunks[number]
            asked, seed = [prompts[i] for i in part], derive(recipe.run.seed, "eval", number)
            rollouts = engine.generate(asked, n, recipe.sampling, seed=seed, first_group=part.start, logprobs=False)
            rows = [
                {**_make_record(rollout, number, i % n), **grades}
                for i, (rollout, grades) in enumerate(zip(rollouts, grade(rollouts), strict=True))
            ]
            log.append(rows)
            records += rows
            progress.update(number + 1, means.add(rows))
            if stop.requested and number + 1 < len(chunks):
                raise Interrupted(
                    f"stopped after {number + 1} of {count_noun(len(chunks), 'chunk')}, which are saved",
                    where=str(directory.path),
                    number=stop.number,
                )
    return records


def _make_record(rollout: Rollout, chunk: int, sample: int) -> Record:
    """Return the record of a rollout for completions.jsonl, without its grade."""
    return {
        "step": chunk,
        "problem": rollout.group,
        "uid": rollout.prompt.uid,
        "prompt": rollout.prompt.text,
        "sample": sample,
        "completion": rollout.text,
        "finish": rollout.finish,
        "tokens": len(rollout.sampled_ids),
        **turn_records(rollout),
        **({"pictures": [thumbnail_url(image) for image in rollout.images]} if rollout.images and sample == 0 else {}),
    }


class RunningMeans:
    """Running means over all records since the start of this attempt, updated chunk by chunk."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._sums = dict.fromkeys(("tokens", "truncated", *columns), 0.0)
        self._counts = dict.fromkeys(self._sums, 0)

    def add(self, records: Sequence[Record]) -> dict[str, float | None]:
        """Add records and return the means; None for a column without any number yet."""
        for record in records:
            for name in self._sums:
                if (value := _display_value(record, name)) is not None:
                    self._sums[name] += float(value)
                    self._counts[name] += 1
        return {name: total / self._counts[name] if self._counts[name] else None for name, total in self._sums.items()}


def _display_value(record: Record, name: str) -> float | None:
    """Return the number of a record that is shown under a name; None if there is none."""
    if name == "truncated":
        return record["finish"] == "length"
    return verdict(record) if name == "correct" else record.get(name)
