"""Werewolf: a game of hidden roles with nights and days, speeches and votes; each player has its own prompt."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.workflows.protocol import Call, Caller, fill

RULES = """You play Werewolf, {players} players, {werewolves} of them werewolves, one a seer, the others villagers. At
night the werewolves kill a player, and the seer learns of one whether it is a werewolf. By day all who live speak, and
then vote one player out. The werewolves win when they are as many as the others, the others when no werewolf is left.

You are player {player}, a {role}.
{known}

{task}"""
SPEAK = "It is your turn to speak. Say in one or two sentences what the others are to believe."
KILL = "It is night. Whom do the werewolves kill?"
SEE = "It is night. Of whom do you want to know whether it is a werewolf?"
VOTE = "All have spoken. Whom do you vote out?"
CHOOSE = "Write the player's number as <player>N</player>. You may choose {among}."
_CHOICE = re.compile(r"<player>\s*(\d+)\s*</player>")


@dataclass
class Game:
    """State of a game. Players are numbered from 1.

    roles: of each player. known: lines that each player has been told, in order. living: players in the game. found:
    the result of the seer's looks so far: `nothing`, `no werewolf` or `a werewolf`.
    """

    roles: dict[int, str]
    rules: str
    speak: str
    rng: random.Random
    living: list[int] = field(default_factory=list)
    known: dict[int, list[str]] = field(default_factory=dict)
    found: str = "nothing"

    @classmethod
    def deal(cls, players: int, werewolves: int, rules: str, speak: str, rng: random.Random) -> Game:
        """Start a game: shuffle roles, and let werewolves know each other. Raises UserError for too few players."""
        if werewolves < 1 or players < 2 * werewolves + 2:
            raise UserError(
                f"workflow werewolf: {players} players with {werewolves} werewolves",
                allowed="at least one werewolf, and 2 * werewolves + 2 players, so that the first day comes",
            )
        cards = ["werewolf"] * werewolves + ["seer"] + ["villager"] * (players - werewolves - 1)
        rng.shuffle(cards)
        table = cls(dict(enumerate(cards, 1)), rules, speak, rng, list(range(1, players + 1)))
        table.known = {player: [] for player in table.living}
        pack = table.by_role("werewolf")
        if len(pack) > 1:
            table.tell(f"The werewolves are players {list_players(pack)}.", pack)
        return table

    def by_role(self, role: str) -> list[int]:
        """Return the living players of a role."""
        return [player for player in self.living if self.roles[player] == role]

    def tell(self, text: str, players: Sequence[int] | None = None) -> None:
        """Add a line to what players know; None = all players."""
        for player in self.roles if players is None else players:
            self.known[player].append(text)

    def side(self, player: int) -> str:
        """Return the player's side: `werewolves` or `village`."""
        return "werewolves" if self.roles[player] == "werewolf" else "village"

    @property
    def winner(self) -> str | None:
        """The side that has won; None while the game continues."""
        pack = len(self.by_role("werewolf"))
        if not pack:
            return "village"
        return "werewolves" if 2 * pack >= len(self.living) else None

    def ask(self, player: int, task: str) -> str:
        """Return the prompt of a player for a task."""
        return fill(
            self.rules,
            players=str(len(self.roles)),
            werewolves=str(sum(role == "werewolf" for role in self.roles.values())),
            player=str(player),
            role=self.roles[player],
            known="\n".join(self.known[player]) or "Nothing has happened yet.",
            task=task,
        )

    async def choose(self, call: Caller, player: int, task: str, among: Sequence[int]) -> int:
        """Ask a player to pick another one; an answer without a valid pick is replaced at random (note `random`)."""
        others = [name for name in among if name != player]
        asked = self.ask(player, f"{task} {fill(CHOOSE, among=list_players(others))}")
        made = await call(self.roles[player], asked)
        named = [int(number) for number in _CHOICE.findall(made.answer)]
        made.note.update(player=player, side=self.side(player))
        if named and named[-1] in others:
            return named[-1]
        made.note["random"] = True
        return self.rng.choice(others)

    async def play_night(self, call: Caller, number: int) -> None:
        """Play a night: the werewolves kill a player, and the seer looks at one, simultaneously."""
        pack, seers = self.by_role("werewolf"), self.by_role("seer")
        victim = await self.choose(call, pack[0], KILL, [name for name in self.living if name not in pack])
        for seer in seers:
            shown = await self.choose(call, seer, SEE, self.living)
            is_bad = self.roles[shown] == "werewolf"
            self.found = "a werewolf" if is_bad or self.found == "a werewolf" else "no werewolf"
            self.tell(f"Night {number}: you saw that player {shown} is {'a' if is_bad else 'no'} werewolf.", [seer])
        self.living.remove(victim)
        self.tell(f"Night {number}: player {victim} was killed. It was a {self.roles[victim]}.")

    async def hold_day(self, call: Caller, number: int, candidates: int, speech_tokens: int) -> None:
        """Play a day: all living players speak in turn, then vote one out; in a tie nobody is voted out."""
        speeches: list[Call] = []
        for player in self.living:
            speech = await self.speak_once(call, player, number, speeches, candidates, speech_tokens)
            self.tell(f"Day {number}, player {player} said: {speech.answer}")
            speeches.append(speech)
        votes = [(player, await self.choose(call, player, VOTE, self.living)) for player in self.living]
        self.tell(f"Day {number}, votes: " + ", ".join(f"{player} for {chosen}" for player, chosen in votes) + ".")
        (first, most), *others = Counter(chosen for _, chosen in votes).most_common()
        if others and others[0][1] == most:
            self.tell(f"Day {number}: a tie, nobody was voted out.")
            return
        self.living.remove(first)
        self.tell(f"Day {number}: player {first} was voted out. It was a {self.roles[first]}.")

    async def speak_once(
        self, call: Caller, player: int, day: int, heard: Sequence[Call], candidates: int, speech_tokens: int
    ) -> Call:
        """Sample several speeches of a player and pick one at random; their notes record what the player knew."""
        role, asked = self.roles[player], self.ask(player, self.speak)
        made = await call.several(role, asked, count=candidates, max_tokens=speech_tokens)
        chosen = self.rng.choice(made)
        state = f"{role}, day {day}" + (f", has seen {self.found}" if role == "seer" else "")
        for speech in made:
            said = speech is chosen
            speech.note.update(player=player, side=self.side(player), state=state, turn=made[0].number, said=said)
            speech.note.update(asked=asked, heard=[earlier.number for earlier in heard])
        return chosen


