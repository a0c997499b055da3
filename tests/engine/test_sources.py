"""Sources in the engine: each answer is that of `generate` with the source alone, and a source is encoded once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.engine.options import refuse_sources
from lmstate.generation.sampling import Sampler
from lmstate.vision.reader import PicturePrompt
from tests.engine.test_pictures import OPTIONS, alone
from tests.zoo import ours, source, text

LENGTHS = (5, 70, 33)
SOURCES = [tuple(text(length, seed=length)[0].tolist()) for length in LENGTHS]
BEGUN = text(41)[0].tolist()


class Encodings:
    """Counts the sources that the encoder of a model reads."""

    def __init__(self, model: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(model.network)
        self.count, encoded = 0, kind.encoded

        def counted(network: Any, source: Any) -> Any:
            self.count += 1
            return encoded(network, source)

        monkeypatch.setattr(kind, "encoded", counted)


@pytest.mark.parametrize("case", ["bart", "t5", "m2m_100", "whisper"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_are_those_of_each_source_alone(case: str, kind: str, tmp_path: Path) -> None:
    """The same beginning of an answer with other sources, and other beginnings with one, in rows beside each other."""
    model, luck = ours(case), random.Random(f"{case} {kind}")
    sources = [source(model, length, seed=length) for length in LENGTHS]
    options, reused = dict(OPTIONS[kind]), 0
    if options.pop("store", False):
        options["store"] = tmp_path
    start = model.start_id
    assert start is not None
    for _ in range(2):
        with lmstate.Engine(model, **options) as engine:
            asked = []
            for _ in range(8):
                given, count = luck.choice(sources), luck.choice([0, 0, 3, 12, 40, 41])
                begun = BEGUN[:count] or None
                sampler = Sampler(temperature=1.0, seed=3) if luck.random() < 0.3 else Sampler()
                params = lmstate.SamplingParams(
                    max_new_tokens=luck.randint(1, 6), temperature=sampler.temperature, seed=sampler.seed,
                    n=luck.choice([1, 1, 2]), prompt_logprobs=luck.choice([None, None, None, 0]),
                )  # fmt: skip
                request = engine.submit(begun, params, source=given)
                asked.append((PicturePrompt([start, *(begun or ())], source=given), params, sampler, request))
                if luck.random() < 0.5:
                    request.result(600)
            for prompt, params, sampler, request in asked:
                done = request.result(600)
                reused += done.usage.reused
                for index, tokens in enumerate(done.tokens):
                    expected = alone(model, prompt, params.max_new_tokens, sampler, index)
                    assert tokens[: len(expected)] == expected
    assert reused > 10 or kind != "room"


def test_a_source_is_encoded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = ours("bart")
    encodings = Encodings(model, monkeypatch)
    expected = model.generate(source=list(SOURCES[1]), max_new_tokens=6, return_ids=True)
    assert encodings.count == 1
    with lmstate.Engine(model, store=tmp_path) as engine:
        before = encodings.count
        for begun, reused in ((None, 0), (None, 1), ([7, 8], 1), ([7, 9, 5], 2)):
            done = engine.submit(begun, source=SOURCES[1], max_new_tokens=6).result(600)
            assert done.usage.reused == reused
            if begun is None:
                assert done.tokens[0] == expected
        assert encodings.count == before + 1
        assert engine.submit(source=SOURCES[2], max_new_tokens=1).result(600).usage.reused == 0
        assert engine.submit(source=SOURCES[1], salt="other", max_new_tokens=1).result(600).usage.reused == 0
        assert encodings.count == before + 3
        assert "[a source]" in engine.tree()
    with lmstate.Engine(model, store=tmp_path) as engine:
        before = encodings.count
        done = engine.submit([7, 8, 9], source=SOURCES[1], max_new_tokens=6).result(600)
        assert done.usage.reused == 3 and encodings.count == before


def test_sources_that_do_not_fit_are_refused() -> None:
    model = ours("bart")
    with lmstate.Engine(model, memory=450_000) as engine:
        bad: dict[str, Any]
        for bad, why in (
            ({"source": []}, "no tokens|at least"),
            ({"source": [99]}, "99"),
            ({"source": [[5], [6]]}, "one source"),
            ({"source": [5], "session": "one"}, "sessions have no sources"),
            ({"prompt": [5, 6]}, "reads a source"),
            ({"prompt": [[5], [6]], "source": [5]}, "2 prompt"),
            ({"source": [5] * 400}, "memory"),
        ):
            with pytest.raises(ValueError, match=why):
                engine.submit(**bad)
        with pytest.raises(lmstate.CapacityError, match="learned 250"):
            engine.submit(source=[5] * 251, max_new_tokens=1).result(600)
        assert engine.submit(source=[5], max_new_tokens=1).result(600).finished == ["length"]
    with lmstate.Engine(ours("llama")) as engine:
        with pytest.raises(lmstate.UnsupportedError, match="no encoder"):
            engine.submit(source=[5])
        with pytest.raises(ValueError, match="None"):
            engine.submit()
    with pytest.raises(lmstate.UnsupportedError, match="a drafter was given"):
        lmstate.Engine(model, draft=ours("llama"))
    with pytest.raises(lmstate.UnsupportedError, match="a server's requests have none"):
        refuse_sources(model)
