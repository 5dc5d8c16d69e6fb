"The router: biases, padding, what the spread adds, and a lambda that may step over its bounds."

from functools import partial

import pytest
import torch

from harmomoe.moe.context import FORMS, Context
from harmomoe.moe.router import Router, RouterSettings

close = partial(torch.allclose, atol=1e-5)


def normal(*size, random_state=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(random_state))


# ---- logits


def test_routers_bias_is_added_to_each_logit_and_there_is_none_unless_given():
    z, vectors = normal(2, 3, 4), normal(3, 4, random_state=1)
    biases = torch.tensor([0.5, -1, 2])
    assert Router(vectors).biases is None and "biases" not in Router(vectors).state_dict()
    for lam in (0.0, 0.4):
        router = Router(vectors, lam=lam, biases=biases)
        mixed = (1 - lam) * z + lam * z.mean(1, keepdim=True)
        assert close(router.probabilities(z), (mixed @ vectors.T + biases).softmax(-1))
        assert close(Router(vectors, lam=lam).probabilities(z), (mixed @ vectors.T).softmax(-1))
    assert router.biases.requires_grad and router.biases is not biases


@pytest.mark.parametrize("width", [5, 10], ids=["token", "token and spread"])
def test_padding_changes_no_real_token_of_a_router_with_biases(width):
    z, mask = normal(2, 4, 5), torch.tensor([[True, True, False, False], [True] * 4])
    vectors, biases = normal(3, width, random_state=1), normal(3, random_state=2)
    router = Router(vectors, lam=0.6, biases=biases)
    for padding in (z, 0.0, 1e3):
        found = router.probabilities(torch.where(mask[..., None], z, padding), Context(mask))
        assert close(found[0, :2], router.probabilities(z[:1, :2])[0])
        assert close(found[1], router.probabilities(z[1:])[0])


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
def test_spread_counts_by_lambda_and_the_rest_of_the_router_is_as_without_it(lam):
    z, vectors = normal(2, 3, 4), normal(3, 8, random_state=1)
    rest = dict(lam=lam, biases=normal(3, random_state=2))
    both = Router(vectors, **rest).probabilities(z)
    token = Router(vectors[:, :4], **rest).probabilities(z)
    spread = (z.double().var(1, correction=0) + 1e-6).sqrt().float()
    shift = lam * spread @ vectors[:, 4:].T
    assert close(both, (token.log() + shift[:, None]).softmax(-1))
    assert close(both, token) == (lam == 0)
    nothing = torch.cat([vectors[:, :4], torch.zeros(3, 4)], 1)
    assert close(Router(nothing, **rest).probabilities(z), token)


# ---- lambda


def gradient_of_lambda(router, z):
    "Of a loss that depends on the probabilities of every token in its own way; and these."
    router.zero_grad()
    pi = router.probabilities(z)
    (pi * normal(*pi.shape, random_state=9)).sum().backward()
    return router.lam.grad.clone(), pi.detach()


@pytest.mark.parametrize("width", [4, 8], ids=["token", "token and spread"])
@pytest.mark.parametrize("value, bound", [(-0.2, 0.0), (-7.0, 0.0), (1.001, 1.0), (3.0, 1.0)])
def test_lambda_out_of_bounds_counts_as_the_bound_and_keeps_its_gradient(value, bound, width):
    z, router = normal(2, 3, 4), Router(normal(3, width, random_state=1), lam=bound)
    wanted, at_bound = gradient_of_lambda(router, z)
    with torch.no_grad():
        router.lam.fill_(value)
    found, pi = gradient_of_lambda(router, z)
    assert close(pi, at_bound) and wanted.abs() > 0.01
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert router.lam.item() == pytest.approx(value)  # it is not written over


@pytest.mark.parametrize("width", [4, 8], ids=["token", "token and spread"])
@pytest.mark.parametrize("start, way", [(1.3, -1), (-0.3, 1)])
def test_lambda_that_stepped_over_a_bound_can_come_back(start, way, width):
    z, vectors = normal(2, 3, 4), normal(3, width, random_state=1)
    with torch.no_grad():
        goal = Router(vectors, lam=0.5).probabilities(z)
    router = Router(vectors)
    router.vectors.requires_grad_(False)
    with torch.no_grad():
        router.lam.fill_(start)
    optimizer, seen = torch.optim.SGD([router.lam], lr=0.03), [start]
    for _ in range(300):
        optimizer.zero_grad()
        (router.probabilities(z) - goal).square().sum().backward()
        optimizer.step()
        seen.append(router.lam.item())
    assert (seen[1] - seen[0]) * way > 0 and seen[-1] == pytest.approx(0.5, abs=0.2)


# ---- settings


def test_clients_send_means_unless_the_router_starts_from_density_ratios():
    forms = {form: RouterSettings(form=form).sent_form for form in (*FORMS, "random")}
    assert forms == dict(mean="mean", logistic="logistic", moments="moments", random="mean")


# ---- members


def test_members_of_a_pass_go_before_those_of_the_router():
    z, router = normal(2, 3, 4), Router(normal(3, 4, random_state=1), top_k=2)
    router.active = torch.tensor([True, False, False])
    each = torch.tensor([[False, True, True], [True, True, False]])
    found = router.probabilities(z, Context(active=each))
    free = Router(router.vectors.detach()).probabilities(z)
    for sample, members in enumerate(each):
        assert not found[sample, :, ~members].any()
        on = free[sample, :, members]
        assert close(found[sample, :, members], on / on.sum(-1, keepdim=True))
    as_numbers = router.probabilities(z, Context(active=each.long()))
    assert torch.equal(as_numbers, found)
    assert torch.equal(router(z)[1].unique(), torch.tensor([0]))
