"""OpError keeps its fields through pickle, and its text when a library makes it anew."""

from __future__ import annotations

import pickle

from moe_graph.ops import OpError

ERROR = OpError("MoeReRouting", "tokens", got="[3]", want="2 dimensions", product="A3", hint="view")


def test_the_text_names_op_argument_got_want_product_and_hint() -> None:
    assert str(ERROR) == "MoeReRouting: tokens: got [3], want 2 dimensions on A3; view"


def test_fields_survive_pickle() -> None:
    copy = pickle.loads(pickle.dumps(ERROR))
    assert vars(copy) == vars(ERROR)
    assert str(copy) == str(ERROR)


def test_an_error_made_of_a_text_keeps_the_text() -> None:
    again = type(ERROR)(str(ERROR) + "\ntraceback")
    assert str(again) == str(ERROR) + "\ntraceback"
    assert str(pickle.loads(pickle.dumps(again))) == str(again)
