"""Passes on device "cuda" without a GPU: torch's fake tensors know shapes, types and devices, and
raise where devices are mixed or a pass would have to wait for a number of the GPU's. Backward
passes run on device "meta", which has no autograd threads of its own."""

import open_clip
import pytest
import torch
from small_unified import CONFIGS, LEFT, TEXTS, build
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from harmomoe.moe.context import cache_in
from harmomoe.moe.ffn import CLIP_FFN, find_ffns
from harmomoe.moe.layer import LowRankMoE, insert_experts
from harmomoe.moe.router import RouterSettings

WAYS = [
    (context, form)
    for context in ("sequence", "prefix", "prompt")
    for form in ("mean", "logistic", "moments", "activation", "evidence")
    if context != "prefix" or form in ("mean", "logistic")
]
ways = pytest.mark.parametrize("context, form", WAYS)
MAPS = "q_proj", "v_proj"


@pytest.fixture
def gpu():
    "A GPU that there is not."
    with FakeTensorMode(), torch.device("cuda"):
        yield


def fresh(tensor):
    "A tensor of the same shape and type on the device at hand."
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def texts(context="prefix"):
    "What a pass is given."
    found = dict(input_ids=fresh(TEXTS), attention_mask=fresh(LEFT))
    return found | (dict(prompt_mask=fresh(LEFT)) if context == "prompt" else {})


def on_gpu(tensor):
    return tensor.device.type == "cuda"


def test_mixed_devices_and_waiting_are_found(gpu):
    with pytest.raises(Exception, match="device"):
        torch.ones(2) + torch.ones(2, device="cpu")
    with pytest.raises(DataDependentOutputException):
        torch.ones(2).sum().item()


@ways
@pytest.mark.parametrize("attention", [(), MAPS])
def test_every_router_of_language_models(gpu, context, form, attention):
    model = build(context=context, form=form, attention=attention)
    assert all(map(on_gpu, (*model.parameters(), *model.buffers())))
    with torch.no_grad():
        logits = model(**texts(context)).logits
    assert on_gpu(logits) and logits.shape == (*TEXTS.shape, 97)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(gpu, family):
    with torch.no_grad():
        assert on_gpu(build(family)(**texts()).logits)


@pytest.mark.parametrize("settings", [dict(horizon=3.0), dict(norm_topk_prob=True), dict(top_k=1)])
def test_settings_of_routers(gpu, settings):
    with torch.no_grad():
        assert on_gpu(build(**settings)(**texts()).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(gpu, dtype):
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            assert build(attention=MAPS)(**texts()).logits.dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("context", ["prefix", "prompt"])
@pytest.mark.parametrize("attention", [(), MAPS])
def test_token_by_token_with_a_cache(gpu, context, attention):
    model, given = build(context=context, attention=attention), texts(context)
    with torch.no_grad():
        begun = model(**given, use_cache=True)
        for more in (1, 2):
            mask = torch.ones(2, TEXTS.shape[1] + more, dtype=torch.int64)
            begun = model(
                input_ids=torch.zeros(2, 1, dtype=torch.int64),
                attention_mask=mask,
                cache=cache_in(begun),
                use_cache=True,
            )
    assert on_gpu(begun.logits) and begun.logits.shape == (2, 1, 97)


def test_what_routers_say(gpu):
    with torch.no_grad():
        said = build()(**texts(), output_router_logits=True).router_logits
    assert len(said) == 3 and all(map(on_gpu, said))


@pytest.mark.parametrize("attention", [(), MAPS])
@pytest.mark.parametrize("form", ["mean", "logistic", "moments", "activation", "evidence"])
def test_backward(form, attention):
    with torch.device("meta"):
        model = build(context="sequence", form=form, attention=attention).train()
        # without a mask, at whose numbers transformers would look
        model(input_ids=fresh(TEXTS), labels=fresh(TEXTS)).loss.backward()
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {".a", ".b"} <= {name[-2:] for name in learned if "attn" in name} or not attention
    without = {name for name, p in learned.items() if p.grad is None}
    assert not any("mlp" in name and "router" not in name for name in without), without
    assert any(".router." in name for name in learned.keys() - without)


def tower(**settings):
    "An image tower with experts."
    vision = open_clip.transformer.VisionTransformer(32, 8, 48, 2, 4, 2.0, output_dim=16)
    layout, paths = find_ffns(vision, (CLIP_FFN,))
    settings = RouterSettings(**dict(top_k=2, form="mean") | settings)
    insert_experts(
        vision.requires_grad_(False), paths, layout, [0, 4, 8], [0.0, 2.0, 1.0], settings
    )
    return vision.eval()


@pytest.mark.parametrize("form", ["mean", "logistic", "moments", "activation", "evidence"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_image_towers(gpu, form, top_k):
    model = tower(form=form, top_k=top_k)
    assert sum(isinstance(part, LowRankMoE) for part in model.modules()) == 2
    with torch.no_grad():
        embedded = model(torch.zeros(5, 3, 32, 32))
    assert on_gpu(embedded) and embedded.shape == (5, 16)


@pytest.mark.parametrize("form", ["mean", "logistic", "evidence"])
def test_image_towers_backward(form):
    with torch.device("meta"):
        model = tower(form=form).train()
        model(torch.zeros(5, 3, 32, 32)).sum().backward()
    factors = [
        p for part in model.modules() if isinstance(part, LowRankMoE) for p in part.a.values()
    ]
    assert factors and all(p.grad is not None and p.grad.device.type == "meta" for p in factors)
