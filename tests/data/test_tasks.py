"""Task generators: seeded rows at every level, with a unique answer that their rewards score in full."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.data.rows import load_rows
from posttrain.data.tasks import make
from posttrain.data.tasks.maze import MOVES
from posttrain.data.tasks.search_world import make_world
from posttrain.errors import DataError
from posttrain.recipe.sections import Data
from posttrain.verify.sat import is_satisfied

GENERATOR = '''
def sums(level, draw, *, largest: int = 9):
    """A sum of level + 2 numbers."""
    numbers = [draw.randint(0, largest) for _ in range(level + 2)]
    return {"prompt": " + ".join(map(str, numbers)), "answer": str(sum(numbers))}
'''


def rows(name: str, size: int = 12, **keys: Any) -> list[dict[str, Any]]:
    return load_rows(Data(**{"source": name, "size": size, **keys}), Path.cwd())


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (tmp_path / "world.txt").write_text("\n\n".join(make_world(0, 60).documents.values()))
    return tmp_path


def params_of(name: str, documents: Path) -> dict[str, Any]:
    return {"levels": [0, 1, 2], **({"folder": str(documents)} if name == "asearcher" else {})}


@pytest.mark.parametrize("name", sorted(registry.load_index()["task"]))
def test_rows_depend_only_on_seed_and_index(name: str, documents: Path) -> None:
    own = params_of(name, documents)
    made = rows(f"task:{name}", params=own)
    assert [row["level"] for row in made] == [0, 1, 2] * 4
    assert {row["task"] for row in made} == {name}
    assert rows(f"task:{name}", size=6, params=own) == made[:6]
    assert rows(f"task:{name}", size=4, skip=8, params=own) == made[8:]
    assert len(set(map(make.problem_key, made))) == len(made)
    others = set(map(make.problem_key, rows(f"task:{name}", seed=1, params=own)))
    assert len(others & set(map(make.problem_key, made))) < len(made) / 2


@pytest.mark.parametrize("name", sorted(registry.load_index()["task"]))
def test_every_generator_has_examples(name: str) -> None:
    assert make.examples_of(registry.get("task", name).function)


def test_generator_that_contradicts_its_examples_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GENERATOR + '\nEXAMPLES = [(0, {"largest": 0}, {"answer": "3"})]\n')
    with pytest.raises(DataError, match="EXAMPLES: the answer of 1 is '0', not '3'"):
        load_rows(Data(source="mine.py:sums", size=2), tmp_path)


@pytest.mark.parametrize(
    ("name", "reward", "text", "best"),
    [
        ("saturn", "sat.assignment", r"\boxed{{{answer}}}", 1.0),
        ("ariadne", "maze.path", "<think>t</think>{answer}", None),
        ("countdown", "countdown.expression", "<answer>{answer}</answer>", 1.0),
        ("random_calculation", "numeric.distance", r"\boxed{{{answer}}}", 1.0),
        ("searchgym", "qa.search_r1", "<answer>{answer}</answer>", 1.0),
        ("asearcher", "qa.asearcher", "<answer>{answer}</answer>", 1.0),
    ],
)
def test_reward_of_a_task_gives_its_answer_full_marks(
    name: str, reward: str, text: str, best: float | None, documents: Path
) -> None:
    script, function = reward.split(".")
    score = registry.load_function(f"rewards/{script}.py:{function}", Path.cwd(), what="reward")
    takes = set(score.__code__.co_varnames[1 : score.__code__.co_argcount])
    for row in rows(f"task:{name}", params=params_of(name, documents)):
        columns = {key: row[key] for key in takes & row.keys()}
        found = score(text.format(answer=row["answer"]), **columns)
        earned = found["reward"] if isinstance(found, Mapping) else found
        wanted = 2 * row["steps"] * (row["turns"] + 1) + 0.2 if best is None else best
        assert earned == pytest.approx(wanted), row


def test_hidden_assignment_satisfies_the_formula_and_difficulty_grows() -> None:
    made = rows("task:saturn", size=40, params={"levels": [0, 1], "stages": [[3, 5, 5], [3, 5, 13]]})
    assert all(is_satisfied(row["formula"], row["answer"]) for row in made)
    assert all(len(row["formula"].split(" & ")) == (5, 13)[row["level"]] for row in made)
    assert all(len(set(row["formula"].split(" & "))) == len(row["formula"].split(" & ")) for row in made)
    assert made[0]["difficulty"] < made[1]["difficulty"]


def test_impossible_formula_parameters_are_refused() -> None:
    with pytest.raises(DataError, match="stage") as error:
        rows("task:saturn", params={"stages": [[2, 2, 4]]})
    assert "one assignment satisfies 3 such clauses" in str(error.value)
    with pytest.raises(DataError, match="no level 4"):
        rows("task:saturn", params={"levels": [4]})


def walk(prompt: str) -> list[str]:
    """Return the shortest paths through a maze, read from its text."""
    cells: dict[tuple[int, int], list[str]] = {}
    ends: dict[str, tuple[int, int]] = {}
    for line in prompt.splitlines()[1:-1]:
        place, *words = line.split()
        x, y = map(int, place.strip("()").split(","))
        cells[x, y] = [word for word in words if word in MOVES]
        ends |= {word: (x, y) for word in words if word in ("origin", "target")}
    queue, found = deque([(ends["origin"], "", {ends["origin"]})]), list[str]()
    while queue:
        (x, y), path, seen = queue.popleft()
        if (x, y) == ends["target"]:
            found.append(path)
            continue
        for move in cells[x, y]:
            there = x + MOVES[move][0], y + MOVES[move][1]
            if there not in seen:
                queue.append((there, f"{path}<|{move}|>", seen | {there}))
    return found


def test_maze_text_has_one_shortest_path_which_is_the_answer() -> None:
    own = {"levels": [2, 5, 9], "max_turns": 4, "min_turns": 1, "margin": 1}
    for row in rows("task:ariadne", size=30, params=own):
        assert walk(row["prompt"]) == [row["answer"]]
        assert row["steps"] == row["level"] + 1
        assert 1 <= row["turns"] <= 4


def test_shares_set_the_frequency_of_levels() -> None:
    own = {"levels": [0, 1, 2, 3, 4], "shares": [0.21, 0.18, 0.16, 0.18, 0.21], "distinct": False}
    levels = [row["level"] for row in rows("task:ariadne", size=94, params=own)]
    assert [levels.count(level) for level in range(5)] == [21, 18, 16, 18, 21]


def test_question_has_one_answer_and_documents_contain_its_facts() -> None:
    made = make_world(3, 60)
    for row in rows("task:searchgym", size=20, params={"levels": [0, 1, 3], "world": 3, "entities": 60}):
        words = row["prompt"].removeprefix("What is ").split("?")[0].split(" of ")
        *relations, start = [word.removeprefix("the ") for word in words]
        entity = start
        for number, relation in enumerate(reversed(relations)):
            assert made.facts[entity, relation] in made.documents[row["facts"][number]]
            entity = made.facts[entity, relation]
        assert entity == row["answer"]
        assert len(relations) == row["hops"] == row["level"] + 1


def test_worlds_share_no_entity() -> None:
    worlds = [set(make_world(number, 40).kinds) for number in range(5)]
    assert all(len(world) == 40 for world in worlds)
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(worlds, 2))
    with pytest.raises(DataError, match="world 99999"):
        make_world(99999, 40)


def test_synthesized_question_needs_the_stated_number_of_sentences(documents: Path) -> None:
    corpus = (documents / "world.txt").read_text()
    for row in rows("task:asearcher", size=12, params=params_of("asearcher", documents)):
        assert row["hops"] == len(row["facts"]) == row["level"] + 1
        assert all(fact in corpus for fact in row["facts"])
        assert row["answer"] not in row["prompt"]
        assert row["prompt"].count("X1") > 0 or row["level"] == 0


def test_documents_without_a_question_are_reported(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("nothing is named here.")
    with pytest.raises(DataError, match="finds no question of level 0"):
        rows("task:asearcher", params={"folder": str(tmp_path)})
    with pytest.raises(DataError, match="parameter `folder`: file or folder not found: nowhere"):
        rows("task:asearcher", params={"folder": "nowhere"})
    with pytest.raises(DataError, match="needs folder"):
        rows("task:asearcher")


def test_custom_generator_gets_the_difficulty(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GENERATOR)
    section = Data(source="mine.py:sums", size=6, params={"levels": [0, 3], "largest": 5})
    made = load_rows(section, tmp_path)
    assert [row["level"] for row in made] == [0, 3] * 3
    assert [row["prompt"].count("+") for row in made] == [1, 4] * 3
    assert {row["task"] for row in made} == {"mine.py:sums"}
    with pytest.raises(DataError, match="no parameter biggest"):
        load_rows(Data(source="mine.py:sums", size=6, params={"biggest": 5}), tmp_path)


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        ({"level": [0]}, "no parameter level"),
        ({"levels": [-1]}, "levels"),
        ({"levels": []}, "levels"),
        ({"levels": [0, 1], "shares": [1]}, "shares"),
        ({"max_turns": "two"}, "max_turns"),
        ({"min_turns": 3, "levels": [1]}, "turns in 2 moves"),
    ],
)
def test_wrong_parameters_are_reported(params: dict[str, Any], wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        rows("task:ariadne", params=params)


@pytest.mark.parametrize(
    ("task", "params", "wrong"),
    [
        ("countdown", {"levels": [0, 60]}, "no target up to 200 at level 60"),
        ("countdown", {"largest": 0}, "largest 0"),
        ("random_calculation", {"levels": [10**9]}, "whole numbers from 0 to 1000"),
        ("random_calculation", {"levels": [0, 1], "shares": [float("nan"), 1]}, "shares"),
        ("random_calculation", {"levels": [0, 1], "shares": "ab"}, "shares"),
        ("ariadne", {"levels": [300], "min_turns": 299, "max_turns": 299}, "does not meet itself"),
        ("ariadne", {"margin": 10**6}, "margin"),
        ("searchgym", {"levels": [3], "entities": 10**12}, "entities"),
        ("searchgym", {"levels": [3], "entities": 1}, "."),
    ],
)
def test_impossible_parameters_are_refused_immediately(task: str, params: dict[str, Any], wrong: str) -> None:
    """The error names the parameter; a generator that searches for a problem gives up."""
    with pytest.raises(DataError, match=wrong):
        rows(f"task:{task}", params=params)


def test_failing_generator_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def halves(level, draw):\n    return {'prompt': str(1 // level)}\n")
    with pytest.raises(DataError, match=r"mine.py:2  task:.*fails at level 0: ZeroDivisionError"):
        rows(f"task:{tmp_path}/mine.py:halves")


def test_exhausted_level_is_reported() -> None:
    with pytest.raises(DataError, match="too few problems of level 0") as error:
        rows("task:ariadne", size=20, params={"margin": 0})
    assert "distinct: false" in str(error.value)
    assert len(rows("task:ariadne", size=20, params={"margin": 0, "distinct": False})) == 20


def test_unknown_task_gets_a_suggestion() -> None:
    with pytest.raises(DataError, match="unknown task: saturm") as error:
        rows("task:saturm")
    assert "did you mean" in str(error.value)
    with pytest.raises(DataError, match="give `size`"):
        load_rows(Data(source="task:saturn"), Path.cwd())


def test_every_problem_of_countdown_can_be_solved() -> None:
    component = registry.get("task", "countdown").function
    for level in range(4):
        row = component(level, random.Random(level))
        assert len(row["numbers"]) == level + 2
        assert eval(row["answer"]) == row["target"]
