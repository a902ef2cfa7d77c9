"""An environment: the model guesses a number and is told whether it is higher or lower."""


class HigherLower:
    def __init__(self, *, guesses: int = 5) -> None:
        self.guesses = guesses

    def reset(self, row: dict) -> None:
        self.number, self.left, self.found = int(row["number"]), self.guesses, False

    def step(self, text: str) -> tuple[str, bool, float]:
        self.left -= 1
        guess = "".join(c for c in text if c.isdigit())
        self.found = guess == str(self.number)
        if self.found or self.left == 0:
            return "", True, float(self.found)
        if not guess:
            return "write a number", False, -0.1
        return "higher" if int(guess) < self.number else "lower", False, 0.0

    def actions(self) -> list[str]:
        return [str(number) for number in range(10)]  # what may be written now; only for `simulations`

    def score(self) -> float:
        return float(self.found)

    def close(self) -> None:
        pass  # close files, processes or connections here
