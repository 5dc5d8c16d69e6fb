"""The router: biases, padding, what the spread adds, a lambda that may step over its bounds,
evidence that adds up over the layers, and densities that tell members apart."""

import copy
import io

import pytest
import torch
from networks import close, normal
from torch import nn

from harmomoe.moe.context import COMPONENTS, FORMS, Context
from harmomoe.moe.router import DensityRouter, EvidenceRouter, Router, RouterSettings

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
    assert forms == {form: form for form in FORMS} | dict(random="mean")


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


# ---- logits that add up over the layers


@pytest.mark.parametrize("reach", ["sequence", "prefix"])
@pytest.mark.parametrize("form", ["logistic", "activation"])
def test_cumulative_routers_decide_by_the_mean_of_all_so_far(form, reach):
    hidden, lam = form == "activation", 0.7
    z, h = normal(3, 2, 6, 4).double(), normal(3, 2, 6, 5, random_state=1).double()
    mask = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    how = dict(lam=lam, horizon=3.0, sees_hidden=hidden)
    vectors = normal(3, 3, 4 + 5 * hidden, random_state=2).double()
    earlier, said = None, []
    for layer in range(3):
        given = vectors[layer], 2
        how["biases"] = normal(3, random_state=3 + layer).double()
        alone = Router(*given, **how).double()
        router = Router(*given, **how, cumulative=True, earlier=earlier).double()
        seen = z[layer], Context(mask, reach), h[layer] if hidden else None
        said.append(alone.logits(*seen))
        wanted = torch.stack(said).mean(0)
        assert torch.allclose(router.logits(*seen), wanted, atol=1e-12)
        assert torch.allclose(router.probabilities(*seen), wanted.softmax(-1), atol=1e-12)
        earlier = router
    assert not torch.allclose(wanted, said[-1])
    with pytest.raises(ValueError, match="run the layers in their order"):
        router.logits(z[0, :, :3], Context(reach=reach), h[0, :, :3] if hidden else None)


# ---- evidence


D, M, E = 5, 7, 3  # sizes of tokens and of hidden activations, and the number of experts


def chain(layers=3, top_k=1, dtype=torch.float64):
    "Routers of several layers with random numbers, each with the one before it."
    torch.manual_seed(0)
    routers = []
    for _ in range(layers):
        earlier = routers[-1] if routers else None
        vectors, biases = torch.randn(E, 4 * (D + M)) / 4, torch.randn(E)
        router = EvidenceRouter(vectors, top_k, biases=biases, earlier=earlier)
        nn.init.normal_(router.center)
        nn.init.uniform_(router.scale, 0.3, 1.5)
        routers.append(router)
    return nn.ModuleList(routers).to(dtype)


def tokens_of(layers=3, samples=4, tokens=6, dtype=torch.float64):
    "What enters the layers, and hidden activations: [B, T, d] and [B, T, m] for each."
    draw = lambda size, k: normal(samples, tokens, size, random_state=k).to(dtype)
    return [(draw(D, 10 + k), draw(M, 20 + k)) for k in range(layers)]


def run(routers, seen, mask=None, **how):
    "Probabilities in every layer of one pass."
    context = Context(mask, **how)
    return [router.probabilities(z, context, h) for router, (z, h) in zip(routers, seen)]


def f(router, z, h):
    "What a layer says of one sample without padding, [T, d] and [T, m], by the definition."
    parts = [part for x in (z, h) for part in (x.mean(0), (x.var(0, correction=0) + 1e-6).sqrt())]
    e, q = router.vectors.chunk(2, 1)
    u = (torch.cat(parts) - router.center) / router.scale
    u = u.where(u.abs() <= 3, 3 * u.sign())
    return e @ u + q @ (u * u) + router.biases


def test_each_layer_decides_by_the_mean_of_all_looks_so_far():
    routers, seen = chain(), tokens_of()
    found, clipped = run(routers, seen), 0
    for sample in range(4):
        looks = [f(router, z[sample], h[sample]) for router, (z, h) in zip(routers, seen)]
        for layer in range(3):
            wanted = torch.stack(looks[: layer + 1]).mean(0).softmax(0)
            assert torch.allclose(found[layer][sample], wanted.expand(6, E), atol=1e-12)
    for router, (z, _) in zip(routers, seen):
        clipped += ((z.mean(1) - router.center[:D]) / router.scale[:D] > 3).sum()
    assert clipped > 0 and not torch.allclose(found[2], found[1])


