"Averages of weights."

import pytest
from networks import same

from harmomoe.baselines.model_soup import (
    choose_greedily,
    greedy_soup,
    kept_experts,
    uniform_soup,
)
from harmomoe.models.evaluate import measure
from harmomoe.server.finetune import proxy_union


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
        chosen = [bundle for bundle in bundles if bundle.client in names]
        return measure(uniform_soup(chosen, tiny.public), data, tiny.pool.classes).correct

    kept = [bundle.client for bundle in kept_experts(bundles, tiny.public)]
    assert kept == choose_greedily([*"abc"], correct)
    wanted = uniform_soup(kept_experts(bundles, tiny.public), tiny.public)
    assert same(greedy_soup(bundles, tiny.public).backbone, wanted.backbone)
