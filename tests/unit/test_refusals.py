"""Refusals have ids: well formed, one per meaning, and with the sentences that ``tests/refusals.txt`` lists."""

from __future__ import annotations

import copy
import pickle
import re
from collections import defaultdict

import refusals
from seqtile import UserError


def test_the_list_of_sentences_is_that_of_the_source() -> None:
    assert refusals.snapshot() == refusals.SNAPSHOT.read_text("utf-8"), "run: python tests/refusals.py --write"


def test_ids_are_an_area_and_what_is_wrong_there() -> None:
    word = "[a-z0-9]+(-[a-z0-9]+)*"
    assert [code for code, _ in refusals.sentences() if not re.fullmatch(rf"{word}\.{word}", code)] == []


def test_no_sentence_has_two_ids() -> None:
    ids = defaultdict(set)
    for code, sentence in refusals.sentences():
        ids[sentence].add(code)
    assert {sentence: codes for sentence, codes in ids.items() if len(codes) > 1} == {}


def test_an_error_keeps_its_id_in_copies_and_across_processes() -> None:
    error = UserError("area.problem", "a sentence")
    for other in (error, copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(other), other.code, str(other)) == (UserError, "area.problem", "a sentence")