@register(
    "workflow",
    "werewolf",
    paper="2502.04686",
    roles=("werewolf", "seer", "villager"),
    note="The paper has seven players, among them two werewolves and a doctor. Here there is no doctor, the first "
    "living werewolf decides for the pack, of a tie nobody is voted out, and the dead show their roles.",
)
async def werewolf(
    row: Mapping[str, Any],
    call: Caller,
    *,
    players: int = 5,
    werewolves: int = 1,
    candidates: int = 1,
    speech_tokens: int = 64,
    rules: str = RULES,
    speak: str = SPEAK,
) -> None:
    """A game of Werewolf between players that are all the policy, each with the knowledge of its role.

    players, werewolves: numbers; one of the other players is the seer. candidates: speeches sampled at each turn, of
    which one is used. speech_tokens: maximum length of a speech. rules, speak: prompts, the first with {players},
    {werewolves}, {player}, {role}, {known} and {task}. The row's content is not used; it only identifies a game.

    Notes of a call: `player`, `side` (werewolves or village), `won` (whether that side won; absent if the game ran out
    of room), `random` (its choice was unreadable and replaced at random). Of a speech also `asked` (its prompt),
    `state` (role, day, the seer's findings), `heard` (the calls whose speeches of this day the player knows), `turn`
    (the first of the candidates) and `said` (whether it was used). The reward is `roles.won`.
    """
    del row
    table = Game.deal(players, werewolves, rules, speak, call.random())
    number = 0
    while table.winner is None:
        number += 1
        await table.play_night(call, number)
        if table.winner is None:
            await table.hold_day(call, number, candidates, speech_tokens)
    for made_call in call.made:
        made_call.note["won"] = made_call.note["side"] == table.winner


def list_players(players: Sequence[int]) -> str:
    """Join player numbers with commas."""
    return ", ".join(map(str, players))
