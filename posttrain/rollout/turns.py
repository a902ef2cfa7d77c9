"""Rollouts of several turns, on tokens: the model writes a turn, tools or an environment reply, and so on.

`TurnEngine` wraps another engine. Each rollout is a coroutine that samples a turn, awaits its reply and continues
(`StepSampler`; with a `ConcurrentEngine` no rollout waits for another). The model's tokens stay as sampled. Replies are
separate segments without loss. A rollout depends on its place in the step, not on other rollouts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain import source_locations, thoughts
from posttrain.batch import Prompt, PromptImages, Rollout, Segment, Turn, join_images
from posttrain.errors import ToolError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.batching import SampleQuery, StepSampler
from posttrain.rollout.engine import Engine, GenerationBatch, Generator, check_fits
from posttrain.rollout.template import TurnSeparator, check_template
from posttrain.seeds import derive
from posttrain.shapes.protocol import Sampled
from posttrain.tools.environments import Episode, World

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader
    from posttrain.models.load import LoadedModel
    from posttrain.tools.tool_set import ToolSet


@dataclass
class Trajectory:
    """An unfinished rollout. used: number of its tokens after the prompt."""

    prompt: Prompt
    group: int
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""
    version: int | None = None  # of its first turn

    @property
    def used(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids that the next turn continues: prompt and all segments."""
        return self.prompt.ids + tuple(i for s in self.segments for i in s.ids)

    @property
    def images(self) -> PromptImages | None:
        """Images of the prompt and of the replies so far."""
        return join_images([(self.prompt.ids, self.prompt.images), *((s.ids, s.images) for s in self.segments)])

    def rollout(self, version: int, score: float | None) -> Rollout:
        """Return the finished rollout; its text is the model's turns, joined by newlines."""
        return Rollout(
            prompt=self.prompt,
            group=self.group,
            segments=tuple(self.segments),
            text="\n".join(turn.text for turn in self.turns),
            finish="stop" if self.ended in ("answer", "done") else "length",
            version=version if self.version is None else self.version,
            turns=tuple(self.turns),
            ended=self.ended,
            world_score=score,
        )


