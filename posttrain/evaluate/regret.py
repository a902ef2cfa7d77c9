"""Counterfactual regret minimisation (Zinkevich et al. 2007): finite games of two sides, one of which gets what the
other loses, with chance, hidden information and any number of players a side.

A game is a tree of `Ended`, `Chance` and `Decision`. What a player knows at a decision is its `state`: decisions with
the same state have the same moves and one policy. `empirical_game` makes the tree that recorded games span.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Policy = dict[Hashable, dict[Hashable, float]]  # state -> move -> number


@dataclass(frozen=True)
class Ended:
    """The end of a game. payoff: of side 1; side -1 gets the negative."""

    payoff: float


@dataclass(frozen=True)
class Chance:
    """What nobody decides. outcomes: (probability, what follows)."""

    outcomes: tuple[tuple[float, Node], ...]


@dataclass(frozen=True)
class Decision:
    """A move of a player (from 0) for a side (1 or -1). state: all that the player knows. moves: what follows each."""

    player: int
    side: int
    state: Hashable
    moves: Mapping[Hashable, Node]


Node = Ended | Chance | Decision


class Solved(NamedTuple):
    """policy: state -> move -> probability, the average over iterations. values: state -> move -> expected payoff of
    the mover's side for that move, if all play the policy; None where the others never let the state come. payoff: of
    side 1, if all play the policy."""

    policy: Policy
    values: dict[Hashable, dict[Hashable, float | None]]
    payoff: float


def minimise_regret(game: Node, iterations: int) -> Solved:
    """`iterations` rounds of regret matching in which all players move on together.

    With one player a side the average policy comes to an equilibrium like 1 / sqrt(iterations); with several it is a
    best effort, as for every game of more than two players. Raises ValueError for a state with different moves.
    """
    nodes = [node for node in _iterate_nodes(game) if isinstance(node, Decision)]
    moves: dict[Hashable, list[Hashable]] = {}
    for node in nodes:
        if moves.setdefault(node.state, list(node.moves)) != list(node.moves):
            raise ValueError(f"decisions of the state {node.state!r} have different moves")
    reach = (1.0,) * (1 + max((node.player for node in nodes), default=-1))
    regrets: Policy = {state: dict.fromkeys(names, 0.0) for state, names in moves.items()}
    played: Policy = {state: dict.fromkeys(names, 0.0) for state, names in moves.items()}
    for _ in range(iterations):
        policy = {state: match_regrets(own) for state, own in regrets.items()}
        for visit in _visit_decisions(game, policy, reach):
            state, side = visit.node.state, visit.node.side
            for move, payoff in visit.payoffs.items():
                regrets[state][move] += visit.others * side * (payoff - visit.payoff)
                played[state][move] += visit.own * policy[state][move]
    average = {state: normalise(own) for state, own in played.items()}
    return Solved(average, _move_values(game, average, reach), _expected_payoff(game, average))


def match_regrets(regrets: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Probabilities in proportion to positive regrets; the same for all moves where there are none."""
    return normalise({move: max(0.0, regret) for move, regret in regrets.items()})


