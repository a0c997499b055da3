"""The loss in chunks and its gradients are those of whole texts, wherever these are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmstate.errors import CapacityError, StateError
from lmstate.training import TrainableModel, hidden_states, loss
from lmstate.training.chunked import Tape
from lmstate.training.streams import StreamAttention
from tests.training.in_double import InDouble
from tests.training.small import furthest, gradients, opened, ragged, saved, theirs, trainable, whole_loss
from tests.zoo import CASES as ZOO
from tests.zoo import GROWING

# One of every layer kind and of what crosses layers; every other case of the zoo in the soak.
CASES = (
    "llama-dynamic", "gpt2", "gemma2", "gemma3n", "gpt_oss", "mistral", "llama4", "deepseek_v3", "mimo_v2_flash",
    "qwen3_next", "kimi_linear", "mamba2", "falcon_h1", "mamba", "zamba2", "lfm2", "zaya", "recurrent_gemma", "xlstm",
    "rwkv", "minimax", "bailing_hybrid", "longcat_flash",
)  # fmt: skip
ROWS = (40, 23, 5)


def trained(case: str, model: TrainableModel | None = None) -> tuple[TrainableModel, dict[str, Any], torch.Tensor]:
    """A model, the gradients that whole rows give, and their loss."""
    model = trainable(case) if model is None else model
    expected = whole_loss(model, ragged(*ROWS))
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    return model, wanted, expected


def check_exact(case: str, chunks: tuple[int, ...]) -> None:
    with saved(theirs(case)) as folder, InDouble():
        model, wanted, expected = trained(case, opened(folder))
        for chunk in chunks:
            got = loss(model, ragged(*ROWS), chunk=chunk)
            got.backward()
            assert float(abs(got - expected).detach()) < 1e-12
            # Some gradients are zero but for rounding: a bias that all keys share moves no softmax.
            worst, name = furthest(gradients(model), wanted, floor=1e-6)
            assert worst < 1e-10, (chunk, name)
            model.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_chunks_equal_those_of_whole_texts_in_float64(case: str) -> None:
    check_exact(case, (16,))


@pytest.mark.soak
@pytest.mark.parametrize("case", sorted({*ZOO} - {*GROWING}))
def test_gradients_of_any_cut_equal_those_of_whole_texts_in_float64(case: str) -> None:
    check_exact(case, (1, 7, 16, 39, 64))


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "deepseek_v3", "gemma3n"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_in_chunks_equal_those_of_whole_texts_in_float32(case: str, checkpoint: bool) -> None:
    model, wanted, expected = trained(case)
    got = loss(model, ragged(*ROWS), chunk=16, checkpoint=checkpoint)
    got.backward()
    assert float(abs(got - expected).detach()) < 1e-5
    worst, name = furthest(gradients(model), wanted, floor=1e-5)
    assert worst < (1e-5 if case != "qwen3_next" else 1e-4), name  # the delta rule's own rounding


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "falcon_h1", "mamba", "rwkv"])
def test_what_an_optimizer_writes_the_next_loss_uses(case: str) -> None:
    """Also where the model uses what is made of a parameter: biases, decays, kernels, folded projections."""
    model, rows = trainable(case), ragged(*ROWS)
    before = float(loss(model, rows, chunk=16).detach())
    torch.manual_seed(0)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf += 0.3 * torch.randn_like(leaf)
    after = float(loss(model, rows, chunk=16).detach())
    assert after == pytest.approx(float(whole_loss(model, rows).detach()), rel=1e-4)
    assert abs(after - before) > 1e-2


def test_gradients_add_up_over_calls_and_follow_what_the_loss_is_multiplied_by() -> None:
    model, wanted, _ = trained("llama")
    for factor in (2.0, -1.0):
        (loss(model, ragged(*ROWS), chunk=9) * factor).backward()
    assert furthest(gradients(model), wanted, floor=1e-5)[0] < 1e-5


def test_any_loss_over_hidden_states_may_be_taken() -> None:
    model, rows = trainable("mistral"), ragged(*ROWS)

    def odd(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0].square().sum() + hidden[1, :23].sin().sum()

    model.refresh()
    odd(hidden_states(model, rows, chunk=64)).backward()
    wanted = gradients(model)
    model.zero_grad()
    odd(hidden_states(model, rows, chunk=6)).backward()
    assert furthest(gradients(model), wanted, floor=1e-4)[0] < 1e-4


def test_only_labeled_tokens_are_learned() -> None:
    model, rows = trainable("llama"), ragged(20)
    labels = [[-100] * 12 + rows[0][12:]]
    got = loss(model, rows, chunk=8, labels=labels, reduction="sum")
    logits = model(rows)
    assert logits is not None
    expected = torch.nn.functional.cross_entropy(logits[0, 11:19], torch.tensor(rows[0][12:]), reduction="sum")
    assert float(abs(got - expected).detach()) < 1e-4
    assert bool(loss(model, [[1, 2, 3]], labels=[[-100] * 3]).isnan())
    assert float(loss(model, [[1]], reduction="sum").detach()) == 0.0


def test_no_tensor_of_all_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = trainable("llama"), ragged(40)
    monkeypatch.setattr("lmstate.training.next_token.LOGITS", 99 * 4)
    most = 0
    whole = torch.nn.functional.cross_entropy

    def is_intercepted(logits: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, len(logits))
        return whole(logits, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", is_intercepted)
    expected = loss(model, rows, chunk=8)
    assert most == 4
    monkeypatch.undo()
    assert float(abs(loss(model, rows, chunk=8) - expected).detach()) < 1e-6


def saved_bytes(model: TrainableModel, length: int, chunk: int) -> tuple[int, int]:
    """The most bytes that the graph of a chunk holds, weights apart, and those of the state with its gradients."""
    most = held = kept = 0
    weights = {leaf.untyped_storage().data_ptr() for leaf in model.parameters()}
    backward, clear = Tape.backward, Tape._clear

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most, held
        if tensor.untyped_storage().data_ptr() not in weights:
            held += tensor.nbytes
            most = max(most, held)
        return tensor

    def counted(tape: Tape, *rest: Any) -> None:
        nonlocal kept
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backward(tape, *rest)
        for part in tape.parts:
            assert isinstance(part, StreamAttention)
            kept += part.nbytes() + sum(grad.nbytes for grad in part.past.grads)

    def forget(tape: Tape) -> None:
        nonlocal held
        clear(tape)
        held = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "backward", counted)
        patch.setattr(Tape, "_clear", forget)
        loss(model, ragged(length), chunk=chunk).backward()
    return most, kept


def test_what_a_chunk_saves_does_not_grow_with_the_text() -> None:
    model = trainable("llama")  # 3 layers of 2 kv heads of 8 features
    (short, _), (long, kept), (whole, _) = (saved_bytes(model, *each) for each in ((64, 32), (480, 32), (480, 480)))
    assert long == short
    assert whole > 10 * long
    assert kept == 2 * 3 * 480 * 2 * 2 * 8 * 4  # with gradients, layers, tokens, keys and values, of float32


def test_bad_calls_are_refused_and_change_nothing() -> None:
    model = trainable("gpt2")  # which has learned 512 positions
    for call in (
        lambda: loss(model, [[1, 2]], chunk=0),
        lambda: loss(model, [[1, 2]], reduction="most"),  # type: ignore[arg-type]
        lambda: loss(model, [[1, 2]], labels=[[1]]),
        lambda: loss(model, [[1, 2]], labels=[[1, 1000]]),
        lambda: loss(model, [[1, 1000]]),
        lambda: loss(model, []),
    ):
        with pytest.raises(StateError):
            call()
    assert model.max_positions is not None
    with pytest.raises(CapacityError):
        loss(model, [[1] * (model.max_positions + 1)])
    assert all(leaf.grad is None for leaf in model.parameters())


def test_a_model_without_parameters_is_refused() -> None:
    from tests.zoo import ours

    with pytest.raises(StateError, match="trainable=True"):
        loss(ours("llama"), [[1, 2, 3]])