def test_padding_and_company_change_nothing_of_what_adds_up():
    routers, seen = chain(), tokens_of()
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[0, 2:], mask[2, :3] = False, False
    expected = run(routers, [(z[:1, :2], h[:1, :2]) for z, h in seen])
    for padding in (0.0, 1e3):
        put = lambda x: torch.where(mask[..., None], x, padding)
        found = run(routers, [(put(z), put(h)) for z, h in seen], mask)
        for one, two in zip(found, expected):
            assert torch.allclose(one[0], two[0, :1].expand(6, E), atol=1e-12)
    whole = run(routers, seen)
    for sample in range(4):
        alone = run(routers, [(z[sample, None], h[sample, None]) for z, h in seen])
        assert all(torch.allclose(x[sample], y[0], atol=1e-12) for x, y in zip(whole, alone))


def test_a_router_can_be_asked_again_as_those_do_who_watch_it():
    routers, seen = chain(), tokens_of()
    first = run(routers, seen)
    for router, (z, h), pi in zip(routers, seen, first):
        assert torch.equal(router.probabilities(z, Context(), h), pi)
        assert torch.equal(router(z, Context(), h)[0], pi.max(-1, keepdim=True).values)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_pass_that_was_interrupted_leaves_nothing_for_the_next_one(stop):
    routers, seen = chain(), tokens_of()
    expected = run(routers, seen)
    for samples in (4, 2):  # as many, and fewer
        run(routers[:stop], [(5 * z[:samples], h[:samples]) for z, h in seen])
        assert all(torch.equal(one, two) for one, two in zip(run(routers, seen), expected))


def test_a_layer_without_the_one_before_it_is_one_clear_error():
    routers, seen = chain(), tokens_of()
    with pytest.raises(ValueError, match="which has not seen this batch: run the layers in their"):
        routers[1].probabilities(seen[1][0], Context(), seen[1][1])
    run(routers, seen)
    with pytest.raises(ValueError, match="which has not seen this batch"):
        routers[1].probabilities(seen[1][0][:3], Context(), seen[1][1][:3])


def test_every_look_so_far_learns_from_a_layers_decision_and_no_later_one():
    routers, seen = chain(), tokens_of()
    for layer in range(3):
        routers.zero_grad()
        run(routers, seen)[layer][..., 0].sum().backward()
        for index, router in enumerate(routers):
            learns = router.vectors.grad is not None and router.vectors.grad.abs().max() > 1e-6
            assert learns == (index <= layer)
    assert not any(router.lam.requires_grad for router in routers)


def pickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_add_up_by_themselves(copied):
    routers, seen = chain(), tokens_of()
    expected = run(routers, seen)  # with gradients, whose graph cannot be copied
    again = copied(routers)
    assert [router.earlier for router in again] == [[], [again[0]], [again[1]]]
    assert not any(router.total is not None for router in again)
    with torch.no_grad():
        routers[0].vectors.zero_()
    assert all(torch.equal(one, two) for one, two in zip(run(again, seen), expected))
    assert not torch.allclose(run(routers, seen)[2], expected[2])


def test_a_router_holds_its_own_numbers_and_not_those_before_it():
    routers = chain()
    for router in routers:
        assert set(router.state_dict()) == {"vectors", "biases", "lam", "center", "scale"}
        assert len([*router.modules()]) == 1 and len([*router.parameters()]) == 3
    assert [router.looks for router in routers] == [1, 2, 3]


def test_who_is_switched_off_or_shifted_is_so_in_each_layer_alone():
    routers, seen = chain(top_k=2), tokens_of()
    free = run(routers, seen)
    routers[0].active = torch.tensor([True, False, True])
    routers[1].shift = torch.tensor([0.0, 1.0, -2.0])
    first, second, third = run(routers, seen)
    on = free[0][..., [0, 2]]
    assert not first[..., 1].any()
    assert torch.allclose(first[..., [0, 2]], on / on.sum(-1, keepdim=True), atol=1e-12)
    wanted = (free[1].log() + routers[1].shift).softmax(-1)
    assert torch.allclose(second, wanted, atol=1e-12)
    assert torch.equal(third, free[2])  # what was seen stays what it was


