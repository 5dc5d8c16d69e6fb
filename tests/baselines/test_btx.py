"A Mixture of Experts whose router starts from nothing."

from dataclasses import replace

import numpy as np
import pytest
from watching import untrained

from harmomoe.baselines.btx import linear_router, mix, random_public
from harmomoe.config.settings import changed
from harmomoe.models.observe import observe_routing
from harmomoe.server.finetune import proxy_union


def test_it_sees_as_many_random_public_samples_as_there_would_be_proxies(tiny, rows):
    public, other = tiny.public, tiny.public.with_config(replace(tiny.settings, random_state=1))
    chosen = rows(random_public(public, 3))
    assert len(chosen) == 3 * tiny.settings.proxies.number
    assert {(domain, split) for domain, split, _ in chosen} == {("pool", "train")}
    assert chosen == rows(random_public(public, 3)) != rows(random_public(other, 3))
    assert chosen != rows(proxy_union(tiny.bundles, public))
    assert len(random_public(public, 50)) == len(tiny.pool.train)


@pytest.mark.parametrize("top_k, sums_to_one", [(1, False), (2, True), (3, True)])
def test_it_divides_by_the_sum_of_the_weights_only_where_there_are_several(
    top_k, sums_to_one, tiny
):
    assert linear_router(top_k).norm_topk_prob == sums_to_one
    config = changed(untrained(tiny.settings), {"router.top_k": top_k})
    model = mix(tiny.bundles, tiny.public.with_config(config))
    assert model.experts == ["a", "b", "c"]
    assert np.allclose(observe_routing(model, tiny.pool.test).weight, 1) == sums_to_one