def normalise(weights: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Weights that add up to 1; equal ones where all are 0."""
    total = sum(weights.values())
    return {move: weight / total if total > 0 else 1 / len(weights) for move, weight in weights.items()}


class _DecisionVisit(NamedTuple):
    """A decision in a walk through the tree. own, others: the mover's part in the probability of coming there, and that
    of chance and all others. payoffs: of side 1 after each move; payoff: under the policy."""

    node: Decision
    own: float
    others: float
    payoffs: dict[Hashable, float]
    payoff: float


def _visit_decisions(game: Node, policy: Policy, reach: tuple[float, ...]) -> list[_DecisionVisit]:
    found: list[_DecisionVisit] = []

    def walk(node: Node, chance: float, reach: tuple[float, ...]) -> float:
        if isinstance(node, Ended):
            return node.payoff
        if isinstance(node, Chance):
            return sum(share * walk(below, chance * share, reach) for share, below in node.outcomes)
        own, mover = policy[node.state], node.player
        payoffs = {
            move: walk(below, chance, (*reach[:mover], reach[mover] * own[move], *reach[mover + 1 :]))
            for move, below in node.moves.items()
        }
        payoff = sum(own[move] * value for move, value in payoffs.items())
        others = chance
        for player, share in enumerate(reach):
            others *= 1.0 if player == mover else share
        found.append(_DecisionVisit(node, reach[mover], others, payoffs, payoff))
        return payoff

    walk(game, 1.0, reach)
    return found


def _move_values(game: Node, policy: Policy, reach: tuple[float, ...]) -> dict[Hashable, dict[Hashable, float | None]]:
    sums: dict[Hashable, dict[Hashable, float]] = defaultdict(lambda: defaultdict(float))
    weights: dict[Hashable, float] = defaultdict(float)
    for visit in _visit_decisions(game, policy, reach):
        weights[visit.node.state] += visit.others
        for move, payoff in visit.payoffs.items():
            sums[visit.node.state][move] += visit.others * visit.node.side * payoff
    return {
        state: {move: total / weights[state] if weights[state] > 0 else None for move, total in own.items()}
        for state, own in sums.items()
    }


def _expected_payoff(node: Node, policy: Policy) -> float:
    if isinstance(node, Ended):
        return node.payoff
    if isinstance(node, Chance):
        return sum(share * _expected_payoff(below, policy) for share, below in node.outcomes)
    return sum(policy[node.state][move] * _expected_payoff(below, policy) for move, below in node.moves.items())


def _iterate_nodes(node: Node) -> Iterator[Node]:
    yield node
    below = (
        ()
        if isinstance(node, Ended)
        else [n for _, n in node.outcomes]
        if isinstance(node, Chance)
        else node.moves.values()
    )
    for one in below:
        yield from _iterate_nodes(one)


class Move(NamedTuple):
    """A move of a recorded game: who made it for which side (1 or -1), knowing what, and which."""

    player: int
    side: int
    state: Hashable
    move: Hashable


class Played(NamedTuple):
    """A recorded game. payoff: of side 1."""

    moves: tuple[Move, ...]
    payoff: float


def empirical_game(games: Sequence[Played]) -> Node:
    """The game that recorded ones span: after the same moves, what comes next is chance in the shares that were seen.

    A move that its state has seen, but not after these moves, ends the game with the mean payoff of the games in which
    it was made in that state.
    """
    payoffs: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for game in games:
        for one in game.moves:
            payoffs[one.state][one.move].append(game.payoff)
    ends = {
        state: {move: Ended(_mean(found)) for move, found in sorted(own.items(), key=lambda item: repr(item[0]))}
        for state, own in payoffs.items()
    }
    return _build_tree(games, 0, ends)


def _build_tree(games: Sequence[Played], depth: int, ends: Mapping[Hashable, Mapping[Hashable, Ended]]) -> Node:
    by_next: dict[tuple[int, int, Hashable] | None, list[Played]] = {}
    for game in games:
        coming = game.moves[depth][:3] if depth < len(game.moves) else None
        by_next.setdefault(coming, []).append(game)
    outcomes = tuple((len(own) / len(games), _build_node(coming, own, depth, ends)) for coming, own in by_next.items())
    return outcomes[0][1] if len(outcomes) == 1 else Chance(outcomes)


def _build_node(
    coming: tuple[int, int, Hashable] | None,
    games: Sequence[Played],
    depth: int,
    ends: Mapping[Hashable, Mapping[Hashable, Ended]],
) -> Node:
    if coming is None:
        return Ended(_mean([game.payoff for game in games]))
    player, side, state = coming
    by_move: dict[Hashable, list[Played]] = {}
    for game in games:
        by_move.setdefault(game.moves[depth].move, []).append(game)
    moves = {
        move: _build_tree(by_move[move], depth + 1, ends) if move in by_move else end
        for move, end in ends[state].items()
    }
    return Decision(player, side, state, moves)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
