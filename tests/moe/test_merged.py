"Merged weights: where they are exact, whose they are, and where they are refused."

import copy
import gc
import threading
import weakref

import pytest
import torch
from moe.small_unified import LEFT, SIZE, TEXTS, build, close, families, logits_of
from transformers import DynamicCache

from harmomoe.moe.context import cache_in
from harmomoe.moe.merged import CACHE, alike, merge_experts, prompt_shares, without_experts

WHOLE = dict(max_new_tokens=7, min_new_tokens=7)
ONE = dict(context="prompt", top_k=1, lam=1.0)  # one expert answers a prompt in each layer
ASKED = torch.tensor([[1] * 9 + [0] * 7])
MAPS = ("q_proj", "v_proj")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before):
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


def read(model, texts=TEXTS[1:], **how):
    "The cache of a text that was read, with its merged weights."
    with torch.no_grad():
        return cache_in(model(texts, merged=True, **how))


def own_bytes(model, cache):
    "Bytes of a request's weights that are not the model's."
    known = {p.data_ptr() for p in model.parameters()}
    new = {p for p in cache.merged.model.parameters() if p.data_ptr() not in known}
    return sum(p.numel() * p.element_size() for p in new)


# Exact


@families
@pytest.mark.parametrize("attention", [(), MAPS], ids=["ffn", "attention"])
@pytest.mark.parametrize("norm", [True, False], ids=["1", "pi"])
def test_one_expert_for_the_prompt_is_exact(family, attention, norm):
    model = build(family, attention=attention, norm_topk_prob=norm, **ONE)
    before, text = state_of(model), TEXTS[1:]
    written = model.generate(text, **WHOLE)
    assert torch.equal(model.generate(text, merged=True, **WHOLE), written)
    cache = read(model)
    found = model(written[:, 9:], cache=cache).logits
    assert close(found, logits_of(model, written, None, prompt_mask=ASKED)[:, 9:])
    assert unchanged(model, before)


@families
def test_evidence_is_exact_too(family):
    model = build(family, form="evidence", context="prompt", top_k=1)
    merged = model.generate(TEXTS[1:], merged=True, **WHOLE)
    assert torch.equal(merged, model.generate(TEXTS[1:], **WHOLE))


@pytest.mark.parametrize("top_k", [2, 3])
def test_several_experts_are_averaged_to_second_order(top_k):
    "Half as large factors, a quarter of the error."
    errors = []
    for size in (0.02, 0.01):
        model = build(**ONE | dict(top_k=top_k, norm_topk_prob=True))
        with torch.no_grad():
            for layer in model.moe_layers:
                for b in layer.b.values():
                    b.mul_(size)
            model.double()
        written = torch.cat([TEXTS[1:], TEXTS[:1, :7]], 1)
        found = model(written[:, 9:], cache=read(model)).logits
        exact = logits_of(model, written, None, prompt_mask=ASKED)[:, 9:]
        errors.append((found - exact).norm().item())
    assert errors[0] > 1e-7 and errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_changed_attention_alone_is_exact_for_any_number_of_experts():
    model = build(attention=MAPS, **ONE | dict(top_k=2))
    with torch.no_grad():
        for layer in model.moe_layers:
            for b in layer.b.values():
                b.zero_()
    written = model.generate(TEXTS[1:], **WHOLE)
    assert torch.equal(model.generate(TEXTS[1:], merged=True, **WHOLE), written)


@pytest.mark.parametrize("how", [dict(do_sample=True), dict(num_beams=3), dict(num_beams=2)])
def test_every_way_of_writing(how):
    model, written = build(**ONE), []
    for merged in (True, False):
        torch.manual_seed(0)
        how = how | dict(num_return_sequences=2)
        written.append(model.generate(TEXTS[1:], merged=merged, **how, **WHOLE))
    assert torch.equal(*written)


