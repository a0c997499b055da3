"""Encodings and logits equal to those of `transformers` on the same weights, for every model with an encoder."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.zoo import ENCODERS, pair, read, source, text

BOUND = 1e-4
LENGTHS = (70, 1, 23)
every_encoder = pytest.mark.parametrize("case", ENCODERS)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=BOUND, rtol=BOUND)


@every_encoder
def test_encodings_equal_transformers(case: str) -> None:
    theirs, ours = pair(case)
    assert ours.encoder is not None
    for length in LENGTHS:
        given = source(ours, length, seed=length)
        with torch.no_grad():
            expected = theirs.get_encoder()(**read(given)).last_hidden_state
        assert expected.std() > 0.1, "encodings too even to tell a right model from a wrong one"
        close(ours.encoder(given), expected)


@every_encoder
def test_logits_equal_transformers_at_any_cut_and_beside_other_sources(case: str) -> None:
    theirs, ours = pair(case)
    ids, sources = text(90, rows=3), [source(ours, length, seed=length) for length in LENGTHS]
    with torch.no_grad():
        expected = [theirs(**read(given), decoder_input_ids=row[None]).logits[0] for given, row in zip(sources, ids)]
    assert not torch.allclose(expected[0][0], expected[1][0], atol=0.1), "the source does not show"
    for rows in ([0], [1], [0, 1, 2]):
        state = ours.new_state(len(rows))
        for row, index in enumerate(rows):
            state.condition(row, sources[index])
        cuts = [0, 40, 41, 42, 90]
        pieces = [ours(ids[rows][:, a:b], state, logits="all") for a, b in itertools.pairwise(cuts)]
        close(torch.cat(pieces, 1), torch.stack([expected[index] for index in rows]))


def test_a_window_of_an_encoder_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("t5gemma")
    given = source(ours, 70, seed=70)
    monkeypatch.setattr("lmstate.models.layers.cross_attention.WINDOW_QUERIES", 16)
    with torch.no_grad():
        expected = theirs.get_encoder()(**read(given)).last_hidden_state
    assert ours.encoder is not None
    close(ours.encoder(given), expected)
