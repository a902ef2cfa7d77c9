"""`environment: {use: screen}`: a screen with buttons and a field, drawn in code, for `data: {source: task:screen}`.

The model writes clicks, typing, scrolls and `finished()` in any of the action spaces that `posttrain/verify/gui.py`
reads. After each turn it is shown the screen as it is then.
"""

import json
from typing import Any

from posttrain.data.tasks.screens import Screen, draw_screen
from posttrain.verify.gui import Action, read_actions
from posttrain.verify.regions import Coordinates, Region, answer_part, to_unit


class Environment:
    """coordinates: that the model writes. turns: in which it may act."""

    def __init__(self, *, coordinates: Coordinates = "pixels", turns: int = 8) -> None:
        self.coordinates, self.turns = coordinates, turns

    def reset(self, row: Any) -> None:
        self.screen = Screen.read(row["screen"])
        self.goal = [(kind, name) for kind, name in json.loads(row["goal"])]
        self.done: list[tuple[str, str]] = []  # what was clicked and typed
        self.top = self.taken = 0  # pixels that the page is scrolled by, and turns

    def step(self, text: str) -> tuple[Any, bool, float]:
        """The screen, whether it is over, and 1 / steps of the goal for each that is newly right.

        It is over with `finished()`, and when as many buttons, fields and texts were clicked and typed as the goal has.
        """
        self.taken += 1
        before, actions = self._count_right(), read_actions(answer_part(text))
        for action in actions or ():
            self._act(action)
        gain = (self._count_right() - before) / len(self.goal)
        finished = any(action.kind in ("finish", "answer") for action in actions or ())
        shown: Any = draw_screen(self.screen, self.done, self.top)
        if actions is None:
            shown = ["error: no action can be read", shown]
        return shown, finished or self.taken >= self.turns or len(self.done) >= len(self.goal), gain

    def score(self) -> float:
        return float(self.done == self.goal)

    def close(self) -> None:
        """Nothing is held."""

    def _act(self, action: Action) -> None:
        """A click on nothing and actions of other kinds change nothing, as does what follows the last step."""
        if len(self.done) >= len(self.goal):
            return
        if action.kind == "click" and action.places:
            if (name := self._find_clicked(action.places[0])) is not None:
                self.done.append(("click", name))
        elif action.kind == "type" and action.text:
            self.done.append(("type", action.text))
        elif action.kind == "scroll" and action.direction in ("up", "down"):
            height = self.screen.size[1]
            moved = self.top + (height if action.direction == "down" else -height)
            self.top = min(max(moved, 0), self.screen.height - height)

    def _find_clicked(self, place: tuple[float, ...]) -> str | None:
        (region,) = to_unit([Region(place)], self.coordinates, self.screen.size)
        (x, y), (width, height) = region.center, self.screen.size
        if not (0 <= x < 1 and 0 <= y < 1):
            return None
        return self.screen.find_place(round(x * width, 6), round(y * height, 6) + self.top)

    def _count_right(self) -> int:
        """Steps of the goal that were done, from the first on, without another in between."""
        pairs = list(zip(self.done, self.goal, strict=False))
        return next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs))
