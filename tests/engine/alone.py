"""The oracle: a request by itself, every token from the plain forward over the whole text, without any state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import lmstate
from lmstate.generation.sampling import Sampler, TokenPicker


def alone(
    model: lmstate.Model,
    prompt: Sequence[int],
    count: int,
    sampler: Sampler | None = None,
    index: int = 0,
    ends: frozenset[int] | None = None,
    guess: Sequence[int] = (),
) -> tuple[list[int], list[float], str]:
    """(tokens, their log probabilities, why it ended).

    One forward over the text and a `guess` of the answer gives the logits of all tokens that the guess has right.
    """
    ids, tokens, logprobs = list(prompt), [], []
    picker = TokenPicker(sampler or Sampler(), 1, first=index)
    picker.see(0, prompt)
    with torch.no_grad():
        # Not under a rope that changes with the length: there a longer text has other logits at its beginning too.
        ahead = model([[*ids, *guess]])[0, len(ids) - 1 :] if guess and not model.network.dynamic_ropes else None
        for at in range(count):
            right = ahead is not None and at < len(ahead) and tokens == list(guess[:at])
            logits = ahead[at] if right else model([ids])[0, -1]
            token = picker.pick(logits[None], [0])[0]
            if token in (model.eos_ids if ends is None else ends):
                return tokens, logprobs, "eos"
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
    return tokens, logprobs, "length"
