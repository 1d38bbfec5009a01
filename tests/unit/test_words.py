"""What a worker must tell its recorder again after the recorder died."""

from __future__ import annotations

from orchestrator.execution.words import Receipt, Words
from orchestrator.tracking.recorder import Points


def points(step: int) -> Points:
    return Points("run", 1, 1, step, step, {"loss": 1.0})


def receipt(life: str, num_given: int, num_safe: int) -> Receipt:
    return Receipt(life, num_given, num_safe, stopping=False)


def steps_sent(words: Words) -> list[int]:
    return [point.step for point in words.next_batch()[0]]


def test_words_are_safe_once_the_recorder_says_that_they_are_on_its_disk() -> None:
    words = Words()
    words.add([points(1)])
    assert steps_sent(words) == [1]
    words.heard(receipt("a", num_given=7, num_safe=6))  # six of others
    assert not words.are_safe
    words.heard(receipt("a", num_given=9, num_safe=7))
    assert words.are_safe


def test_a_new_life_of_the_recorder_is_told_what_the_old_one_had_answered_but_not_kept() -> None:
    words = Words()
    for step, num_safe in ((1, 1), (2, 1), (3, 1)):
        words.add([points(step)])
        words.next_batch()
        words.heard(receipt("a", num_given=step, num_safe=num_safe))
    words.add([points(4)])
    assert steps_sent(words) == [4]
    words.heard(receipt("b", num_given=1, num_safe=1))  # restarted between our words: 4 is kept, 2 and 3 are gone
    assert not words.are_safe
    assert steps_sent(words) == [2, 3]
    words.heard(receipt("b", num_given=3, num_safe=3))
    assert words.are_safe


def test_words_without_an_answer_are_told_again_before_newer_ones() -> None:
    words = Words()
    words.add([points(1)])
    words.next_batch()
    words.heard(receipt("a", num_given=1, num_safe=0))
    words.add([points(2)])
    words.next_batch()
    words.add([points(3)])
    words.unheard()
    assert words.num_untold == 3
    assert steps_sent(words) == [1, 2, 3]
