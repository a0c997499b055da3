"""The generated table of docs/models.md is of today, and nothing that transformers has is left out without a reason."""

from importlib.metadata import version

import pytest

from bench import families


def test_the_table_of_model_types_is_of_today() -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    if f"causal types of transformers {version('transformers')}," not in page:
        pytest.skip("the table was made with another version of transformers")
    assert families.missing() == []
    assert families.written(page) == page, "run python -m bench.families"
