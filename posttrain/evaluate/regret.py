"""Counterfactual regret minimization (Zinkevich et al. 2007) for finite zero-sum games of two sides.

Games may have chance, hidden information and any number of players per side.

A game is a tree of `Ended`, `Chance` and `Decision`. The `state` of a decision is what its player knows: decisions with
the same state have the same moves and share one policy. `empirical_game` builds the tree spanned by recorded games.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

Policy = dict[Hashable, dict[Hashable, float]]  # state -> move -> number


@dataclass(frozen=True)
class Ended:
    """End of a game. payoff: of side 1; side -1 gets the negative."""

    payoff: float


@dataclass(frozen=True)
class Chance:
    """Random event. outcomes: (probability, node that follows)."""

    outcomes: tuple[tuple[float, Node], ...]


@dataclass(frozen=True)
class Decision:
    """Move of a player (from 0) for a side (1 or -1).

    state: all that the player knows. moves: the node after each move.
    """

    player: int
    side: int
    state: Hashable
    moves: Mapping[Hashable, Node]


Node = Ended | Chance | Decision


class Solved(NamedTuple):
    """Result of regret minimization.

    policy: state -> move -> probability, averaged over iterations. values: state -> move -> expected payoff of the
    mover's side for that move if all play the policy; None if the other players never reach the state. payoff: of side
    1 if all play the policy.
    """

    policy: Policy
    values: dict[Hashable, dict[Hashable, float | None]]
    payoff: float


def minimize_regret(game: Node, iterations: int) -> Solved:
    """Run `iterations` rounds of regret matching with simultaneous updates of all players.

    With one player per side the average policy approaches an equilibrium at rate 1 / sqrt(iterations); with more
    players there is no guarantee, as in every game of more than two players. Raises ValueError for a state with
    different moves.
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
        policy = {state: match_regrets(by_move) for state, by_move in regrets.items()}
        for visit in _visit_decisions(game, policy, reach):
            state, side = visit.node.state, visit.node.side
            for move, payoff in visit.payoffs.items():
                regrets[state][move] += visit.other_reach * side * (payoff - visit.payoff)
                played[state][move] += visit.mover_reach * policy[state][move]
    average = {state: normalize(by_move) for state, by_move in played.items()}
    return Solved(average, _move_values(game, average, reach), _expected_payoff(game, average))