def test_in_half_precision_what_adds_up_is_in_float32():
    routers = chain(dtype=torch.float32)
    wide, half = tokens_of(dtype=torch.float32), tokens_of(dtype=torch.bfloat16)
    expected, found = run(routers, wide), run(routers, half)
    assert {pi.dtype for pi in found} == {torch.float32}
    rounded = run(routers, [(z.float(), h.float()) for z, h in half])
    assert all(torch.equal(one, two) for one, two in zip(found, rounded))
    assert all(torch.allclose(one, two, atol=0.1) for one, two in zip(found, expected))


def test_a_prefix_has_no_spread():
    routers, seen = chain(), tokens_of()
    with pytest.raises(ValueError, match="need the whole sequence, or prompt"):
        run(routers, seen, reach="prefix")
    with pytest.raises(ValueError, match="form is 'evidence', which needs the whole sequence"):
        RouterSettings(form="evidence", context="prefix")


# ---- densities


def with_densities(layers=3, looking=3):
    "The same routers with a density of every expert but the first, the seed's own."
    routers, plain = [], chain(layers)
    for place, one in enumerate(plain):
        earlier = routers[-1] if routers else None
        how = dict(biases=one.biases.data, earlier=earlier, follows=place >= looking)
        router = DensityRouter(one.vectors.data, 2, **how).double()
        router.center.copy_(one.center), router.scale.copy_(one.scale)
        nn.init.normal_(router.axes)
        nn.init.normal_(router.middle)
        router.whiten[1:] = torch.eye(COMPONENTS) / 3
        routers.append(router)
    return nn.ModuleList(routers), plain


def test_the_pool_keeps_what_it_has_and_the_most_likely_member_gets_the_most():
    (routers, plain), seen = with_densities(), tokens_of()
    logits = lambda some: [r.logits(z, Context(), h)[:, 0] for r, (z, h) in zip(some, seen)]
    for router, found, ratios in zip(routers, logits(routers), logits(plain)):
        assert torch.equal(found[:, 0], ratios[:, 0])
        shares = (found[:, 1:] - ratios[:, 1:].amax(1, keepdim=True)).exp()
        assert torch.allclose(shares.sum(1), torch.ones(4).double())
        densities = router.densities[:, 0, 1:]
        assert torch.allclose(shares, densities.softmax(1)) and len(densities.unique()) > 4


def test_who_follows_says_what_the_last_look_said():
    (routers, _), seen = with_densities(3, looking=2), tokens_of()
    found = run(routers, seen)
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def test_members_that_are_off_have_no_part_in_what_the_others_share():
    (routers, plain), seen = with_densities(), tokens_of()
    # for each sample: all, the seed and the second, the seed alone, the third alone
    rows = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1]]).bool()
    everybody, found = run(routers, seen), run(routers, seen, active=rows)
    ratios = run(plain, seen, active=rows)
    for whole, some, ratio in zip(everybody, found, ratios):
        assert torch.allclose(some[0], whole[0])
        assert torch.allclose(some[1], ratio[1])  # of one member there is nothing to tell apart
        assert (some[2, :, 0] == 1).all() and (some[3, :, 2] == 1).all()
    for router in routers:
        router.active = torch.tensor([True, True, False])
    alike = run(routers, seen)
    assert all(torch.allclose(one[1], some[1]) for one, some in zip(alike, found))


def test_evidence_learns_and_densities_do_not():
    (routers, _), seen = with_densities(1), tokens_of(1)
    rows = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1]]).bool()
    z = seen[0][0].clone().requires_grad_()
    routers[0].probabilities(z, Context(active=rows), seen[0][1])[..., 0].sum().backward()
    assert routers[0].vectors.grad.any() and z.grad.isfinite().all()
    assert not any(buffer.requires_grad for buffer in routers.buffers())


def test_padding_changes_no_density():
    (routers, _), seen = with_densities(), tokens_of()
    mask = torch.tensor([[True] * 4 + [False] * 2] * 4)
    short = [(z[:, :4], h[:, :4]) for z, h in seen]
    for found, wanted in zip(run(routers, seen, mask), run(routers, short)):
        assert torch.allclose(found[:, :4], wanted)


def test_routers_with_densities_are_copied_without_the_last_pass():
    (routers, _), seen = with_densities(), tokens_of()
    wanted, again = run(routers, seen), copy.deepcopy(routers)
    assert all(router.densities is None and router.total is None for router in again)
    assert all(torch.equal(*pair) for pair in zip(wanted, run(again, seen)))
