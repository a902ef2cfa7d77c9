"""DeepSearch: Monte Carlo tree search within a step, over segments of a completion, valued by right and wrong ends."""

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
    """A tree of segments sampled from a prompt: lists by node; node 0 is the prompt, every other node has a segment."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.parent, self.depth, self.nll = [-1], [0], [0.0]
        self.value, self.visits = [0.0], [0.0]
        self.sampled: list[Sampled | None] = [None]
        self.grown = [False]  # whether the node has children
        self.ended = [False]  # whether the node ended by EOS or at a limit

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, parent: int, sampled: Sampled) -> int:
        """Add a child of `parent`; returns its node number."""
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
        """Return the nodes from the first below the root to this one; [] for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def segments(self, node: int) -> tuple[Segment, ...]:
        """Return the sampled segments of the path to a node."""
        return tuple(one.segment for number in self.path(node) if (one := self.sampled[number]) is not None)

    def ids(self, node: int) -> tuple[int, ...]:
        """Return the prompt and the tokens of the path to a node."""
        return (*self.prompt, *(i for segment in self.segments(node) for i in segment.ids))

    def path_nll(self, node: int) -> float:
        """Compute the mean -logp of the tokens of the path to a node."""
        logps = [logp for segment in self.segments(node) for logp in segment.logps or ()]
        return -statistics.fmean(logps) if logps else 0.0

    def row(self, node: int, trained: Sequence[int] | None = None) -> Row:
        """Return the path to a node as a row, with the current values. trained: nodes to train on; None = all."""
        path, last = self.path(node), self.sampled[node]
        assert last is not None
        segments = [
            segment if trained is None or number in trained else Segment("injected", segment.ids)
            for number, segment in zip(path, self.segments(node), strict=True)
        ]
        nodes = tuple(Node(number, self.value[number], self.visits[number]) for number in path)
        return Row(self.prompt, tuple(segments), last.finish, nodes=nodes)

    def back_up(self, node: int, z: float, floor: float) -> None:
        """Back up the result z of a path along its nodes (`tree_values.back_up`)."""
        found = back_up(self.parent, self.depth, self.value, self.visits, [(node, z)], floor=floor)
        self.value, self.visits = found.value, found.visits

    def rows(self, ends: Sequence[int], shared_prefix: Literal["once", "each"]) -> list[Row]:
        """Return the paths to `ends`, in order. once: a node is trained on only in the first path that contains it."""
        if shared_prefix == "each":
            return [self.row(end) for end in ends]
        seen: set[int] = set()
        rows: list[Row] = []
        for end in ends:
            fresh = [node for node in self.path(end) if node not in seen]
            seen.update(fresh)
            rows.append(self.row(end, fresh))
        return rows


async def grow(tree: Tree, node: int, asked: Asked, *, width: int, segment_tokens: int, max_depth: int) -> list[int]:
    """Sample `width` children of a node; returns their numbers. A child has ended if it stopped by EOS, used up the
    path's `max_new_tokens`, or is at max_depth."""
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


def classify_end(grade: Grade, finish: str) -> int:
    """Return 1 = right, -1 = wrong, 0 = unfinished: not judged, or truncated and not right."""
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
    """DeepSearch: grows a tree of segments from a prompt; its paths are the rows, one group per tree.

    A node gets `width` children of at most segment_tokens tokens. While none has ended, the search continues with the
    child of the highest UCT (c). When some have ended, rewards say which are right; the most certain right end (else
    wrong, else unfinished) is backed up as 1, -1 or `unfinished`, and the search continues at the best node of the
    frontier (lambda1 to lambda3). It ends with `paths` paths, at max_nodes, or when no node can grow; max_depth and
    rollout.max_new_tokens limit a path. A row carries the values of its nodes (`advantage: tree_steps`).

    shared_prefix: `once` trains the tokens of a node only in the first row that contains it, `each` in all of them.
    reuse_below: if a prompt's share of right paths is above 0 and at most this value, its right paths that were not
    truncated are stored. When the prompt comes again, there is no search: the stored paths fill the first slots of
    `direct` rollouts, and the others are sampled whole. 0 = no store. stored: maximum number of prompts in the store,
    the newest ones, each with its newest direct - 1 distinct answers.
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
        """Return the paths of one tree, or, for a prompt in the store, stored and new rollouts."""
        known = (asked.memory or {}).get(str(asked.row.get("uid", "")))
        return await self.search(asked) if not known else await self.reuse(asked, known)

    async def reuse(self, asked: Asked, known: Sequence[Sequence[int]]) -> list[Row]:
        """Return the stored right answers as given rows, and whole completions up to `direct` rows. Each is a path of
        one node, whose value is its outcome."""
        kept = list(known)[-max(1, self.direct - 1) :]
        count = max(1, self.direct - len(kept))
        fresh = [
            Row(asked.prompt, (completion.segment,), completion.finish)
            for completion in await asked.sample([asked.prompt] * count)
        ]
        given = [Row(asked.prompt, (Segment("given", tuple(ids)),), "stop") for ids in kept]
        ends = [1] * len(given)
        ends += [classify_end(grade, row.finish) for grade, row in zip(await asked.grade(fresh), fresh, strict=True)]
        return [
            replace(row, nodes=(Node(number, float(end or self.unfinished), 1.0),))
            for number, (row, end) in enumerate(zip([*given, *fresh], ends, strict=True), 1)
        ]

    def learn(self, memory: Any, ended: Sequence[Ended], step: int) -> Remembered:
        """Update the store after a step: rarely solved prompts are stored with their right answers; a prompt that is
        solved more often is removed."""
        del step
        store: dict[str, list[list[int]]] = dict(memory or {})
        by_prompt: dict[str, list[Ended]] = {}
        for row in ended:
            if not row.given:
                by_prompt.setdefault(row.uid, []).append(row)
        for uid, rows in by_prompt.items() if self.reuse_below else ():
            right = [row for row in rows if row.correct]
            if len(right) / len(rows) > self.reuse_below:
                store.pop(uid, None)
            elif whole := [row.ids for row in right if row.finish == "stop"]:
                known = dict.fromkeys([*map(tuple, store.pop(uid, [])), *whole])
                store[uid] = [list(ids) for ids in known][-max(1, self.direct - 1) :]
        reused = len({row.uid for row in ended if row.given})
        newest = dict(list(store.items())[-self.stored :])
        return Remembered(newest, {"store/prompts": len(newest), "store/reused": reused} if self.reuse_below else {})

    async def search(self, asked: Asked) -> list[Row]:
        """Grow one tree and return its paths as rows."""
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
                spare |= {n: classify_end(g, r.finish) for n, g, r in zip(reached, grades, rows, strict=True)}
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
        """Return the node of the frontier where the search continues; None if there is none."""
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
