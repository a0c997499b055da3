"""Products by the native bodies: the same numbers from the same parameters, in the module that was there."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM, DynamicCache

from lmstate.integrations.transformers import StateCache, use_native_linear, use_torch_linear
from lmstate.integrations.transformers.kernels import linear
from lmstate.ops import dispatch
from tests.integrations.models import DECODERS, call, decoder, text

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)
FAMILIES = ("llama", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5", "mamba2", "falcon_h1", "lfm2", "gpt2")
NATIVE = pytest.mark.skipif(dispatch.choice().library is None, reason="there is no native body to be used")


@contextmanager
def native(model: nn.Module) -> Iterator[None]:
    use_native_linear(model)
    try:
        yield
    finally:
        use_torch_linear(model)


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product that runs natively."""
    library = dispatch.choice().library
    ran: list[int] = []
    if library is None:
        return ran
    inner = library.dense.linear

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        ran.append(x.numel() // x.shape[-1])
        return inner(x, *args)

    monkeypatch.setattr(library.dense, "linear", counted)
    return ran


def one(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(40, 33, bias=bias).to(dtype).requires_grad_(False)
    use_native_linear(module)
    return module


def torchs(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight, module.bias)


# ---- models


@pytest.mark.parametrize("name", DECODERS)
def test_logits_equal_those_of_the_model_as_it_was(name: str, rows_run: list[int]) -> None:
    model, ids = decoder(name), text(60, rows=2)
    pieces: list[list[torch.Tensor]] = []
    for native_too in (False, True):
        cache = StateCache(model)
        if native_too:
            taken = use_native_linear(model)
        pieces.append([call(model, ids[:, a:b], cache, a) for a, b in itertools.pairwise(CUTS)])
    use_torch_linear(model)
    torch.testing.assert_close(torch.cat(pieces[1], 1), torch.cat(pieces[0], 1), atol=1e-4, rtol=1e-4)
    assert taken > 0
    if dispatch.choice().library is not None:
        assert {2} <= set(rows_run) and max(rows_run) <= 32


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3", "mistral"))
def test_bfloat16_is_as_exact_as_torchs(name: str, rows_run: list[int]) -> None:
    """Beside the same weights in float32: sums are rounded once by both, in another order."""
    exact = copy.deepcopy(decoder(name)).to(torch.bfloat16).float()
    model, ids = copy.deepcopy(exact).to(torch.bfloat16), text(40)
    errors = []
    for native_too in (False, True):
        if native_too:
            use_native_linear(model)
        cache, wanted = StateCache(model), StateCache(exact)
        for a, b in itertools.pairwise((0, 30, *range(31, 41))):
            errors.append((call(model, ids[:, a:b], cache, a) - call(exact, ids[:, a:b], wanted, a)).square().mean())
    torchs_error, ours = (torch.stack(part).mean().sqrt() for part in (errors[:11], errors[11:]))
    assert ours <= 1.25 * torchs_error
    assert not rows_run or set(rows_run) == {1}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_of_generating_gives_the_same_tokens(name: str) -> None:
    model, ids = decoder(name), text(20, rows=2)
    ids[0, :7] = 0
    settings: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    for way in ({}, {"num_beams": 3}):
        expected = model.generate(ids, **settings, **way)
        with native(model):
            assert torch.equal(model.generate(ids, **settings, **way), expected)
            assert torch.equal(model.generate(ids, **settings, **way, past_key_values=StateCache(model)), expected)


@pytest.mark.parametrize("name", ("llama", "qwen3_5"))
def test_a_gradient_is_followed(name: str) -> None:
    model, ids = copy.deepcopy(decoder(name)).train(), text(10)
    grads = []
    for native_too in (False, True):
        if native_too:
            use_native_linear(model)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name])


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_names_files_and_ties_stay(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(decoder(name))
    before = model.state_dict()
    use_native_linear(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(before[key].data_ptr() == after[key].data_ptr() for key in before)  # not one copy
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert linear.NativeLinear not in {type(module) for module in again.modules()}
    model.load_state_dict(again.state_dict())
    twin = copy.deepcopy(model)
    for each in (again, twin):
        torch.testing.assert_close(call(each, text(9), DynamicCache()), call(model, text(9), DynamicCache()))
    assert twin.lm_head.weight is twin.get_output_embeddings().weight
    assert (twin.lm_head.weight is twin.get_input_embeddings().weight) == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", FAMILIES)
def test_taken_twice_and_given_back_the_model_is_as_it_was(name: str) -> None:
    model = decoder(name)
    kinds = [type(module) for module in model.modules()]
    assert use_native_linear(model) == use_native_linear(model) == kinds.count(nn.Linear) > 0
    assert nn.Linear not in {type(module) for module in model.modules()}
    use_torch_linear(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_a_compiled_model_holds_torchs_products(name: str) -> None:
    model, ids = copy.deepcopy(decoder(name)), text(12)
    expected = call(model, ids, DynamicCache())
    use_native_linear(model)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(step(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)


# ---- one module


@NATIVE
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bias", (True, False))
def test_a_product_is_rounded_once(dtype: torch.dtype, bias: bool, rows_run: list[int]) -> None:
    module = one(dtype, bias)
    for shape in ((40,), (1, 40), (1, 1, 40), (3, 4, 40)):
        x = torch.randn(shape).to(dtype)
        y = module(x)
        exact = F.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps)
    assert rows_run == [1, 1, 1, 12]


@NATIVE
def test_a_row_is_the_same_beside_others() -> None:
    module, x = one(), torch.randn(32, 40)
    together = module(x)
    assert all(torch.equal(module(x[i : i + n]), together[i : i + n]) for i, n in ((0, 1), (5, 3), (7, 25)))


@NATIVE
def test_an_edited_replaced_or_converted_weight_counts_at_once(rows_run: list[int]) -> None:
    module, x = one(), torch.randn(2, 40)
    seen = [module(x)]
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(module(x), torchs(module, x))
    module.weight.data = torch.randn(33, 40)
    torch.testing.assert_close(module(x), torchs(module, x))
    module.weight = nn.Parameter(torch.randn(33, 40), requires_grad=False)
    torch.testing.assert_close(module(x), torchs(module, x))
    module.load_state_dict({"weight": torch.ones(33, 40), "bias": torch.zeros(33)})
    torch.testing.assert_close(module(x), torchs(module, x))
    assert len(rows_run) == 4 + len(seen)
    module.to(torch.bfloat16)
    assert module(x.bfloat16()).dtype == torch.bfloat16 and len(rows_run) == 6
    module.to(torch.float64)
    assert torch.equal(module(x.double()), torchs(module, x.double())) and len(rows_run) == 6


def test_hooks_parametrizations_and_masks_are_obeyed() -> None:
    module, x = one(), torch.randn(2, 40)
    hook = module.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(module(x), torchs(module, x) + 1)
    hook.remove()
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    torch.testing.assert_close(module(x), F.linear(x, module.weight, module.bias))
    parametrize.remove_parametrizations(module, "weight")
    torch.testing.assert_close(module(x), torchs(module, x))
    prune.random_unstructured(module, "weight", 0.5)
    assert (module.weight == 0).any()
    torch.testing.assert_close(module(x), torchs(module, x))


def test_what_watches_operations_sees_them(rows_run: list[int]) -> None:
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    module, x = one(), torch.randn(2, 40)
    expected = torchs(module, x)
    torch.testing.assert_close(torch.func.vmap(module)(x), expected)
    weights = {"weight": torch.zeros(33, 40), "bias": torch.ones(33)}
    assert torch.equal(torch.func.functional_call(module, weights, (x,)), torch.ones(2, 33))
    jacobian = torch.func.jacfwd(module)(x[0])
    torch.testing.assert_close(jacobian, module.weight.detach())
    with forward_ad.dual_level():
        dual = module(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, module.weight.sum(-1).expand(2, -1))
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() == 2 * 2 * 33 * 40
    graph = make_fx(module)(x)
    torch.testing.assert_close(graph(x + 1), torchs(module, x + 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    program = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(program(x + 1), torchs(module, x + 1))
    assert rows_run == []


def test_what_does_not_fit_is_refused_as_torch_refuses_it() -> None:
    module = one()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(2, 80))
    with pytest.raises(RuntimeError, match="dtype"):
        module(torch.randn(2, 40).double())
    assert module(torch.randn(0, 40)).shape == (0, 33)
    assert module.to("meta")(torch.randn(2, 40, device="meta")).shape == (2, 33)


def test_kinds_of_its_own_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8))
    assert use_native_linear(model) == 1
    assert [type(module) for module in model] == [Own, linear.NativeLinear, nn.Bilinear]
