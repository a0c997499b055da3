"""Fine-tuning: resumed to the bit, saved as a checkpoint, on documents that do not see each other."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorFile
from lmstate.training import LoraConfig, LoraModel, ParameterModel, loss
from lmstate.training.documents import Document, batches, read_entries, split, tokenize
from lmstate.training.finetune import FinetuneSettings, FineTuning, plot
from tests.generation.fake_model import FakeTokenizer
from tests.training.small import ragged, saved, theirs, trainable

DOCUMENTS = [Document(row, row) for row in ragged(9, 20, 14, 31, 5, 12)]
SETTINGS = FinetuneSettings(steps=6, rate=5e-3, warmup=2, weight_decay=0.01, batch_tokens=45, accumulate=2, chunk=8)


def model(kind: str) -> ParameterModel:
    if kind == "all":
        return trainable("lfm2")
    torch.manual_seed(0)
    with saved(theirs("llama")) as folder:
        made = lmstate.load(folder, weights="int8", trainable="lora", lora=LoraConfig(2))
    assert isinstance(made, LoraModel)
    return made


@pytest.mark.parametrize("kind", ["all", "lora"])
def test_a_training_that_was_stopped_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole = FineTuning(model(kind), DOCUMENTS, SETTINGS, tmp_path / "whole", DOCUMENTS[:2])
    assert whole.run(evaluate_every=2)
    first = FineTuning(model(kind), DOCUMENTS, SETTINGS, tmp_path / "cut", DOCUMENTS[:2])
    asked = iter([False, False, True])
    assert not first.run(save_every=2, evaluate_every=2, stop=lambda: next(asked))
    if kind == "lora":  # the adapter as it is at the stop
        held = TensorFile(tmp_path / "cut" / "adapter_model.safetensors")
        for name, tensor in first.model.adapter.named_tensors():
            assert torch.equal(held.tensor(name), tensor.detach()), name
    with pytest.raises(ModelError, match="resume"):
        FineTuning(model(kind), DOCUMENTS, SETTINGS, tmp_path / "cut")
    with pytest.raises(ModelError, match="documents"):
        FineTuning(model(kind), DOCUMENTS[1:], SETTINGS, tmp_path / "cut", resume=True)
    second = FineTuning(model(kind), DOCUMENTS, SETTINGS, tmp_path / "cut", DOCUMENTS[:2], resume=True)
    assert second.step == 3
    assert second.run(evaluate_every=2)
    for (name, one), (_, other) in zip(whole.parameters.items(), second.parameters.items(), strict=True):
        assert torch.equal(one, other), name
    logs = [(tmp_path / each / "log.jsonl").read_text() for each in ("whole", "cut")]
    assert logs[0] == logs[1]
    reports = [json.loads(line) for line in logs[0].splitlines()]
    assert [each["step"] for each in reports] == [1, 2, 3, 4, 5, 6]
    assert reports[-1]["loss"] < reports[0]["loss"]
    pytest.importorskip("matplotlib")
    plot(tmp_path / "whole" / "log.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["all", "lora"])
def test_files_reach_the_disk_before_they_get_their_names(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    named: dict[str, bool] = {}  # whether what got this name had been synced
    fsync, rename = os.fsync, os.replace

    def replaced(old: Path, new: Path) -> None:
        named[Path(new).name] = os.stat(old).st_ino in synced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", replaced)
    tuned = model(kind)
    assert FineTuning(tuned, DOCUMENTS, replace(SETTINGS, steps=2), tmp_path / "run").run()
    tuned.save_pretrained(tmp_path / "saved")
    tensors = "model.safetensors" if kind == "all" else "adapter_model.safetensors"
    assert {"tensors.safetensors", "training.json", tensors} <= set(named)
    assert all(named.values())


@pytest.mark.parametrize("case", ["llama", "gemma3-multimodal", "qwen3_moe", "phi3", "qwen2-tied-mqa", "mamba2"])
def test_a_saved_model_is_that_model_in_transformers_too(case: str, tmp_path: Path) -> None:
    reference, trained = theirs(case), trainable(case)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    loss(trained, ragged(20), chunk=9).backward()
    optimizer.step()
    # The checkpoint that it came from must still be there for what no model uses.
    with saved(reference) as folder:
        source = trained._leaves.source
        source.path = folder
        trained.save_pretrained(tmp_path)
    ids = torch.tensor(ragged(20))
    with torch.no_grad():
        wanted = trained(ids)
        again = lmstate.load(tmp_path, weights="float32")(ids)
        there = type(reference).from_pretrained(tmp_path).eval()(ids).logits
        torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(there, wanted, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(reference(ids).logits, there, atol=1e-3)


def test_documents_of_a_batch_do_not_see_each_other() -> None:
    made = trainable("qwen3_next")
    together = loss(made, [each.tokens for each in DOCUMENTS], chunk=8, reduction="sum")
    alone = sum(float(loss(made, [each.tokens], reduction="sum").detach()) for each in DOCUMENTS)
    assert abs(float(together.detach()) - alone) < 1e-3


def test_batches_hold_every_document_once_and_no_more_than_they_may() -> None:
    for seed in range(5):
        made = list(batches(DOCUMENTS, 40, random.Random(seed)))
        assert sorted(len(each.tokens) for batch in made for each in batch) == [5, 9, 12, 14, 20, 31]
        assert all(len(batch) == 1 or len(batch) * max(len(d.tokens) for d in batch) <= 40 for batch in made)
    kept, apart = split(DOCUMENTS, 0.3, seed=1)
    assert len(apart) == 2 and len(kept) == 4 and not set(map(id, kept)) & set(map(id, apart))
    assert split(DOCUMENTS, 0.0, seed=1)[1] == []


def test_a_training_that_was_killed_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    """Ended between the two moves of a checkpoint, and in the middle of a line of the log."""
    whole = FineTuning(model("lora"), DOCUMENTS, SETTINGS, tmp_path / "whole")
    whole.run()
    first = FineTuning(model("lora"), DOCUMENTS, SETTINGS, tmp_path / "cut")
    asked = iter([False, True])
    first.run(stop=lambda: next(asked))
    checkpoint, log = tmp_path / "cut" / "checkpoint", tmp_path / "cut" / "log.jsonl"
    checkpoint.rename(tmp_path / "cut" / "checkpoint.old")
    (tmp_path / "cut" / "checkpoint.part").mkdir()
    log.write_text(log.read_text() + '{"step": 3, "lo')
    second = FineTuning(model("lora"), DOCUMENTS, SETTINGS, tmp_path / "cut", resume=True)
    assert second.step == 2
    second.run()
    assert log.read_text() == (tmp_path / "whole" / "log.jsonl").read_text()
    for (name, one), (_, other) in zip(whole.parameters.items(), second.parameters.items(), strict=True):
        assert torch.equal(one, other), name


def test_a_training_of_another_adapter_is_not_resumed(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:

        def training(settings: FinetuneSettings, **options: Any) -> FineTuning:
            made = lmstate.load(folder, weights="int8", trainable="lora", lora=LoraConfig(2, **options))
            assert isinstance(made, LoraModel)
            return FineTuning(made, DOCUMENTS, settings, tmp_path, resume=True)

        training(SETTINGS).run(stop=lambda: True)
        with pytest.raises(ModelError, match=r"adapter \(alpha was 16.0\)"):
            training(SETTINGS, alpha=4.0)
        with pytest.raises(ModelError, match=r"settings \(rate was 0.005\)"):
            training(replace(SETTINGS, rate=1.0))


def test_documents_longer_than_the_model_knows_are_refused_before_any_step(tmp_path: Path) -> None:
    made = trainable("gpt2")
    assert made.max_positions is not None
    long = Document([1] * (made.max_positions + 1), [1] * (made.max_positions + 1))
    with pytest.raises(ModelError, match="positions"):
        FineTuning(made, [DOCUMENTS[0], long], SETTINGS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class ChatTokenizer(FakeTokenizer):
    def chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, tools: list[Any] | None = None
    ) -> list[int]:
        if any(message["role"] == "poet" for message in messages):
            raise ModelError("this template knows no poets")
        text = f"[{len(tools)} tools]" if tools else ""
        text += "".join(f"<{message['role']}>{message['content']}/" for message in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode("utf-8")  # half a surrogate pair is refused
        return [ord(letter) for letter in text]


def documents_of(file: Path, eos: int | None, skipped: Callable[[str], None] = lambda where: None) -> list[Document]:
    return tokenize(read_entries(file), ChatTokenizer(), eos, skipped)  # type: ignore[arg-type]


def test_answers_and_completions_are_learned_and_nothing_else(tmp_path: Path) -> None:
    chat = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]
    lines = [
        {"text": "abc"},
        {"prompt": "p:", "completion": "cd"},
        {"messages": [{"role": role, "content": content} for role, content in chat]},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    read = documents_of(file, eos=0)
    learned = ["".join(chr(label) if label > 0 else "$" for label in each.labels if label != -100) for each in read]
    assert learned == ["abc$", "cd$", "yes/no/"]
    assert all(len(each.tokens) == len(each.labels) for each in read)
    for bad in ("{", "[1]", '{"messages": 3}', '{"text": 3}', "{}", '{"text": ""}', "", "\n\n", '{"messages": []}'):
        file.write_text(bad)
        with pytest.raises(ModelError):
            documents_of(file, eos=None)


def test_tools_of_a_chat_go_to_the_template(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file.write_text(json.dumps({"messages": messages, "tools": [{"name": "clock"}]}))
    (read,) = documents_of(file, eos=None)
    assert "".join(map(chr, read.tokens)) == "[1 tools]<user>q/<assistant>a/"
    assert "".join(chr(label) for label in read.labels if label != -100) == "a/"


def test_a_file_of_text_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text('{"text": "abc"}\nnext', "utf-8-sig")
    (read,) = documents_of(file, eos=0)
    assert "".join(map(chr, read.tokens[:-1])) == '{"text": "abc"}\nnext' and read.tokens == read.labels
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="UTF-8"):
        documents_of(file, eos=0)


def test_faults_name_their_line_and_lines_without_an_answer_are_told(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    good, poet = '{"text": "abc"}', json.dumps({"messages": [{"role": "poet", "content": "x"}]})
    asks = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    half = '{"text": "a \\ud800"}'
    for bad in (poet, json.dumps({"messages": [], "tools": 3}), "\xff", "[", '{"instruction": "x"}', half):
        file.write_bytes(f"{good}\n\n{bad}\n".encode("latin-1"))
        with pytest.raises(ModelError, match="line 3"):
            documents_of(file, eos=None)
    file.write_text(f"{good}\n{asks}\n{good}\n")
    told: list[str] = []
    read = documents_of(file, eos=None, skipped=told.append)
    assert len(read) == 2 and len(told) == 1 and told[0].endswith("line 2")


def test_lines_of_sharegpt_and_alpaca_are_chats(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    chats = [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"instruction": "a", "input": "c", "output": "b"},
        {"instruction": "a", "input": "", "output": "b"},
    ]
    data.write_text("\n".join(map(json.dumps, [*chats, {"conversations": [{"from": [], "value": "a"}]}])))
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert [entry.fields["messages"] for entry in read_entries(data)] == [
        [{"role": "system", "content": "s"}, user, said],
        [{"role": "user", "content": "a\n\nc"}, said],
        [user, said],
        [{"role": "[]", "content": "a"}],
    ]
    for wrong in ({"conversations": "a"}, {"conversations": [3]}, {"instruction": "a"}):
        data.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match="line 1"):
            read_entries(data)
