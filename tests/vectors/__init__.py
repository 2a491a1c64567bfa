"""Cases of the public unit tests of ops-transformer, asked of the OpDefs.

A case becomes a :class:`~tests.vectors.question.Question` (`adapters/`), which is put to the OpDef
(`asking.py`). A case that is not followed stands, with its reason, in `not_followed/`.
``python -m tests.vectors`` prints the share of each file that passes.
"""
