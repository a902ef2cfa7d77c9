"""Monte Carlo tree search within a step: segments are branches, right and wrong ends say what they are worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.batch import Node, Segment
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Ended, Grade, Remembered, Row, Sampled
from posttrain.shapes.tree_values import back_up, frontier, pick_terminal, uct_scores


class Tree:
    """What was sampled from a prompt: lists by node, of which 0 is the prompt and every other one has a segment."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.parent, self.depth, self.nll = [-1], [0], [0.0]
        self.value, self.visits = [0.0], [0.0]
        self.sampled: list[Sampled | None] = [None]
        self.grown = [False]  # it has children
        self.ended = [False]  # by EOS, or at a limit

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, parent: int, sampled: Sampled) -> int:
        """A child of `parent`; returns its number."""
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.nll.append(-statistics.fmean(sampled.segment.logps or (0.0,)))
        self.value.append(0.0)
        self.visits.append(0.0)
        self.sampled.append(sampled)
        self.grown.append(False)
        self.ended.append(False)
        self.grown[parent] = True
        return len(self) - 1

    def path(self, node: int) -> list[int]:
        """The nodes from the first below the root to this one; [] of the root."""
        found: list[int] = []
        while node > 0:
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def segments(self, node: int) -> tuple[Segment, ...]:
        """What its path has sampled."""
        return tuple(one.segment for number in self.path(node) if (one := self.sampled[number]) is not None)

    def ids(self, node: int) -> tuple[int, ...]:
        """The prompt and the tokens of its path."""
        return (*self.prompt, *(i for segment in self.segments(node) for i in segment.ids))

    def path_nll(self, node: int) -> float:
        """Mean -logp of the tokens of its path."""
        logps = [logp for segment in self.segments(node) for logp in segment.logps or ()]
        return -statistics.fmean(logps) if logps else 0.0

    def row(self, node: int, trained: Sequence[int] | None = None) -> Row:
        """Its path as a row, with the values that the nodes have now. trained: the nodes that are; None = all."""
        path, last = self.path(node), self.sampled[node]
        assert last is not None
        segments = [
            segment if trained is None or number in trained else Segment("injected", segment.ids)
            for number, segment in zip(path, self.segments(node), strict=True)
        ]
        nodes = tuple(Node(number, self.value[number], self.visits[number]) for number in path)
        return Row(self.prompt, tuple(segments), last.finish, nodes=nodes)

    def back_up(self, node: int, z: float, floor: float) -> None:
        """Let the nodes of a path know how it ended: `tree_values.back_up`."""
        found = back_up(self.parent, self.depth, self.value, self.visits, [(node, z)], floor=floor)
        self.value, self.visits = found.value, found.visits

    def rows(self, ends: Sequence[int], shared_prefix: Literal["once", "each"]) -> list[Row]:
        """The paths to `ends`, in order. once: a node is trained in the first of them that has it."""
        if shared_prefix == "each":
            return [self.row(end) for end in ends]
        seen: set[int] = set()
        found: list[Row] = []
        for end in ends:
            fresh = [node for node in self.path(end) if node not in seen]
            seen.update(fresh)
            found.append(self.row(end, fresh))
        return found


async def grow(tree: Tree, node: int, asked: Asked, *, width: int, segment_tokens: int, max_depth: int) -> list[int]:
    """Sample `width` children of a node; returns their numbers. One ends with EOS, with the tokens of the path that
    `max_new_tokens` allows, or at max_depth."""
    prompt = tree.ids(node)
    left = asked.max_new_tokens - (len(prompt) - len(tree.prompt))
    limit = min(segment_tokens, left)
    children = [tree.add(node, sampled) for sampled in await asked.sample([prompt] * width, limit)]
    for child in children:
        sampled = tree.sampled[child]
        assert sampled is not None
        full = len(sampled.ids) >= left or tree.depth[child] >= max_depth
        tree.ended[child] = sampled.finish == "stop" or full
    return children


def status_of(grade: Grade, finish: str) -> int:
    """1 right, -1 wrong, 0 unfinished: cut off before an answer that is right, or not judged."""
    if grade.correct:
        return 1
    return 0 if grade.correct is None or finish == "length" else -1


