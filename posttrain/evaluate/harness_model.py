"""A posttrain model for lm-eval: answers from posttrain's engines, likelihoods from lm-eval's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from posttrain import terminal
from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, count_noun
from posttrain.models.load import LoadedModel
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.stages import HarnessRecipe
from posttrain.rollout.engine import needed_length
from posttrain.rollout.make_engine import make_engine, start_note
from posttrain.run.progress import Progress
from posttrain.seeds import derive
from posttrain.verify.extract import after_think

# lm-eval's names of the token limit; the first one set is used
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DEFAULT_LIMIT = 256  # tokens, lm-eval's default
DEFAULT_WINDOW = 2048  # lm-eval's default for a model without a known window
SAMPLING_KEYS = ("until", "do_sample", "temperature", "top_p", "top_k", *LIMIT_KEYS)  # of a task, others are ignored


class HarnessModel(HFLM):  # type: ignore[misc]
    """Model that lm-eval queries. chat: prompts are rendered by the chat template, with all special tokens."""

    def __init__(self, loaded: LoadedModel, recipe: HarnessRecipe, *, chat: bool, scratch: Path) -> None:
        super().__init__(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            backend="causal",
            batch_size=recipe.engine.batch_size,
            max_length=loaded.window or DEFAULT_WINDOW,
            add_bos_token=False if chat else None,
        )
        self.loaded, self.recipe, self.scratch = loaded, recipe, scratch
        self.answers: list[Rollout] = []

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to requests; requests with equal sampling settings are batched.

        The `args` of a request are a prompt and sampling settings.
        """
        del disable_tqdm
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        asked = [self._build_prompts(requests, numbers) for numbers in kinds.values()]
        longest = max(needed_length(prompts, sampling) for prompts, sampling, _ in asked)
        if note := start_note(self.recipe.engine):
            terminal.note(note)
        texts: dict[int, str] = {}
        engine = make_engine(
            self.recipe.engine, self.loaded, scratch=self.scratch, max_len=longest, base_dir=self.recipe.base_dir
        )
        with closing(engine), Progress("harness", len(requests), ("tokens",)) as progress:
            for kind, (numbers, (prompts, sampling, stops)) in enumerate(zip(kinds.values(), asked, strict=True)):
                seed = derive(self.recipe.run.seed, "harness", kind)
                done = self._make_counter(progress, len(texts))
                found = engine.generate(prompts, 1, sampling, seed=seed, logprobs=False, done=done)
                self.answers += found
                texts |= {n: self._text_to_grade(r.text, stops) for n, r in zip(numbers, found, strict=True)}
                progress.update(len(texts), {"tokens": _mean_tokens(found)})
        return [texts[number] for number in range(len(requests))]

    def _build_prompts(
        self, requests: Sequence[Any], numbers: Sequence[int]
    ) -> tuple[list[Prompt], Sampling, list[str]]:
        """Build the prompts of requests with equal settings, their sampling settings, and the texts that end an answer.

        A thought may contain these texts, so with `thought_end` they end the answer only when it is graded.
        """
        how = dict(requests[numbers[0]].args[1])
        if other := sorted(how.keys() - set(SAMPLING_KEYS)):
            terminal.note(f"ignored sampling settings of a task: {', '.join(other)}")
        given = next((int(how[key]) for key in LIMIT_KEYS if how.get(key) is not None), DEFAULT_LIMIT)
        limit = self.recipe.max_new_tokens or given
        until = how.get("until") or []
        stops = [text for text in ([until] if isinstance(until, str) else until) if text]
        do_sample = how.get("do_sample", bool(how.get("temperature")))
        sampling = Sampling(
            temperature=float(how.get("temperature") or 1.0) if do_sample else 0.0,
            top_p=float(how.get("top_p") or 1.0) if do_sample else 1.0,
            top_k=int(how.get("top_k") or 0) if do_sample else 0,
            max_new_tokens=limit,
            stop=[] if self.recipe.thought_end else stops,
        )
        room = self.max_length - limit
        if room < 1:
            raise DataError(
                f"{limit} new tokens leave no room for a prompt in the model's window of {self.max_length}",
                hint=f"write max_new_tokens: {self.max_length // 2}",
            )
        prompts, cut = [], 0
        for number in numbers:
            text = requests[number].args[0]
            ids = self.tok_encode(text)
            cut += len(ids) > room
            prompts.append(Prompt(f"request {number}", {}, text, tuple(ids[-room:])))
        if cut:
            terminal.note(f"{count_noun(cut, 'prompt')} longer than the window leaves room for: cut at the beginning")
        return prompts, sampling, stops

    def _text_to_grade(self, text: str, stops: Sequence[str]) -> str:
        """Return the graded part of an answer: after the thought, before the first text that ends it."""
        if end := self.recipe.thought_end:
            text = after_think(text, end).lstrip()
        for stop in stops:
            text = text.partition(stop)[0]
        return text

    def _make_counter(self, progress: Progress, before: int) -> Callable[[list[Rollout]], None]:
        """Return the callback of an engine that counts finished rollouts in the progress display."""
        finished: list[Rollout] = []

        def on_complete(rollouts: list[Rollout]) -> None:
            finished.extend(rollouts)
            progress.update(before + len(finished), {"tokens": _mean_tokens(finished)})

        return on_complete


def _mean_tokens(rollouts: Sequence[Rollout]) -> float:
    return sum(len(r.sampled_ids) for r in rollouts) / max(1, len(rollouts))