def test_drafts_are_no_part_of_the_prompt():
    model, text = build(**ONE), TEXTS[1:].repeat(1, 2)
    how = dict(prompt_mask=torch.ones_like(text), merged=True) | WHOLE
    greedy = model.generate(text, **how)
    assert torch.equal(model.generate(text, prompt_lookup_num_tokens=3, **how), greedy)


def test_padding_takes_no_part():
    model = build(**ONE)
    alone = model.generate(TEXTS[:1, 3:], merged=True, **WHOLE)
    padded = model.generate(TEXTS[:1], attention_mask=LEFT[:1], merged=True, **WHOLE)
    assert torch.equal(padded[:, 3:], alone)


def test_a_router_by_the_whole_sequence_writes_with_a_cache():
    model = build(context="sequence", top_k=1, lam=1.0)
    with pytest.raises(ValueError, match="generate with use_cache=False"):
        model.generate(TEXTS[1:], **WHOLE)
    written = model.generate(TEXTS[1:], merged=True, **WHOLE)
    # the prompt's own sequence decides, as in the context "prompt"
    assert torch.equal(written, build(**ONE).generate(TEXTS[1:], **WHOLE))


def test_a_conversation_goes_on_with_its_weights():
    model, cache = build(**ONE), DynamicCache(config=build(**ONE).config.get_text_config())
    first = model.generate(TEXTS[1:], merged=True, **{CACHE: cache}, **WHOLE)
    weights = cache.merged
    longer = torch.cat([first, TEXTS[:1, 3:]], 1)
    second = model.generate(longer, merged=True, **{CACHE: cache}, **WHOLE)
    assert cache.merged is weights
    plain = DynamicCache(config=model.config.get_text_config())
    model.generate(TEXTS[1:], **{CACHE: plain}, **WHOLE)
    assert torch.equal(second, model.generate(longer, **{CACHE: plain}, **WHOLE))


# Whose weights


def following(logits):
    "The likeliest token, which does not end the text."
    return (
        logits[:, -1:].index_fill(-1, torch.tensor([SIZE["eos_token_id"]]), -torch.inf).argmax(-1)
    )


