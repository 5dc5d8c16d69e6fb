"Where the tokens go: what is counted is what the routers say, of real tokens only."

import matplotlib
import numpy as np
import pytest
import torch
from families import QUESTIONS, seed_of
from networks import embed

from harmomoe.models.observe import Routing, observe_routing, routing_figure
from harmomoe.models.unified import UnifiedModel
from harmomoe.moe.router import RouterSettings


@pytest.fixture(scope="module")
def text():
    "A unified model for text whose experts differ and whose router prefers some."
    settings = RouterSettings(top_k=2, form="logistic")
    experts = ["seed", "a", "b"], [0, 4, 2], [0.0, 2.0, 1.0]
    model, generator = UnifiedModel(seed_of(), *experts, settings), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            for p in (*layer.a.values(), *layer.b.values(), *layer.router.parameters()):
                if p is not layer.router.lam:
                    p.normal_(std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("form", ["mean", "moments"])
def test_load_entropy_and_weight_are_those_of_what_enters_each_layer(form, top_k, merge_with, tiny):
    model, entered = merge_with(form=form, top_k=top_k), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    embed(model, tiny.a.test)  # in one batch
    found = observe_routing(model, tiny.a.test)
    for index, (layer, z) in enumerate(zip(model.layers, entered)):
        with torch.no_grad():
            pi = layer.router.probabilities(z).double().flatten(0, 1)
        chosen = torch.where(pi >= pi.topk(top_k).values[:, -1:], pi, 0.0)
        assert np.allclose(found.load[index], (chosen.sum(0) / chosen.sum()).numpy(), atol=1e-6)
        entropy = -(pi * pi.log()).sum(1).mean() / np.log(4)
        assert found.entropy[index] == pytest.approx(entropy.item(), abs=1e-5)
        assert found.weight[index] == pytest.approx(chosen.sum(1).mean().item(), abs=1e-6)


def test_every_token_gets_k_experts_and_divided_weights_sum_to_one(merge_with, tiny):
    for k in (1, 2, 3, 4):
        models = [merge_with(top_k=k, norm_topk_prob=value) for value in (False, True)]
        plain, normed = (observe_routing(model, tiny.pool.test) for model in models)
        if k == 4:
            assert np.allclose(plain.load, normed.load)
        with torch.no_grad():
            experts = models[0].layers[0].router(torch.randn(3, 5, 64))[1]
        assert experts.shape == (3, 5, k)
        assert all(len(set(chosen)) == k for chosen in experts.flatten(0, 1).tolist())
        assert np.allclose(normed.weight, 1)
        assert np.allclose(plain.weight, 1) == (k == 4)


def test_batches_do_not_matter_and_padding_does_not_count(text):
    "In batches of one there is no padding."
    alone = observe_routing(text, QUESTIONS, 1)
    for size in (None, 2, 4):
        found = observe_routing(text, QUESTIONS, size)
        for name in ("load", "entropy", "weight"):
            assert np.allclose(getattr(found, name), getattr(alone, name), atol=1e-5)
    assert (alone.load > 0.01).all()


def test_it_changes_nothing_and_leaves_no_hook_behind_also_after_an_error(
    merge_with, tiny, monkeypatch
):
    model = merge_with()
    before = embed(model, tiny.a.test)
    observe_routing(model, tiny.a.test)

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.layers[1], "forward", interrupted)
        observe_routing(model, tiny.a.test)
    assert not any(layer.router._forward_hooks for layer in model.layers)
    assert torch.equal(embed(model, tiny.a.test), before)


def test_an_only_expert_has_all_the_load_and_no_entropy(tiny):
    alone = UnifiedModel(tiny.seed, ["seed"], [0], [0.0])
    found = observe_routing(alone, tiny.a.test)
    assert found.load.tolist() == [[1], [1]] and found.weight.tolist() == [1, 1]
    assert np.allclose(found.entropy, 0)


def test_undecided_routers_have_an_entropy_of_one(merge_with, tiny):
    model = merge_with()
    with torch.no_grad():
        for layer in model.layers:
            layer.router.vectors.zero_()
    found = observe_routing(model, tiny.a.test)
    assert np.allclose(found.entropy, 1, atol=1e-6) and np.allclose(found.weight, 0.25)


def test_figure_says_how_many_percent_go_where():
    matplotlib.use("agg")
    load = np.array([[0.2, 0.8], [1.0, 0.0]])
    routing = Routing(["seed", "a"], load, np.ones(2), np.ones(2))
    figure = routing_figure({"one": routing, "two": routing})
    assert [axis.get_title() for axis in figure.axes] == ["one", "two"]
    for axis in figure.axes:
        assert [text.get_text() for text in axis.texts] == ["20", "80", "100", "0"]
        assert [label.get_text() for label in axis.get_xticklabels()] == ["seed", "a"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["1", "2"]