@register(
    "shape",
    "mcts",
    paper="2509.25454",
    needs=("own_group", "tree", "grades", "rollout_logp"),
    note="Ends that were not backed up count where no node is left to grow. Rounds of hard problems alone are up to "
    "the recipe (`data.select` picks rows by pass rate).",
)
@dataclass(frozen=True, kw_only=True)
class TreeSearch:
    """DeepSearch: a tree of segments grows from a prompt, and its paths are the rows, one group a tree.

    A node gets `width` children of at most segment_tokens tokens. While none has ended, the search goes on with the
    child of the highest UCT (c). Where some have, rewards say which are right; the surest right one (else wrong, else
    unfinished) is backed up as 1, -1 or `unfinished`, and the search goes on where the frontier is best (lambda1 to
    lambda3). It ends with `paths` paths, at max_nodes, or where nothing is left to grow; max_depth limits a path, and
    so does rollout.max_new_tokens. A row has the values of its nodes (`advantage: tree_steps`).

    shared_prefix: `once` trains the tokens of a node in the first row that has it, `each` in all of them.
    reuse_below: of a prompt whose share of right paths is above 0 and not above this, the right ones that no limit
    has cut off are stored. When the prompt comes again, nothing is searched: they take the first places of `direct`
    rollouts, and the others are sampled whole. 0 = no store. stored: prompts that the store holds at most, the newest
    ones, each with its newest direct - 1 different answers.
    """

    segment_tokens: int = 256
    width: int = 8
    max_depth: int = 64
    paths: int = 8
    max_nodes: int = 4096
    c: float = 2.0
    lambda1: float = 0.4
    lambda2: float = 0.4
    lambda3: float = 0.01
    use_uncertainty: bool = False
    floor: float = 0.1
    unfinished: float = 0.0
    shared_prefix: Literal["once", "each"] = "once"
    reuse_below: float = 0.0
    direct: int = 8
    stored: int = 1000

    async def run(self, asked: Asked) -> list[Row]:
        """The paths of one tree, or the rollouts of a prompt that the store knows."""
        known = (asked.memory or {}).get(str(asked.row.get("uid", "")))
        return await self.search(asked) if not known else await self.reuse(asked, known)

    async def reuse(self, asked: Asked, known: Sequence[Sequence[int]]) -> list[Row]:
        """The stored right answers as given rows, and whole completions up to `direct`. Each is a path of one node,
        whose value is how it ended."""
        kept = list(known)[-max(1, self.direct - 1) :]
        count = max(1, self.direct - len(kept))
        fresh = [Row(asked.prompt, (one.segment,), one.finish) for one in await asked.sample([asked.prompt] * count)]
        given = [Row(asked.prompt, (Segment("given", tuple(ids)),), "stop") for ids in kept]
        ends = [1] * len(given)
        ends += [status_of(grade, row.finish) for grade, row in zip(await asked.grade(fresh), fresh, strict=True)]
        return [
            replace(row, nodes=(Node(number, float(end or self.unfinished), 1.0),))
            for number, (row, end) in enumerate(zip([*given, *fresh], ends, strict=True), 1)
        ]

    def learn(self, memory: Any, ended: Sequence[Ended], step: int) -> Remembered:
        """The store after a step: prompts that are seldom solved with their right answers; one that is solved more
        often leaves it."""
        del step
        store: dict[str, list[list[int]]] = dict(memory or {})
        by_prompt: dict[str, list[Ended]] = {}
        for one in ended:
            if not one.given:
                by_prompt.setdefault(one.uid, []).append(one)
        for uid, own in by_prompt.items() if self.reuse_below else ():
            right = [one for one in own if one.correct]
            if len(right) / len(own) > self.reuse_below:
                store.pop(uid, None)
            elif whole := [one.ids for one in right if one.finish == "stop"]:
                known = dict.fromkeys([*map(tuple, store.pop(uid, [])), *whole])
                store[uid] = [list(ids) for ids in known][-max(1, self.direct - 1) :]
        reused = len({one.uid for one in ended if one.given})
        newest = dict(list(store.items())[-self.stored :])
        return Remembered(newest, {"store/prompts": len(newest), "store/reused": reused} if self.reuse_below else {})

    async def search(self, asked: Asked) -> list[Row]:
        """The paths of one tree."""
        tree, ends, spare = Tree(asked.prompt), list[int](), dict[int, int]()  # spare: status of ends not backed up

        def back_up_best(among: Sequence[int]) -> None:
            nodes = list(among)
            best = nodes[pick_terminal([spare[n] for n in nodes], [tree.path_nll(n) for n in nodes])]
            ends.append(best)
            tree.back_up(best, spare.pop(best) or self.unfinished, self.floor)

        node: int | None = 0
        most = max(self.max_nodes, self.width + 1)
        while node is not None and len(ends) < self.paths and len(tree) + self.width <= most:
            children = await grow(
                tree,
                node,
                asked,
                width=self.width,
                segment_tokens=self.segment_tokens,
                max_depth=self.max_depth,
            )
            for child in children:
                tree.visits[child] += not tree.ended[child]
            if reached := [child for child in children if tree.ended[child]]:
                rows = [tree.row(end) for end in reached]
                grades = await asked.grade(rows)
                spare |= {n: status_of(g, r.finish) for n, g, r in zip(reached, grades, rows, strict=True)}
                back_up_best(reached)
                node = self._choose(tree)
            else:
                scores = uct_scores(tree.parent, tree.value, tree.visits, c=self.c)
                node = max(children, key=lambda child: (scores[child] or 0.0, -child))
        while spare and len(ends) < self.paths:
            back_up_best(list(spare))
        if not ends:  # max_nodes came before any end: the newest path, cut off
            deepest = max(range(1, len(tree)), key=lambda n: (tree.depth[n], n))
            spare[deepest] = 0
            back_up_best([deepest])
        return tree.rows(ends, self.shared_prefix)

    def _choose(self, tree: Tree) -> int | None:
        """The node that the search goes on with where some have ended; None if none is left."""
        closed = [float(a or b) for a, b in zip(tree.ended, tree.grown, strict=True)]
        return frontier(
            tree.parent,
            tree.depth,
            tree.value,
            tree.visits,
            closed,
            tree.nll,
            lambda1=self.lambda1,
            lambda2=self.lambda2,
            lambda3=self.lambda3,
            max_depth=self.max_depth,
            use_uncertainty=self.use_uncertainty,
        ).best
