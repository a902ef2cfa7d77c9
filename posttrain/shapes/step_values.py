"""MedS3: a tree of reasoning steps, each valued by its completions; makes data for SFT, pairs and verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from posttrain.batch import Segment
from posttrain.registry import register
from posttrain.shapes.mcts import Tree
from posttrain.shapes.protocol import Asked, Row, Sampled
from posttrain.shapes.tree_values import child_scores, node_value, simulation_counts


class ValueTree(Tree):
    """A tree whose nodes have values from 0 to 1, and are closed once nothing below them remains to be searched."""

    def __init__(self, prompt: tuple[int, ...], rule: Literal["default", "comp"]) -> None:
        super().__init__(prompt)
        self.rule: Literal["default", "comp"] = rule
        self.children: list[list[int]] = [[]]
        self.closed = [False]  # whether nothing below the node remains to be searched

    def add(self, parent: int, sampled: Sampled) -> int:
        child = super().add(parent, sampled)
        self.children.append([])
        self.closed.append(False)
        self.children[parent].append(child)
        return child

    def record(self, node: int, value: float) -> None:
        """Set the value of a new node, and update its ancestors from their children."""
        self.value[node] = value
        self.visits[node] += 1
        above = self.parent[node]
        while above >= 0:
            self.visits[above] += 1
            below = self.children[above]
            values, visits = [self.value[n] for n in below], [self.visits[n] for n in below]
            self.value[above] = node_value(self.value[above], values, visits, rule=self.rule)
            self.closed[above] = all(self.closed[n] for n in below)
            above = self.parent[above]

    def select(self, c: float, unvisited: float) -> int:
        """Descend along the best children from the root to a leaf and return it."""
        node = 0
        while below := self.children[node]:
            scores = child_scores(
                self.visits[node],
                [self.value[n] for n in below],
                [self.visits[n] for n in below],
                [float(self.closed[n]) for n in below],
                c=c,
                unvisited=unvisited,
            )
            node = below[max(range(len(below)), key=lambda i: (scores[i], -i))]
        return node

    def leaves(self) -> list[int]:
        return [node for node in range(1, len(self)) if not self.children[node]]


async def simulate(asked: Asked, tree: Tree, nodes: Sequence[int], base: int) -> tuple[list[float], list[Row]]:
    """Value nodes by completions from each: returns the share of right completions per node, and all completions."""
    counts = simulation_counts([tree.depth[node] for node in nodes], base=base)
    owners = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    drawn = await sample_rest(asked, tree, owners)
    rows = [
        Row(tree.prompt, (*tree.segments(owner), completion.segment), completion.finish)
        for owner, completion in zip(owners, drawn, strict=True)
    ]
    grades = iter(await asked.grade(rows))
    return [sum(bool(next(grades).correct) for _ in range(count)) / count for count in counts], rows


async def sample_rest(asked: Asked, tree: Tree, nodes: Sequence[int]) -> list[Sampled]:
    """Sample one completion from each node to the end. Nodes of equal depth may have paths of different lengths."""
    prompts = [tree.ids(node) for node in nodes]
    completions: dict[int, Sampled] = {}
    for left in sorted({asked.max_new_tokens - len(ids) + len(tree.prompt) for ids in prompts}):
        indices = [i for i, ids in enumerate(prompts) if asked.max_new_tokens - len(ids) + len(tree.prompt) == left]
        drawn = await asked.sample([prompts[i] for i in indices], left)
        completions |= dict(zip(indices, drawn, strict=True))
    return [completions[i] for i in range(len(nodes))]


def cut_step(sampled: Sampled, ends: str, asked: Asked) -> Sampled:
    """Cut a completion after the first `ends` that follows some text; the whole completion if nothing would be cut."""
    text = asked.decode(sampled.ids)
    found = text.find(ends, len(text) - len(text.lstrip())) if ends else -1
    if found < 0:
        return sampled
    count = next(n for n in range(1, len(sampled.ids) + 1) if len(asked.decode(sampled.ids[:n])) >= found + len(ends))
    if count == len(sampled.ids):
        return sampled
    return Sampled(sampled.first(count), "length", sampled.version)


async def try_again(asked: Asked, tree: ValueTree, ends: Sequence[int], text: str) -> list[tuple[int, float]]:
    """Sample a second try after each end that stopped by EOS and leaves room; returns (leaf, 1 or 0 by the rewards).
    The path to the leaf has the end without its last token, then the text, as nodes of their own; all three are
    closed."""
    words, leaves = asked.encode(text), list[int]()
    for end in ends:
        first, above = tree.sampled[end], tree.parent[end]
        assert first is not None
        prompt = (*tree.ids(above), *first.ids_without_eos, *words)
        left = asked.max_new_tokens - (len(tree.ids(above)) - len(tree.prompt)) - len(first.ids_without_eos)
        if first.finish != "stop" or not first.ids_without_eos or left < 1:
            continue
        (again,) = await asked.sample([prompt], left)
        begun = tree.add(above, Sampled(first.first(len(first.ids_without_eos)), "length"))
        inserted = tree.add(begun, Sampled(Segment("injected", words), "length"))
        leaves.append(tree.add(inserted, again))
        for node in (begun, inserted, leaves[-1]):
            tree.closed[node] = True
    grades = await asked.grade([tree.row(leaf) for leaf in leaves])
    return [(leaf, float(bool(grade.correct))) for leaf, grade in zip(leaves, grades, strict=True)]


@register(
    "shape",
    "step_values",
    paper="2501.12051",
    needs=("own_group", "tree", "grades"),
    note=(
        "An end is judged once, by the rewards. The second try at wrong ends (`reflection`) is one completion after a"
        " sentence of ours; how the authors ask for it was not confirmed."
    ),
)
async def step_values(
    asked: Asked,
    *,
    step_tokens: int = 256,
    ends: str = "\n\n",
    width: int = 3,
    base: int = 20,
    max_nodes: int = 60,
    right_ends: int = 4,
    good: float = 0.9,
    backup: Literal["default", "comp"] = "default",
    c: float = 2.0,
    unvisited: float = 5.0,
    reflection: str = "",
) -> list[Row]:
    """MedS3: a tree of reasoning steps, each valued by the share of right completions among those that continue it.

    A step ends after `ends` or step_tokens tokens. The search descends along the children of the highest value + c
    sqrt(ln N_parent / N), N: visits, and gives the leaf `width` next steps, or one completion to the end if its value
    is at least `good`. A new step of depth d is valued by max(base / (d + 1), 5) completions, an end by the rewards;
    values of inner nodes are visit-weighted means over children (backup: `comp` averages this mean with the node's own
    value). The search ends with right_ends right ends, at max_nodes, or when all nodes are closed. reflection: a wrong
    end that stopped by EOS is tried once more after this text, which is inserted and not trained on; "" = never. The
    result of the second try is backed up too.

    Rows are the paths to all leaves; ends are scored. A prompt that every completion solves is one row, without a tree.
    """
    tree = ValueTree(asked.prompt, backup)
    (tree.value[0],), whole = await simulate(asked, tree, [0], base)
    if tree.value[0] == 1:
        return whole[:1]
    finished: set[int] = set()
    right = 0
    while not tree.closed[0] and right < right_ends and len(tree) + width <= max(max_nodes, width + 1):
        node = tree.select(c, unvisited)
        finish_now = node > 0 and tree.value[node] >= good
        if finish_now:
            drawn = await sample_rest(asked, tree, [node])
        else:
            left = asked.max_new_tokens - len(tree.ids(node)) + len(tree.prompt)
            drawn = await asked.sample([tree.ids(node)] * width, min(step_tokens, left))
            drawn = [cut_step(completion, ends, asked) for completion in drawn]
        children = [tree.add(node, step) for step in drawn]
        full = {n for n in children if len(tree.ids(n)) - len(tree.prompt) >= asked.max_new_tokens}
        over = [n for n, step in zip(children, drawn, strict=True) if step.finish == "stop" or finish_now or n in full]
        grades = await asked.grade([tree.row(n) for n in over])
        values = {n: float(bool(grade.correct)) for n, grade in zip(over, grades, strict=True)}
        open_ = [n for n in children if n not in values]
        values |= dict(zip(open_, (await simulate(asked, tree, open_, base))[0] if open_ else [], strict=True))
        finished.update(over)
        for child in children:
            tree.closed[child] = child in finished
            tree.record(child, values[child])
            right += child in finished and values[child] == 1
        wrong = [n for n in over if values[n] == 0] if reflection else []
        for leaf, value in await try_again(asked, tree, wrong, reflection):
            finished.add(leaf)
            tree.record(leaf, value)
            right += value == 1
    return [replace(tree.row(leaf), scored=leaf in finished or not finished) for leaf in tree.leaves()]
