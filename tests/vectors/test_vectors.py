"""Every public case is answered as it expects, or stands in the table of those not followed."""

from __future__ import annotations

import pytest

from tests.vectors.adapters import question_of
from tests.vectors.asking import ask
from tests.vectors.not_followed import NOT_FOLLOWED
from tests.vectors.question import NotAsked
from tests.vectors.reading import FOLDER, cases, files

ALL = [pytest.param(file, name, id=f"{file}-{name}") for file in files() for name in cases(file)]
ABSENT = [pytest.param("", "", marks=pytest.mark.skip(reason=f"no vectors in {FOLDER}"))]


@pytest.mark.parametrize(("file", "name"), ALL or ABSENT)
def test_vector(file: str, name: str) -> None:
    if reason := NOT_FOLLOWED.get((file, name)):
        pytest.skip(reason)
    try:
        ask(question_of(file, cases(file)[name]))
    except NotAsked as reason:
        pytest.skip(str(reason))


@pytest.mark.skipif(not files(), reason=f"no vectors in {FOLDER}")
def test_the_table_names_cases_that_exist() -> None:
    assert [key for key in NOT_FOLLOWED if key[1] not in cases(key[0])] == []


@pytest.mark.skipif(not files(), reason=f"no vectors in {FOLDER}")
@pytest.mark.parametrize(("file", "name"), list(NOT_FOLLOWED))
def test_a_case_in_the_table_is_indeed_not_followed(file: str, name: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, NotAsked, ValueError)):
        ask(question_of(file, cases(file)[name]))
