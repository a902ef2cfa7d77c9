"""Rollouts of several turns, on tokens: the model writes a turn, tools or an environment reply, and so on.

`TurnEngine` wraps another engine. In each turn, one call of the inner engine continues all unfinished rollouts, and one
call of the world answers them. The model's tokens stay as they were sampled. Replies are segments of their own, which
have no loss. An engine that seeds a rollout by its place in the step gives it the same tokens whichever other rollouts
are still unfinished.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.batch import Prompt, Rollout, Segment, Turn
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.engine import Engine
from posttrain.rollout.template import Between, check_template
from posttrain.seeds import derive
from posttrain.tools.worlds import Reply, World

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel
    from posttrain.tools.offer import Offer


@dataclass
class Trajectory:
    """An unfinished rollout. used: its tokens after the prompt."""

    prompt: Prompt
    group: int
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""
    version: int | None = None  # of its first turn

    @property
    def used(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    def so_far(self) -> Prompt:
        """The prompt of the next turn: everything so far."""
        return dataclasses.replace(self.prompt, ids=self.prompt.ids + tuple(i for s in self.segments for i in s.ids))

    def rollout(self, version: int, score: float | None) -> Rollout:
        """The finished rollout: its text is that of the model's turns, one below the other."""
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


class TurnEngine:
    """An Engine for several turns around another engine, which does everything but `generate` and `close`."""

    def __init__(self, engine: Engine, world: World, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self.engine, self.world, self.tokenizer = engine, world, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.between = Between(tokenizer, eos_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        """Close the world and the engine."""
        try:
            self.world.close()
        finally:
            self.engine.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        seed: int,
        first_group: int = 0,
        logprobs: bool | int = True,
        share: Sequence[int] | None = None,
        done: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """See `Engine.generate`; `done` is never called. Environments are closed when this returns or raises."""
        del done
        numbers = range(len(prompts)) if share is None else share
        mine = [p * n + i for p in numbers for i in range(n)]
        rows = [Trajectory(prompts[r // n], first_group + r // n) for r in range(len(prompts) * n)]
        try:
            self.world.begin({r: rows[r].prompt.row for r in mine})
            self._run(rows, mine, prompts, n, sampling, seed, logprobs, share)
            scores = self.world.end()
        finally:
            self.world.end()
        return [rows[r].rollout(self.engine.version, scores.get(r)) for r in mine]

    def _run(
        self,
        rows: Sequence[Trajectory],
        mine: Sequence[int],
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        logprobs: bool | int,
        share: Sequence[int] | None,
    ) -> None:
        """Generate turn after turn until all rollouts of `mine` have ended."""
        limit = min(sampling.turn_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
        one = sampling.model_copy(update={"max_new_tokens": limit})
        started = time.monotonic()
        live = list(mine)
        for number in range(sampling.max_turns):
            values = self.world.values(live)
            if number == 0:  # each prompt is read once for its n completions
                drawn = self.engine.generate(prompts, n, one, seed=seed, logprobs=logprobs, share=share)
            else:
                drawn = self.engine.generate(
                    [row.so_far() if not row.ended else row.prompt for row in rows],
                    1,
                    one,
                    seed=derive(seed, "turn", number),
                    logprobs=logprobs if logprobs is True else int(logprobs) * n,
                    share=live,
                    limits=[1 if row.ended else min(limit, sampling.max_new_tokens - row.used) for row in rows],
                )
            late = sampling.rollout_seconds is not None and time.monotonic() - started > sampling.rollout_seconds
            stop = "time" if late else "turns" if number + 1 == sampling.max_turns else ""
            self._take(rows, dict(zip(live, drawn, strict=True)), sampling, stop)
            for r, value in values.items():
                rows[r].turns[-1] = dataclasses.replace(rows[r].turns[-1], mc_value=value)
            live = [r for r in live if not rows[r].ended]
            if not live:
                return

    def _take(self, rows: Sequence[Trajectory], drawn: dict[int, Rollout], sampling: Sampling, stop: str) -> None:
        """Add a turn and its reply to each rollout. stop: why this turn is the last one, "" if it is not."""
        texts: dict[int, str] = {}
        for r, turn in drawn.items():
            cut = add_model_turn(rows[r], turn, sampling.max_new_tokens)
            if turn.finish == "length" or cut:
                rows[r].ended = "tokens"
                rows[r].turns.append(Turn(self._text(rows[r].segments[-1].ids)))
            else:
                texts[r] = self._written(turn.ids)
        for r, reply in self.world.reply(texts).items() if texts else ():
            self._reply(rows[r], reply, drawn[r].text, sampling, stop)

    def _reply(self, row: Trajectory, reply: Reply, text: str, sampling: Sampling, stop: str) -> None:
        row.ended = reply.ended or stop
        shown = None
        if not row.ended:
            ids = self.between.tokens(row.segments[-1].ids[-1], reply.messages, sampling.reply_tokens)
            if row.used + len(ids) >= sampling.max_new_tokens:
                row.ended = "tokens"
            else:
                row.segments.append(Segment("tool", ids))
                shown = "\n".join(str(m["content"]) for m in reply.messages)
        row.turns.append(Turn(text, reply.calls, shown, reply.reward))

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _written(self, ids: Sequence[int]) -> str:
        """A turn as the world reads it: with special tokens, which may mark a call, but without the closing one."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.eos_ids else list(ids)
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def add_model_turn(row: Trajectory, turn: Rollout, budget: int) -> bool:
    """Append the sampled turn, cut to what the token budget leaves. Returns whether it was cut."""
    segment, room = turn.segments[0], budget - row.used
    cut = len(segment.ids) > room
    row.version = turn.version if row.version is None else row.version
    logps = None if segment.logps is None else segment.logps[:room]
    versions = turn.versions[:room] if set(turn.versions) - {row.version} else None
    row.segments.append(Segment("model", segment.ids[:room], logps, versions))
    return cut


def turning(engine: Engine, offer: Offer | None, loaded: LoadedModel) -> Engine:
    """The engine; wrapped in a TurnEngine if the recipe has tools or an environment."""
    if offer is None:
        return engine
    try:
        return TurnEngine(engine, offer.world(), loaded.tokenizer, loaded.eos_ids)  # type: ignore[return-value]
    except BaseException:
        engine.close()
        raise


def check_start(offer: Offer | None, tokenizer: Any) -> None:
    """Check, before a model loads, that the chat template suits several turns. Raises DataError."""
    if offer is not None:
        check_template(tokenizer, offer.reply_role, offer.earlier_turns)