def match_regrets(regrets: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Return probabilities proportional to positive regrets; uniform if there are none."""
    return normalize({move: max(0.0, regret) for move, regret in regrets.items()})


def normalize(weights: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Scale weights to a sum of 1; uniform if all are 0."""
    total = sum(weights.values())
    return {move: weight / total if total > 0 else 1 / len(weights) for move, weight in weights.items()}


class _DecisionVisit(NamedTuple):
    """A decision visited in a walk through the tree.

    mover_reach, other_reach: the mover's factor of the probability of reaching it, and that of chance and all other
    players. payoffs: of side 1 after each move; payoff: under the policy.
    """

    node: Decision
    mover_reach: float
    other_reach: float
    payoffs: dict[Hashable, float]
    payoff: float


def _visit_decisions(game: Node, policy: Policy, reach: tuple[float, ...]) -> list[_DecisionVisit]:
    """Return a visit for each decision of the game, with payoffs under the policy."""
    visits: list[_DecisionVisit] = []

    def walk(node: Node, chance: float, reach: tuple[float, ...]) -> float:
        if isinstance(node, Ended):
            return node.payoff
        if isinstance(node, Chance):
            return sum(share * walk(below, chance * share, reach) for share, below in node.outcomes)
        probabilities, mover = policy[node.state], node.player
        payoffs = {
            move: walk(below, chance, (*reach[:mover], reach[mover] * probabilities[move], *reach[mover + 1 :]))
            for move, below in node.moves.items()
        }
        payoff = sum(probabilities[move] * value for move, value in payoffs.items())
        others = chance
        for player, share in enumerate(reach):
            others *= 1.0 if player == mover else share
        visits.append(_DecisionVisit(node, reach[mover], others, payoffs, payoff))
        return payoff

    walk(game, 1.0, reach)
    return visits


def _move_values(game: Node, policy: Policy, reach: tuple[float, ...]) -> dict[Hashable, dict[Hashable, float | None]]:
    """Return the expected payoff of each move at each state for the mover's side, weighted by the others' reach."""
    sums: dict[Hashable, dict[Hashable, float]] = defaultdict(lambda: defaultdict(float))
    weights: dict[Hashable, float] = defaultdict(float)
    for visit in _visit_decisions(game, policy, reach):
        weights[visit.node.state] += visit.other_reach
        for move, payoff in visit.payoffs.items():
            sums[visit.node.state][move] += visit.other_reach * visit.node.side * payoff
    return {
        state: {move: total / weights[state] if weights[state] > 0 else None for move, total in by_move.items()}
        for state, by_move in sums.items()
    }


def _expected_payoff(node: Node, policy: Policy) -> float:
    """Return the expected payoff of side 1 if all play the policy."""
    if isinstance(node, Ended):
        return node.payoff
    if isinstance(node, Chance):
        return sum(share * _expected_payoff(below, policy) for share, below in node.outcomes)
    return sum(policy[node.state][move] * _expected_payoff(below, policy) for move, below in node.moves.items())


def _iterate_nodes(node: Node) -> Iterator[Node]:
    """Yield all nodes of the tree."""
    yield node
    if isinstance(node, Chance):
        for _, child in node.outcomes:
            yield from _iterate_nodes(child)
    elif isinstance(node, Decision):
        for child in node.moves.values():
            yield from _iterate_nodes(child)


class Move(NamedTuple):
    """Move of a recorded game: the player, the side (1 or -1), the player's state, and the move."""

    player: int
    side: int
    state: Hashable
    move: Hashable


class Played(NamedTuple):
    """Recorded game. payoff: of side 1."""

    moves: tuple[Move, ...]
    payoff: float


def empirical_game(games: Sequence[Played]) -> Node:
    """Build the game tree spanned by recorded games.

    After equal moves, the next event is chance with the observed frequencies.

    A move that was observed in its state, but not after these moves, ends the game with the mean payoff of the games in
    which it was made in that state.
    """
    payoffs: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for game in games:
        for played in game.moves:
            payoffs[played.state][played.move].append(game.payoff)
    ends = {
        state: {
            move: Ended(fmean(returns)) for move, returns in sorted(by_move.items(), key=lambda item: repr(item[0]))
        }
        for state, by_move in payoffs.items()
    }
    return _build_tree(games, 0, ends)


def _build_tree(games: Sequence[Played], depth: int, ends: Mapping[Hashable, Mapping[Hashable, Ended]]) -> Node:
    """Return the node reached by the games after `depth` moves."""
    by_next: dict[tuple[int, int, Hashable] | None, list[Played]] = {}
    for game in games:
        decision = game.moves[depth][:3] if depth < len(game.moves) else None
        by_next.setdefault(decision, []).append(game)
    outcomes = tuple(
        (len(group) / len(games), _build_node(decision, group, depth, ends)) for decision, group in by_next.items()
    )
    return outcomes[0][1] if len(outcomes) == 1 else Chance(outcomes)


def _build_node(
    decision: tuple[int, int, Hashable] | None,
    games: Sequence[Played],
    depth: int,
    ends: Mapping[Hashable, Mapping[Hashable, Ended]],
) -> Node:
    """Return the decision (player, side, state) that the games face, or their end if it is None."""
    if decision is None:
        return Ended(fmean(game.payoff for game in games))
    player, side, state = decision
    by_move: dict[Hashable, list[Played]] = {}
    for game in games:
        by_move.setdefault(game.moves[depth].move, []).append(game)
    moves = {
        move: _build_tree(by_move[move], depth + 1, ends) if move in by_move else end
        for move, end in ends[state].items()
    }
    return Decision(player, side, state, moves)