class TurnEngine(Generator):
    """An Engine for several turns; wraps another engine, which does everything except `generate` and `close`."""

    def __init__(
        self, engine: Engine, world: World, tokenizer: Any, eos_ids: Sequence[int], reader: ImageReader | None = None
    ) -> None:
        """reader: of a vision model."""
        self.engine, self.world, self.tokenizer = engine, world, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.separator = TurnSeparator(tokenizer, eos_ids, reader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """Close the environment or tools, and the engine."""
        try:
            self.world.close()
        finally:
            self.engine.close()

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Sample rollouts (`Engine.generate`); a limit counts the tokens of all turns and replies. Environments are
        closed when this returns or raises."""
        check_fits([batch.prompts[p] for p in batch.share], batch.sampling, self.window)
        self.engine.wake()
        longest = min(batch.sampling.turn_tokens or batch.sampling.max_new_tokens, batch.sampling.max_new_tokens)
        sampler = StepSampler(
            self.engine,
            dataclasses.replace(batch, sampling=batch.sampling.model_copy(update={"max_new_tokens": longest})),
            lambda turn, _: derive(batch.seed, "turn", turn) if turn else batch.seed,
        )
        groups: dict[int, dict[int, Rollout]] = {p: {} for p in batch.share}

        def on_complete(place: int, rollout: Rollout) -> None:
            number = sampler.numbers[place]
            group = groups[number // batch.n]
            group[number] = rollout
            if batch.done is not None and len(group) == batch.n:
                batch.done([group[number] for number in sorted(group)])

        return sampler.run([self._rollout(number, batch, sampler) for number in sampler.numbers], on_complete)

    async def _rollout(self, number: int, batch: GenerationBatch, sampler: StepSampler) -> Rollout:
        """Run one rollout from its first turn to its score. An error names the data row, in a note if not in its
        message."""
        place, sampling = number // batch.n, batch.sampling
        row, budget = Trajectory(batch.prompts[place], batch.first_group + place), batch.limit(place)
        episode = self.world.episode(number)
        try:
            await episode.begin(row.prompt.row)
            started = time.monotonic()
            with sampler.member(number) as (draw, _):
                while not row.ended:
                    value, returns = await episode.value(), await episode.returns()
                    limit = min(sampler.batch.sampling.max_new_tokens, budget - row.used)
                    (drawn,) = await draw((SampleQuery(row.ids, limit, row.images, row.prompt.adapter),))
                    late = (
                        sampling.rollout_seconds is not None and time.monotonic() - started > sampling.rollout_seconds
                    )
                    last = len(row.turns) + 1 == sampling.max_turns
                    stop = "time" if late else "turns" if last else ""
                    await self._append_turn(row, drawn, episode, sampling, budget, stop)
                    row.turns[-1] = dataclasses.replace(row.turns[-1], mc_value=value, returns=returns)
            return row.rollout(self.engine.version, await episode.score())
        except ToolError as error:  # the environment breaks its contract
            raise error.at(source_locations.describe_row(row.prompt.uid)) from error
        except Exception as error:
            error.add_note(
                f"in turn {len(row.turns) + 1} of a rollout of {source_locations.describe_row(row.prompt.uid)}"
            )
            raise
        finally:
            await episode.close()

    async def _append_turn(
        self, row: Trajectory, drawn: Sampled, episode: Episode, sampling: Sampling, budget: int, stop: str
    ) -> None:
        """Add a turn and its reply to the rollout. budget: maximum number of tokens of the rollout. stop: why this turn
        is the last one; "" if it is not."""
        room = budget - row.used
        segment = drawn.first(room)
        row.version = drawn.version if row.version is None else row.version
        if not set(segment.versions or ()) - {row.version}:
            segment = dataclasses.replace(segment, versions=None)
        row.segments.append(segment)
        if drawn.finish == "length" or len(drawn.ids) > room:
            row.ended = "tokens"
            row.turns.append(Turn(self._text(segment.ids)))
            return
        reply = await episode.reply(self._decode_turn(drawn.ids))
        row.ended = reply.ended or stop
        shown = None
        if not row.ended:
            segment = self.separator.segment(row.segments[-1].ids[-1], reply.messages, sampling.reply_tokens)
            if row.used + len(segment.ids) >= budget:
                row.ended = "tokens"
            else:
                row.segments.append(segment)
                shown = "\n".join(str(m["content"]) for m in reply.messages)
        row.turns.append(
            Turn(self._text(drawn.ids), reply.calls, shown, reply.reward, seconds=reply.seconds, action=reply.action)
        )

    def _text(self, ids: Sequence[int]) -> str:
        return thoughts.decode(self.tokenizer, [list(ids)])[0]

    def _decode_turn(self, ids: Sequence[int]) -> str:
        """Return a turn's text as the environment reads it: with special tokens, which may mark a call, but without the
        end token, and with thoughts as `<think>...</think>`."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.eos_ids else list(ids)
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return thoughts.thought_format(self.tokenizer).standardize(text)


def with_turns(engine: Engine, offer: ToolSet | None, loaded: LoadedModel) -> Engine:
    """Return the engine, wrapped in a TurnEngine if the recipe has tools or an environment."""
    if offer is None:
        return engine
    try:
        world = offer.world()
        return TurnEngine(engine, world, loaded.tokenizer, loaded.eos_ids, loaded.images)  # type: ignore[return-value]
    except BaseException:
        engine.close()
        raise


def check_start(offer: ToolSet | None, tokenizer: Any) -> None:
    """Check, before a model is loaded, that the chat template suits several turns. Raises DataError."""
    if offer is not None:
        check_template(tokenizer, offer.reply_role, offer.earlier_turns)
