"""`instructions.follow`: the checkers of IFEval's 25 instructions, the columns of a row, and what earns nothing.

The cases are of the kinds in google-research's instruction_following_eval/instructions_test.py, with texts of our own;
docs/compatibility.md counts the agreement with the originals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.audit import audit_gold
from posttrain.verify.instruction_rows import TULU_FUNCTIONS, loose_variants, only_repeats, read_instructions
from posttrain.verify.instruction_writer import write_answer, write_near_miss
from posttrain.verify.instructions import CHECKERS, count_sentences, holds
from posttrain.verify.language_identification import is_written_in
from posttrain.verify.score import Scorer

Follow = Callable[..., Any]

LEAST, LESS = "at least", "less than"
CASES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("keywords:existence", {"keywords": ["Oslo", "rain"]}, "In OSLO it was raining.", True),
    ("keywords:existence", {"keywords": ["Oslo", "snow"]}, "In Oslo it was raining.", False),
    ("keywords:existence", {"keywords": ["C++ (new)"]}, "We use c++ (new) here.", True),
    ("keywords:frequency", {"keyword": " tea ", "frequency": 3, "relation": LEAST}, "Tea, TEA and steam", True),
    ("keywords:frequency", {"keyword": "tea", "frequency": 3, "relation": LESS}, "Tea, TEA and steam", False),
    (
        "keywords:frequency",
        {"keyword": "tea", "frequency": 2, "relation": "exactly", "whole_words": True},
        "Tea, TEA and steam",
        True,
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["trans", "gene"]}, "Transformers are generic.", True),
    ("keywords:forbidden_words", {"forbidden_words": ["POWER"]}, "It has power.", False),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 3, "let_relation": LEAST}, "That cat", True),
    ("keywords:letter_frequency", {"letter": "t", "let_frequency": 3, "let_relation": LESS}, "That cat", False),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": LEAST}, "# and ##", True),
    ("language:response_language", {"language": "en"}, "The answer is in English.", True),
    ("language:response_language", {"language": "es"}, "Hoy desayunamos en McDonald's", True),
    ("language:response_language", {"language": "de"}, "The answer is in English and not in German.", False),
    ("language:response_language", {"language": "hi"}, "यह एक उत्तर है और इसमें दो वाक्य हैं", True),
    ("language:response_language", {"language": "hi"}, "This is not Hindi.", False),
    ("language:response_language", {"language": "ne"}, "यह एक उत्तर है और इसमें दो वाक्य हैं", False),
    ("language:response_language", {"language": "ja"}, "东京是日本的首都", False),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": LESS}, "a,b. c,d! e/f. g{h}i?", False),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": LEAST}, "a,b. c,d! e/f. g{h}i?", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "***\none\n***\ntwo\n***\nthree", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n* * *\ntwo", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***\n***", False),
    ("length_constraints:number_words", {"num_words": 5, "relation": LEAST}, "one-two, three four 5!", True),
    ("length_constraints:number_words", {"num_words": 5, "relation": LESS}, "one-two, three four 5!", False),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Well"},
        'One.\n\n"Well, two.\n\nThree.',
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Well"},
        "One.\n\nWell two.",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "really"},
        "One.\n\nRea!lly two.",
        False,
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name], at [place]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 3}, "Dear [name], at [place]", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p. s. Call me.", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.S. Call me.", False),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "Bye. P.S. Call me.", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "So:\n* one\n  *two\n- three, *no*", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "one\n***\ntwo\n* three", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* one\n* two", False),
    ("detectable_format:constrained_response", {}, "\n My answer is no.\n", True),
    ("detectable_format:constrained_response", {}, "No.", False),
    ("detectable_format:constrained_response", {"options": ["red"]}, "It is red.", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one\n*two*\n*three\n**", False),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1\na\nPart 2\nb",
        True,
    ),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 1}, "Part 1\na", False),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', True),
    ("detectable_format:json_format", {}, 'Here: {"a": 1}', False),
    ("detectable_format:json_format", {}, "[" * 100_000, False),
    ("detectable_format:title", {}, "text\n<<A title>>", True),
    ("detectable_format:title", {}, "<< >>\n<<two\nlines>>", False),
    ("combination:two_responses", {}, "******\none\n******\ntwo\n******", True),
    ("combination:two_responses", {}, "one\n******\none", False),
    ("combination:two_responses", {}, "one\n******\n******\ntwo", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a city."}, " name a city. Oslo", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a city."}, "Sure! Name a city. Oslo", False),
    ("startend:end_checker", {"end_phrase": " Any questions? "}, '"So it is. any questions?" \n', True),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Any questions? No.", False),
    ("startend:quotation", {}, '\n"All of it."\n', True),
    ("startend:quotation", {}, '"Some" of it.', False),
    ("startend:quotation", {}, '"', False),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": LEAST}, "ONE, TWO-A (B)", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": LESS}, "ONE, TWO-A (B)", False),
    ("change_case:english_capital", {}, "THIS IS THE END!", True),
    ("change_case:english_capital", {}, "DAS IST NICHT DIE ANTWORT", False),
    ("change_case:english_capital", {}, "This Is It.", False),
    ("change_case:english_capital", {}, ", ".join(["AMELIA SCOTT", "HENRY MOORE"] * 20), True),
    ("change_case:english_lowercase", {}, "this is the end.", True),
    ("change_case:english_lowercase", {}, "Almost all of it.", False),
    ("punctuation:no_comma", {}, "All in one go.", True),
    ("punctuation:no_comma", {}, "Well, no.", False),
]


@pytest.mark.parametrize(("name", "arguments", "text", "expected"), CASES)
def test_checker(name: str, arguments: dict[str, Any], text: str, expected: bool) -> None:
    assert CHECKERS[name](text, **arguments) is expected


SENTENCES = {
    "en": "The quick fox runs to the river and it is happy.",
    "de": "Der schnelle Fuchs läuft zum Fluss und ist nicht müde.",
    "fr": "Le renard rapide court vers la rivière et il est content.",
    "es": "El zorro rápido corre hacia el río y no se cansa.",
    "it": "La volpe veloce corre verso il fiume e non è stanca.",
    "pt": "A raposa rápida corre para o rio e não se cansa.",
    "nl": "De snelle vos rent naar de rivier en het is niet moe.",
    "sv": "Den snabba räven springer till floden och den är inte trött.",
    "fi": "Nopea kettu juoksee joelle ja se ei ole väsynyt.",
    "pl": "Szybki lis biegnie do rzeki i nie jest zmęczony.",
    "tr": "Hızlı tilki nehre koşuyor ve bu çok güzel bir gün.",
    "id": "Rubah yang cepat itu berlari ke sungai dan tidak lelah.",
    "vi": "Con cáo nhanh chạy đến sông và không mệt.",
    "sw": "Mbweha wa haraka anakimbia kwa mto na sio mchovu.",
    "ru": "Быстрая лиса бежит к реке, и она не устала.",
    "bg": "Бързата лисица тича към реката и не е уморена, защото това се случва.",
    "uk": "Швидка лисиця біжить до річки, і це не втомлює її та брата.",
    "ar": "الثعلب السريع يركض إلى النهر و هو ليس متعبا من هذا",
    "fa": "روباه سریع به رودخانه می رود و این خسته نیست که",
    "ur": "تیز لومڑی دریا کی طرف بھاگتی ہے اور یہ تھکی نہیں",
    "hi": "तेज़ लोमड़ी नदी की ओर भागती है और यह थकी नहीं है",
    "mr": "वेगवान कोल्हा नदीकडे धावतो आणि ते थकलेले नाही आहे",
    "ne": "छिटो फ्याउरो नदी तिर दौडन्छ र यो थाकेको छैन हो",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_languages_of_one_script_are_told_apart(language: str) -> None:
    assert [other for other in SENTENCES if is_written_in(SENTENCES[language], other)] == [language]


def test_a_text_without_function_words_is_of_no_certain_language() -> None:
    assert all(is_written_in("YES!", language) for language in ("en", "de", "vi"))
    assert not is_written_in("YES!", "ru") and is_written_in("42", "ru")
    with pytest.raises(ValueError, match="unknown language 'tlh'"):
        is_written_in("Qapla'", "tlh")


def test_every_instruction_has_a_followed_and_a_broken_case() -> None:
    assert len(CHECKERS) == 25
    assert {(name, expected) for name, _, _, expected in CASES} == {(n, e) for n in CHECKERS for e in (True, False)}


@pytest.mark.parametrize("unit", ["[", "<<", "*", "a.", "\n", "$", '."', "{", "'"])
def test_checkers_are_linear_in_the_length(unit: str) -> None:
    started = time.process_time()
    for name, arguments, _, _ in CASES:
        CHECKERS[name](unit * 20_000, **arguments)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. two! Three?", 3),
        ('He said "No." Then he left.', 2),
        ("Dr. Who met Mr. Smith of the U.S. Navy.", 1),
        ("He lives in the U.S. The end.", 2),
        ("Wait... no. Well... Yes.", 3),
        ("Pi is 3.14 here.", 1),
        ("1. First\n2. second", 2),
        ('{"a": "One.", "b": "Two."}', 2),
        ("Bye. P.S. Call me.", 3),
    ],
)
def test_count_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("relation", "counts"),
    [
        ("less than", range(20)),
        ("at least", range(20, 40)),
        ("at most", range(21)),
        ("around", range(18, 23)),
        ("exactly", range(20, 21)),
    ],
)
def test_relations(relation: Any, counts: range) -> None:
    assert [count for count in range(40) if holds(count, relation, 20)] == list(counts)


def test_loose_variants_are_the_eight_of_the_paper() -> None:
    assert loose_variants("Sure!\n*a*\nBye") == [
        *("Sure!\n*a*\nBye", "*a*\nBye", "Sure!\n*a*", "*a*"),
        *("Sure!\na\nBye", "a\nBye", "Sure!\na", "a"),
    ]


def test_loose_forgives_an_introduction(reward: Callable[[str], Follow]) -> None:
    row = {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [None]}
    follow = reward("instructions.follow")
    assert follow('Here it is:\n{"a": 1}', **row)["reward"] == 0.0
    assert follow('Here it is:\n{"a": 1}', **row, loose=True)["reward"] == 1.0


NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(
    ("completion", "given"),
    [
        ("", {}),
        (" \n", {}),
        ("A long answer that was cut", {"truncated": True}),
        ("still thinking", {"prefilled_think": True}),
        ("<think>still thinking", {}),
        ("<think>done</think>\n", {}),
        ("Write a poem!", {"messages": [{"role": "user", "content": "Write a poem."}]}),
        ("Write a poem. WRITE A POEM", {"messages": [{"role": "user", "content": "Write a poem."}]}),
    ],
)
@pytest.mark.parametrize("loose", [False, True])
def test_without_an_answer_nothing_is_met(
    completion: str, given: dict[str, Any], loose: bool, reward: Callable[[str], Follow]
) -> None:
    found = reward("instructions.follow")(completion, **NO_COMMA, **given, loose=loose)
    assert found == {"reward": 0.0, "all": 0.0, "share": 0.0}


def test_an_answer_may_quote_the_request() -> None:
    assert only_repeats("Write a poem. Write a poem", "write a poem")
    assert not only_repeats("Write a poem. Roses", "write a poem")
    assert not only_repeats("Write", "write a poem")
    assert not only_repeats("42", "?")


def test_share_and_all(reward: Callable[[str], Follow]) -> None:
    row = {"instruction_id_list": [*NO_COMMA["instruction_id_list"], "startend:quotation"], "kwargs": "[{}, null]"}
    follow = reward("instructions.follow")
    assert follow("No quotes", **row) == {"reward": 0.0, "all": 0.0, "share": 0.5}
    assert follow("No quotes", **row, mode="share")["reward"] == 0.5
    assert follow('"Quotes"', **row)["reward"] == 1.0


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (["punctuation:no_commas"], [{}], "unknown instruction 'punctuation:no_commas'; did you mean"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": None}], "number_bullet_lists lacks.* num_bullets"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": "two"}], "num_bullets is 'two'"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": 2, "letter": "a"}], "unknown argument letter"),
        (["keywords:existence"], [{"keywords": "Oslo"}], "must be a list of texts"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "over"}], "relation is 'over'"),
        (["language:response_language"], [{"language": "xx"}], "language 'xx' is unknown"),
        (
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
            "nth_paragraph must be from 1",
        ),
        (["punctuation:no_comma"], [{}, {}], "has 1 ids, and `kwargs` has 2"),
        ([], [], "has 0 ids"),
    ],
)
def test_bad_rows_are_errors_of_the_data(ids: list[str], arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_instructions(ids, arguments, None)


def test_integral_floats_and_nulls_of_arrow_tables() -> None:
    arguments = [{"num_bullets": 3.0, "keywords": None, "relation": None}]
    assert read_instructions(["detectable_format:number_bullet_lists"], arguments, None)[0].arguments == {
        "num_bullets": 3
    }


@pytest.mark.parametrize(
    ("ground_truth", "follows", "breaks"),
    [
        ({"func_name": "verify_keyword_frequency", "word": "tea", "N": 1}, "tea and steam", "tea tea"),
        ({"func_name": "validate_word_constraint", "N": 10, "quantifier": "around"}, "a " * 11, "a " * 12),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "So", "i": 2}, "a\n\nSo", "So\n\na"),
        ({"func_name": "validate_choice", "options": ["red", "blue"]}, "It is blue", "It is green"),
        ({"func_name": "validate_end", "end_phrase": "Bye.", "N": None}, "So. Bye.", "Bye. So."),
    ],
)
def test_ground_truth_of_tulu(
    ground_truth: dict[str, Any], follows: str, breaks: str, reward: Callable[[str], Follow]
) -> None:
    follow = reward("instructions.follow")
    assert follow(follows, ground_truth=json.dumps(ground_truth))["reward"] == 1.0
    assert follow(breaks, ground_truth=ground_truth)["reward"] == 0.0


def test_tulus_functions_cover_every_instruction() -> None:
    assert {name for name, _, _ in TULU_FUNCTIONS.values()} == CHECKERS.keys()
    with pytest.raises(ValueError, match="func_name 'verify_keyword'; did you mean"):
        read_instructions(None, None, {"func_name": "verify_keyword"})


def test_written_answers_follow_and_near_misses_do_not(reward: Callable[[str], Follow]) -> None:
    follow = reward("instructions.follow")
    for name, arguments, _, expected in CASES:
        instructions = read_instructions([name], [arguments], None)
        gold, miss = write_answer(instructions), write_near_miss(instructions)
        if expected and gold is not None:
            assert follow(gold, [name], [arguments])["reward"] == 1.0
        assert miss is None or follow(miss, [name], [arguments])["reward"] == 0.0
    assert write_answer(read_instructions(["startend:quotation", "detectable_format:json_format"], None, None))
    assert (
        write_answer(read_instructions(["change_case:english_capital", "change_case:english_lowercase"], None, None))
        is None
    )


def _audit(rows: list[dict[str, Any]]) -> Any:
    with Scorer([Reward(use="instructions.follow")], Scoring(workers=1), None) as scorer:
        return audit_gold(scorer, rows)


def test_the_audit_names_bad_rows_and_skips_rows_that_any_text_follows() -> None:
    good = {"prompt": "Quote.", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    audit = _audit([good, {"prompt": "No commas.", **NO_COMMA}, {**good, "instruction_id_list": None}])
    assert (audit.checked, audit.bad) == (1, {})
    with pytest.raises(RewardError, match="unknown instruction 'startend:quotations'"):
        _audit([good, {**good, "instruction_id_list": ["startend:quotations"]}])
    with pytest.raises(RewardError, match="no column `instruction_id_list`"):
        _audit([{"prompt": "Quote.", "answer": "so"}])
