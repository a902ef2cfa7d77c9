"""Agent-R: Monte Carlo tree search over an agent's turns in an environment."""

from __future__ import annotations

import copy
from typing import Any

from posttrain.batch import Node, Segment, Turn
from posttrain.errors import ToolError
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row
from posttrain.shapes.tree_values import uct_scores


class EpisodeTree:
    """A tree of turns, each taken in a copy of an environment: lists by node; node 0 is the initial state."""

    def __init__(self, prompt: tuple[int, ...], world: Any) -> None:
        self.prompt = prompt
        self.parent, self.worlds = [-1], [world]
        self.segments: list[tuple[Segment, ...]] = [()]  # the turn, and the reply to it
        self.turns: list[Turn | None] = [None]
        self.over = [False]
        self.value, self.visits = [0.0], [0.0]
        self.children: list[list[int]] = [[]]

    def add(self, parent: int, world: Any, segments: tuple[Segment, ...], turn: Turn, *, over: bool) -> int:
        """Add a turn as a child of `parent`; returns its node number."""
        node = len(self.parent)
        self.parent.append(parent)
        self.worlds.append(world)
        self.segments.append(segments)
        self.turns.append(turn)
        self.over.append(over)
        self.value.append(0.0)
        self.visits.append(0.0)
        self.children.append([])
        self.children[parent].append(node)
        return node

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first turn to this one; [] for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def ids(self, node: int) -> tuple[int, ...]:
        """Return the prompt and all tokens of the path to a node."""
        return (*self.prompt, *(i for number in self.path(node) for s in self.segments[number] for i in s.ids))

    def back_up(self, node: int, value: float) -> None:
        """Add the score of a path that ends at `node` to all nodes of the path."""
        for number in (*self.path(node), 0):
            self.value[number] += value
            self.visits[number] += 1

    def select(self, c: float) -> int | None:
        """Descend along the children of the highest UCT (unvisited ones first) to a node without children and return
        it; None if all nodes are closed."""
        done = self.find_closed()
        if done[0]:
            return None
        node = 0
        while open_ := [n for n in self.children[node] if not done[n]]:
            fresh = [n for n in open_ if not self.visits[n]]
            if fresh:
                return fresh[0]
            family = [node, *open_]
            values, visits = [self.value[n] for n in family], [self.visits[n] for n in family]
            scores = uct_scores([-1, *(0 for _ in open_)], values, visits, c=c)[1:]
            node = open_[max(range(len(open_)), key=lambda i: (scores[i] or 0.0, -i))]
        return node

    def find_closed(self) -> list[bool]:
        """Return for each node whether it is over or all nodes below it are."""
        done = list(self.over)
        for node in reversed(range(len(done))):
            done[node] = done[node] or (bool(self.children[node]) and all(done[n] for n in self.children[node]))
        return done

    def row(self, node: int, score: float | None) -> Row:
        """Return the path to a final node as a row, with its turns and its score from the environment."""
        path = self.path(node)
        nodes = tuple(self.node(n) for n in path for _ in self.segments[n])
        segments = tuple(s for n in path for s in self.segments[n])
        turns = tuple(turn for n in path if (turn := self.turns[n]) is not None)
        return Row(self.prompt, segments, "stop", nodes=nodes, turns=turns, world_score=score,
                   text="\n".join(turn.text for turn in turns))  # fmt: skip

    def node(self, number: int) -> Node:
        """Return a node with the mean score of the paths through it."""
        return Node(number, self.value[number] / max(self.visits[number], 1.0), self.visits[number])


@register(
    "shape",
    "episodes",
    paper="2501.11425",
    needs=("own_group", "tree", "world"),
    note="The exploration constant, the width and the number of paths were not confirmed; the paper's depth is 20.",
)
async def episodes(
    asked: Asked,
    *,
    width: int = 4,
    paths: int = 8,
    max_turns: int = 20,
    turn_tokens: int = 128,
    reply_tokens: int = 512,
    c: float = 0.25,
) -> list[Row]:
    """Agent-R: Monte Carlo tree search in an environment, whose branches are turns of the policy.

    The search descends from the initial state along the children of the highest V/N + c sqrt(ln N_parent / N) to a turn
    without children (V: sum of the scores of a turn's paths, N: its visits), tries `width` turns there in copies of the
    environment (`copy.deepcopy`), and plays the first of them to its end, one turn at a time. The environment's
    `score()` is added along the path. The search ends with `paths` paths, or when all nodes have ended. A path also
    ends after max_turns turns, or when max_new_tokens are used.

    Rows are the paths, with their turns. For `generate` with `tree` and an `environment`.
    """
    assert asked.world is not None and asked.reply is not None
    world = asked.world()
    world.reset(asked.row)
    tree = EpisodeTree(asked.prompt, world)
    rows: list[tuple[int, float | None]] = []
    try:
        while len(rows) < paths and (node := tree.select(c)) is not None:
            count = width
            while not tree.over[node]:
                children = await take_turns(asked, tree, node, count, turn_tokens, reply_tokens, max_turns)
                node, count = children[0], 1
                for child in children[1:]:  # turns that end the episode immediately are paths too
                    if tree.over[child]:
                        rows.append((child, score_end(tree, child)))
            rows.append((node, score_end(tree, node)))
    finally:
        for made in tree.worlds:
            made.close()
    return [tree.row(node, score) for node, score in rows]


def score_end(tree: EpisodeTree, node: int) -> float | None:
    """Return the environment's score of a finished path and add it to the path's nodes; None counts as 0."""
    score = tree.worlds[node].score()
    tree.back_up(node, float(score or 0.0))
    return None if score is None else float(score)


async def take_turns(
    asked: Asked, tree: EpisodeTree, node: int, count: int, turn_tokens: int, reply_tokens: int, max_turns: int
) -> list[int]:
    """Sample `count` turns after a node, each in a copy of its environment; returns their nodes."""
    assert asked.reply is not None
    ids = tree.ids(node)
    left = asked.max_new_tokens - (len(ids) - len(tree.prompt))
    drawn = await asked.sample([ids] * count, min(turn_tokens, left))
    nodes_added = []
    for completion in drawn:
        world = copy.deepcopy(tree.worlds[node])
        text = asked.text(completion.ids)
        if completion.finish == "length":  # a truncated turn is not acted on
            nodes_added.append(tree.add(node, world, (completion.segment,), Turn(text), over=True))
            continue
        observation, done, *reward = world.step(asked.decode(completion.ids_without_eos))
        if not done and not isinstance(observation, str):
            raise ToolError(f"a tree is grown on texts, and a step showed {type(observation).__name__}")
        segments: tuple[Segment, ...] = (completion.segment,)
        shown: str | None = None
        over = done or len(tree.path(node)) + 1 == max_turns
        if not over:
            reply = asked.reply(completion.ids[-1], str(observation), reply_tokens)
            over = len(ids) - len(tree.prompt) + len(completion.ids) + len(reply) >= asked.max_new_tokens
            if not over:
                segments, shown = (completion.segment, Segment("tool", reply)), str(observation)
        turn = Turn(text, reply=shown, reward=float(reward[0] or 0.0) if reward else None)
        nodes_added.append(tree.add(node, world, segments, turn, over=over))
    return nodes_added
