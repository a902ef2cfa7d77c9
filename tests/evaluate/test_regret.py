"""Counterfactual regret minimization on games with known equilibria, and on game trees built from records."""

from __future__ import annotations

import itertools

import pytest

from posttrain.evaluate.regret import (
    Chance,
    Decision,
    Ended,
    Move,
    Node,
    Played,
    empirical_game,
    match_regrets,
    minimize_regret,
)


def kuhn() -> Node:
    """Kuhn's poker with the cards 0, 1, 2: an ante of 1, then check or bet 1."""

    def after(cards: tuple[int, int], said: str) -> Node:
        winner = 1 if cards[0] > cards[1] else -1
        if said in ("cc", "bb", "cbb"):  # both checked, or a bet was called
            return Ended(winner * (1 if said == "cc" else 2))
        if said in ("bc", "cbc"):  # the player facing the bet folds
            return Ended(1 if said == "bc" else -1)
        mover = len(said) % 2
        return Decision(mover, 1 - 2 * mover, (cards[mover], said), {m: after(cards, said + m) for m in "cb"})

    return Chance(tuple((1 / 6, after(cards, "")) for cards in itertools.permutations(range(3), 2)))


def test_kuhn_poker_value_is_minus_one_eighteenth() -> None:
    """Kuhn 1950: the first player loses 1/18 per hand.

    The second calls a bet with the middle card, and bluffs with the low one, in 1 of 3; the first bets the high card
    three times as often as it bluffs with the low one.
    """
    found = minimize_regret(kuhn(), 1500)
    assert found.payoff == pytest.approx(-1 / 18, abs=2e-3)
    assert found.policy[1, "b"]["b"] == pytest.approx(1 / 3, abs=0.03)
    assert found.policy[0, "c"]["b"] == pytest.approx(1 / 3, abs=0.03)
    assert found.policy[2, ""]["b"] == pytest.approx(3 * found.policy[0, ""]["b"], abs=0.08)
    assert found.values[2, "b"]["b"] == 2.0, "to call with the best card always wins two"
    assert found.values[0, "b"] == {"c": -1.0, "b": -2.0}


def test_rock_paper_scissors_with_double_rock() -> None:
    """Rock beats scissors for 2, all other wins are 1.

    With the odds (r, p, s) all moves are worth 0: 2s = p, r = s, so 1/4, 1/2, 1/4. No player sees the other's move.
    """
    pays = {("r", "s"): 2, ("p", "r"): 1, ("s", "p"): 1, ("s", "r"): -2, ("r", "p"): -1, ("p", "s"): -1}
    second = {
        first: Decision(1, -1, "second", {other: Ended(pays.get((first, other), 0)) for other in "rps"})
        for first in "rps"
    }
    found = minimize_regret(Decision(0, 1, "first", second), 3000)
    for state in ("first", "second"):
        assert list(found.policy[state].values()) == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=0.02)
    assert found.payoff == pytest.approx(0, abs=1e-3)


def test_one_iteration_by_hand() -> None:
    """A fair coin that only player 0 sees, who says a or b: heads pays 1 for a, tails -1 for a, b pays 0.

    At first both moves have 1/2: regrets are 1/2 * (1 - 1/2) = 1/4 and -1/4 for heads. Then only a is played after
    heads.
    """
    coin = Chance(
        tuple((0.5, Decision(0, 1, side, {"a": Ended(pay), "b": Ended(0)})) for side, pay in (("h", 1), ("t", -1)))
    )
    assert match_regrets({"a": 0.25, "b": -0.25}) == {"a": 1.0, "b": 0.0}
    assert match_regrets({"a": -1.0, "b": -2.0}) == {"a": 0.5, "b": 0.5}
    found = minimize_regret(coin, 2)
    assert found.policy["h"] == {"a": 0.75, "b": 0.25} and found.policy["t"] == {"a": 0.25, "b": 0.75}
    assert found.values["h"] == {"a": 1.0, "b": 0.0}
    assert found.payoff == pytest.approx(0.5 * 0.75 - 0.5 * 0.25)
    with pytest.raises(ValueError, match="different moves"):
        minimize_regret(Decision(0, 1, "x", {"a": Decision(0, 1, "x", {"b": Ended(0)})}), 1)


def test_recorded_games_define_a_game() -> None:
    """A seer (side 1) accuses or is silent; then a villager, who knows only what was said, does the same.

    Accusing and then repeating won both times; `silent, repeat` was never seen: its value would be the mean over
    games in which the villager repeated after silence, of which there are none, so that move is absent.
    """
    games = [
        Played((Move(0, 1, "seer", "accuse"), Move(1, 1, ("villager", "accuse"), "repeat")), 1.0),
        Played((Move(0, 1, "seer", "accuse"), Move(1, 1, ("villager", "accuse"), "repeat")), 1.0),
        Played((Move(0, 1, "seer", "accuse"), Move(1, 1, ("villager", "accuse"), "doubt")), -1.0),
        Played((Move(0, 1, "seer", "silent"), Move(1, 1, ("villager", "silent"), "doubt")), -1.0),
    ]
    found = minimize_regret(empirical_game(games), 100)
    assert found.values["villager", "accuse"] == {"doubt": -1.0, "repeat": 1.0}
    assert found.policy["seer"]["accuse"] > 0.95 and found.payoff > 0.9
    assert list(found.values["villager", "silent"]) == ["doubt"]


def test_unseen_move_has_the_mean_of_its_state() -> None:
    """Player 1 does not know which of two ways the game began.

    `y` was only seen after the second: after the first it has that mean, 0.5.
    """
    begun = [(("deal 1",), "x", 1.0), (("deal 2",), "y", 0.0), (("deal 2",), "y", 1.0)]
    games = [Played((Move(0, -1, deal, "go"), Move(1, 1, "blind", move)), pay) for deal, move, pay in begun]
    game = empirical_game(games)
    assert isinstance(game, Chance) and [share for share, _ in game.outcomes] == pytest.approx([1 / 3, 2 / 3])
    first = game.outcomes[0][1]
    assert isinstance(first, Decision) and isinstance(blind := first.moves["go"], Decision)
    assert blind.moves == {"x": Ended(1.0), "y": Ended(0.5)}