def test_requests_that_are_written_at_the_same_time_do_not_meet():
    model, texts = build(attention=MAPS, **ONE), (TEXTS[1:], TEXTS[:1, 3:])
    before, expected = state_of(model), [model.generate(text, **WHOLE) for text in texts]
    begun = [model(text, merged=True) for text in texts]
    found = [[following(one.logits)] for one in begun]

    def write(one, new):
        with torch.no_grad():
            while len(new) < 7:
                new.append(following(model(new[-1], cache=cache_in(one)).logits))

    threads = [threading.Thread(target=write, args=pair) for pair in zip(begun, found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, new, whole in zip(texts, found, expected):
        assert torch.equal(torch.cat([text, *new], 1), whole)
    assert unchanged(model, before)


def test_they_take_the_memory_of_what_experts_change_and_give_it_back():
    model = build(**ONE)
    cache = read(model)
    ffns = sum(p.numel() for layer in model.moe_layers for p in layer.ffn.parameters())
    assert own_bytes(model, cache) == 4 * ffns
    seed = read(model, members=model.members([["seed"]]))
    assert own_bytes(model, seed) == 0  # its FFNs are there already
    routed = build(attention=MAPS, **ONE)
    maps = sum(part.linear.weight.numel() for part in routed.attention_maps)
    assert own_bytes(routed, read(routed)) == 4 * (ffns + maps)
    weights = weakref.ref(cache.merged.model)
    del cache
    gc.collect()
    assert weights() is None


def test_a_copied_cache_has_the_same_weights_and_its_own_keys():
    model = build(**ONE)
    cache = read(model)
    again = copy.deepcopy(cache)
    assert again.merged is cache.merged
    first = model(TEXTS[:1], cache=cache).logits
    assert torch.equal(model(TEXTS[:1], cache=again).logits, first)
    cache.reset()
    model(TEXTS[:1, 3:], cache=cache, merged=True)
    assert cache.merged is not again.merged  # a new text, a new decision


# Members, and batches


def test_members_are_those_of_the_request():
    model = build(**ONE)
    for names in (["law"], ["seed"], ["law", "medicine"], ["seed", "medicine"]):
        who = dict(members=model.members([names]))
        written = model.generate(TEXTS[1:], merged=True, **who, **WHOLE)
        assert torch.equal(written, model.generate(TEXTS[1:], **who, **WHOLE))
    cache = read(model, members=model.members([["law"]]))
    assert cache.merged.shares.tolist() == [[0.0, 1.0, 0.0]] * 3
    model(TEXTS[1:, :1], cache=cache, members=model.members([["law"]]))
    for members in (model.members([["seed"]]), None):
        with pytest.raises(ValueError, match="were merged for other members"):
            model(TEXTS[1:, :1], cache=cache, members=members)


def test_one_member_is_exact_whatever_the_context():
    for router in (dict(), dict(context="prompt"), dict(top_k=1, lam=0.3)):
        model = build(norm_topk_prob=True, attention=MAPS, **router)
        who = dict(members=model.members([["law"]] * 2), attention_mask=LEFT)
        written = model.generate(TEXTS, merged=True, **who, **WHOLE)
        assert torch.equal(written, model.generate(TEXTS, **who, **WHOLE))


def test_texts_of_different_experts_are_refused_with_their_groups():
    model, rows = build(**ONE), [["law"], ["medicine"], ["law"]]
    texts = TEXTS[[0, 1, 1]]
    with pytest.raises(ValueError, match=r"generate each group apart \(0, 2 \| 1\)"):
        model.generate(texts, members=model.members(rows), merged=True, **WHOLE)
    who = dict(members=model.members(rows[::2]))
    written = model.generate(texts[::2], **who, merged=True, **WHOLE)
    assert torch.equal(written, model.generate(texts[::2], **who, **WHOLE))
    assert alike(torch.tensor([[0.0], [1.0], [1e-5]])) == [[0, 2], [1]]


# What cannot be


def test_what_cannot_be_merged_is_one_clear_error():
    model = build(**ONE)
    with pytest.raises(ValueError, match="merged weights belong to a cache"):
        model.generate(TEXTS[1:], merged=True, use_cache=False, prompt_mask=ASKED[:, :9], **WHOLE)
    with pytest.raises(ValueError, match="no router is asked"):
        model(TEXTS[1:], merged=True, output_router_logits=True)
    with pytest.raises(ValueError, match="do not learn"):
        build(**ONE).train()(TEXTS[1:], merged=True)


# The seed


@families
def test_without_experts_it_is_the_seed(family):
    model = build(family, attention=MAPS)
    seed, before = without_experts(model.backbone), state_of(model)
    who = dict(members=model.members([["seed"]] * 2))
    found = seed(TEXTS, attention_mask=LEFT).logits[LEFT.bool()]
    assert close(found, logits_of(model, **who)[LEFT.bool()])
    one = torch.tensor([1.0, 0.0, 0.0])
    merged = merge_experts(model.backbone, one.expand(3, 3), one)
    assert torch.equal(merged(TEXTS, attention_mask=LEFT).logits[LEFT.bool()], found)
    assert type(seed) is type(model.backbone) and unchanged(model, before)


def test_a_prefix_decides_by_its_last_token_and_other_contexts_by_all():
    decided = [(torch.rand(2, 9, 2), torch.randint(0, 3, (2, 9, 2)))]
    right = LEFT.flip(1)  # padded on the right
    shares = torch.zeros(2, 9, 3).scatter_add(-1, decided[0][1], decided[0][0])
    for mask, last in ((LEFT, [8, 8]), (right, [5, 8]), (None, [8, 8])):
        found = prompt_shares(decided, 3, "prefix", mask)[:, 0]
        assert torch.equal(found, shares[torch.arange(2), last])
        real = torch.ones(2, 9) if mask is None else mask
        mean = (shares * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        for reach in ("prompt", "sequence"):
            assert torch.allclose(prompt_shares(decided, 3, reach, mask)[:, 0], mean)
