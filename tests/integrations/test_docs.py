"""The page "From transformers" runs as written, and its table is true."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache, StaticCache

from lmstate.integrations.transformers import StateCache
from tests.integrations.models import call, decoder, repetitive, text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-transformers.md"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ("The", "capital", "of", "France", "is", "And", "Italy", "?", "Paris", "not", "one", "two", "three")
    words = ["[UNK]", *known]
    inner = Tokenizer(models.WordLevel({word: i + 3 for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small random models under the names of large ones."""
    made = {"SmolLM2": "llama", "Qwen3.5": "qwen3_5", "mamba2": "mamba2", "granite": "granitemoehybrid"}

    def from_pretrained(name: str, **_: object) -> Any:
        return decoder(next(small for part, small in made.items() if part in name))

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer())
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small")
def test_every_example_on_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 8
    with torch.no_grad():
        exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    decoder("llama").set_attn_implementation("sdpa")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("transformers_*.py")), ids=lambda path: path.stem)
def test_every_example_file_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


# ---- the table

MAKE: dict[str, Callable[[Any], Any]] = {
    "DynamicCache": lambda model: DynamicCache(config=model.config),
    "StaticCache": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "QuantizedCache": lambda model: QuantizedCache("fp8", model.config),
    "StateCache": StateCache,
}


def goes_back(model: Any, cache: Any) -> bool:
    ids = text(50)
    call(model, ids[:, :40], cache, 0)
    call(model, text(9, seed=7), cache, 40)
    cache.crop(-9)
    with torch.no_grad():
        expected = model(ids).logits[:, 40:]
    return torch.allclose(call(model, ids[:, 40:], cache, 40), expected, atol=1e-3)


def declares_no_length(cache: str) -> bool:
    model = decoder("llama")
    made = MAKE[cache](model)
    return call(model, text(70), made, 0).shape[1] == 70


def copies_none(cache: str) -> bool:
    model = decoder("llama")
    made = MAKE[cache](model)
    call(model, text(10), made, 0)
    places = set()
    for i in range(5):
        call(model, text(1, seed=i), made, 10 + i)
        places.add(made.layers[0].keys.untyped_storage().data_ptr())
    return len(places) == 1 and made.layers[0].keys.numel() > 0


def drafts(cache: str) -> bool:
    model, ids = decoder("qwen3_next"), repetitive(40)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    drafted = model.generate(ids, prompt_lookup_num_tokens=4, past_key_values=MAKE[cache](model), **settings)
    return torch.equal(drafted, model.generate(ids, **settings))


def knows_length(cache: str) -> bool:
    model = decoder("mamba2")
    made = MAKE[cache](model)
    call(model, text(10), made, 0)
    return made.get_seq_length() == 10


def repeats_rows(cache: str) -> bool:
    model = decoder("qwen3_next")
    made = MAKE[cache](model)
    call(model, text(10), made, 0)
    made.batch_repeat_interleave(2)
    return call(model, text(3).repeat(2, 1), made, 10).shape[0] == 2


def saves(cache: str, folder: Path) -> bool:
    model = decoder("llama")
    made = MAKE[cache](model)
    call(model, text(10), made, 0)
    made.save(folder / "cache")
    return type(made).load(folder / "cache", model).get_seq_length() == 10


def fewer_bits(cache: str) -> bool:
    model = decoder("llama")
    made = MAKE[cache](model)
    call(model, text(10), made, 0)
    return made.layers[0].keys.numel() == 0 and made.get_seq_length() == 10


def compiles(cache: str) -> bool:
    """Steps of one token, after the two at which the compiler learns that lengths change."""
    torch._dynamo.reset()
    model = copy.deepcopy(decoder("llama"))
    made = MAKE[cache](model)
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        model(text(5), past_key_values=made, use_cache=True)
        for i in range(20):
            with torch._dynamo.config.patch(error_on_recompile=i > 1):
                step(text(1, seed=i), past_key_values=made, use_cache=True)
    return True


ROWS: dict[str, Callable[[str, Path], bool]] = {
    "no length to declare": lambda cache, _: declares_no_length(cache),
    "a new token copies no earlier ones": lambda cache, _: copies_none(cache),
    "rewinds attention": lambda cache, _: goes_back(decoder("llama"), MAKE[cache](decoder("llama"))),
    "rewinds a full sliding window, without setup": lambda cache, _: goes_back(
        decoder("mistral"), MAKE[cache](decoder("mistral"))
    ),
    "rewinds recurrent layers": lambda cache, _: goes_back(decoder("qwen3_next"), MAKE[cache](decoder("qwen3_next"))),
    "drafts for recurrent models": lambda cache, _: drafts(cache),
    "reports the length of a model without attention": lambda cache, _: knows_length(cache),
    "repeats the rows of a recurrent model": lambda cache, _: repeats_rows(cache),
    "saves and loads, with checks": saves,
    "`generate` compiles its steps by itself": lambda cache, _: MAKE[cache](decoder("llama")).is_compileable,
    "compiles in one graph": lambda cache, _: compiles(cache),
    "stores keys in fewer bits": lambda cache, _: fewer_bits(cache),
}


def cells() -> list[tuple[str, str, bool]]:
    table = PAGE.read_text().split("## What each cache can do")[1].split("\n## ")[0]
    lines = [line.strip("|\n ").split("|") for line in table.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    caches = header[-4:]
    return [(row[0], cache, said == "yes") for row in rows for cache, said in zip(caches, row[1:])]


@pytest.mark.parametrize(("ability", "cache", "said"), cells())
def test_what_each_cache_can_do(ability: str, cache: str, said: bool, tmp_path: Path) -> None:
    try:
        can = ROWS[ability](cache, tmp_path)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        can = False  # refused, or broken off
    assert can == said


def test_export_refuses_the_cache_by_name() -> None:
    model = decoder("llama")
    given = {"input_ids": text(5), "past_key_values": StateCache(model), "use_cache": True}
    with pytest.raises(ValueError, match="StateCache"):
        torch.export.export(model, (), given, strict=False)
