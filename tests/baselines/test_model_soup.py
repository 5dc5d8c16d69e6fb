"Averages of weights."

import pytest
import torch
from networks import moved, same, weights

from harmomoe.baselines.model_soup import (
    average,
    choose_greedily,
    greedy_soup,
    kept_experts,
    uniform_soup,
)
from harmomoe.models.evaluate import measure
from harmomoe.models.model import Model
from harmomoe.server.finetune import proxy_union


def test_average_of_backbones_is_the_mean_of_every_parameter(tiny):
    generator, parts = torch.Generator().manual_seed(0), []
    for _ in range(3):
        backbone = tiny.seed.new_backbone()
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        parts.append(backbone)
    mean, tables = average(tiny.seed, parts), [dict(part.named_parameters()) for part in parts]
    for name, parameter in mean.named_parameters():
        wanted = torch.stack([table[name].double() for table in tables]).mean(0)
        assert torch.allclose(parameter.double(), wanted, atol=1e-6, rtol=1e-6), name
    everything = weights(tiny.seed.backbone)  # there are no buffers
    assert moved(mean, everything) == everything.keys() == tables[0].keys()


@pytest.mark.parametrize(
    "alone, together, kept",
    [
        ((5, 9, 7), (9, 8), "bc"),  # not worse: kept; worse: left out
        ((5, 9, 7), (8, 10), "ba"),  # the third is tried without the second
        ((5, 9, 7), (8, 8), "b"),
        ((4, 4, 4), (4, 4), "abc"),
        ((0, 0, 0), (1, 2), "abc"),
    ],
)
def test_greedy_choice_keeps_the_best_and_adds_what_does_no_harm(alone, together, kept):
    answers = iter([*alone, *together])
    assert choose_greedily([*"abc"], lambda names: next(answers)) == [*kept]
    assert next(answers, None) is None


def test_greedy_soup_judges_means_by_their_accuracy_on_the_proxies(tiny):
    bundles, data = tiny.bundles, proxy_union(tiny.bundles, tiny.public)

    def correct(names):
        chosen = [bundle.expert(tiny.seed).backbone for bundle in bundles if bundle.client in names]
        mean = Model(tiny.seed, average(tiny.seed, chosen))
        return measure(mean, data, tiny.pool.classes).correct

    kept = [bundle.client for bundle in kept_experts(bundles, tiny.public)]
    assert kept == choose_greedily([*"abc"], correct)
    wanted = uniform_soup(kept_experts(bundles, tiny.public), tiny.public)
    assert same(greedy_soup(bundles, tiny.public).backbone, wanted.backbone)
