"""What a bundle may say of itself: names that stay in their folder, numbers that can be, plain
adapters, no more than the limits allow."""

import json
from dataclasses import asdict, fields

import pytest
from peft import LoraConfig

from harmomoe.base.schema import parse
from harmomoe.bundle.manifest import (
    ALTERING,
    EMPTY,
    FREE,
    MOST,
    AdapterConfig,
    Facts,
    Limits,
    Manifest,
    altered,
)

# ---- facts


def test_numbers_may_be_zero():
    for count in (0, MOST):
        facts = dict(client="a", private_samples=count, proxies=count)
        assert asdict(parse(Facts, facts, "it")) == facts | dict(guarantee=None)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(client=None), "client is None"),
        (dict(client=7), "client is 7"),
        (dict(client=["a"]), r"client is \['a'\]"),
        (dict(client="../a"), "the client's name '../a'"),
        (dict(client="seed"), "not be 'seed'"),
        (dict(private_samples=-1), "private_samples is -1, but must be 0 to 10"),
        (dict(private_samples=MOST + 1), "private_samples is 1000000000001, but must be 0 to"),
        (dict(private_samples=10**400), "private_samples is 1000000000"),
        (dict(private_samples=True), "private_samples is True"),
        (dict(private_samples="12"), "private_samples is '12'"),
        (dict(private_samples=12.0), "private_samples is 12.0"),
        (dict(proxies=-(10**30)), "proxies is -1000000.*, but must be 0 to"),
        (dict(proxies=1.5), "proxies is 1.5"),
        (dict(proxies=False), "proxies is False"),
        (dict(proxies=float("nan")), "proxies is nan"),
        (dict(proxies=float("inf")), "proxies is inf"),
        (dict(proxies="many"), "proxies is 'many'"),
        (dict(proxies=None), "proxies is None"),
        (dict(proxies=[12]), r"proxies is \[12\]"),
        (dict(images=["..."]), "unknown field 'images'"),
    ],
    ids=str,
)
def test_facts_that_cannot_be_are_refused(change, said):
    facts = dict(client="a", private_samples=30, proxies=12) | change
    with pytest.raises(ValueError, match=said) as caught:
        parse(Facts, facts, "it")
    assert len(str(caught.value)) < 400


# ---- the whole


@pytest.fixture
def told(tiny_clients):
    "What the manifest of a good bundle says."
    return json.loads((tiny_clients / "a" / "bundle" / "manifest.json").read_text())


def test_manifest_of_a_bundle_passes_and_says_the_same_afterwards(told):
    found = json.loads(json.dumps(asdict(parse(Manifest, told, "it"))))
    if "invitation" not in told["inputs"]:
        assert found["inputs"].pop("invitation") is None
    if "guarantee" not in told["facts"]:
        assert found["facts"].pop("guarantee") is None
    assert found == told


@pytest.mark.parametrize("name", ["kind", "format", "inputs", "facts", "versions", "files"])
def test_every_field_is_needed_and_has_its_type(name, told):
    with pytest.raises(ValueError, match=f"it: the field '{name}' is missing"):
        parse(Manifest, {key: value for key, value in told.items() if key != name}, "it")
    for wrong in (None, 7, "text", ["text"], {"x": None}):
        with pytest.raises(ValueError, match=f"^it: .*{name}|^it: unknown field 'x'"):
            parse(Manifest, told | {name: wrong}, "it")


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(kind="model"), "kind is 'model'"),
        (dict(format=2), "format is 2"),
        (dict(note="hello"), "unknown field 'note'"),
        (dict(versions={"torch": 2.0}), "versions.torch is 2.0"),
        (dict(files={"../x": dict(sha256="0" * 63, bytes=1)}), "must be 64 hexadecimal digits"),
        (dict(files={"x": dict(sha256="0" * 64, bytes="big")}), "files.x.bytes is 'big'"),
        (dict(files={"x": dict(sha256="0" * 64)}), "'files.x.bytes' is missing"),
        (dict(files={"x": dict(sha256="0" * 64, bytes=1, mode=7)}), "files.x.mode"),
        (dict(inputs=dict(seed=None, pool="", settings={})), "inputs.seed is None"),
        (dict(inputs=dict(seed={}, pool=7, settings={})), "inputs.pool is 7"),
        (dict(inputs=dict(seed={}, pool="a\n", settings={})), "pool must be one line of text"),
        (dict(inputs=dict(seed={}, pool="", settings=[])), r"inputs.settings is \[\]"),
        (dict(inputs=dict(seed={}, pool="")), "'inputs.settings' is missing"),
        (dict(inputs=dict(seed={}, pool="", settings={}, data={})), "unknown field 'inputs.data'"),
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_does_not_belong_is_refused_with_its_place(change, said, told):
    with pytest.raises(ValueError, match=said):
        parse(Manifest, told | change, "it")


# ---- the adapter's configuration

PLAIN = dict(peft_type="LORA", r=4, lora_alpha=8)
READ = {field.name for field in fields(AdapterConfig)}


def test_every_field_of_the_installed_peft_has_its_kind():
    "A field that a new version adds has to be looked at: does it change what the factors mean?"
    assert {field.name for field in fields(LoraConfig)} == READ | FREE | ALTERING.keys()
    assert not READ & FREE and not READ & ALTERING.keys() and not FREE & ALTERING.keys()
    assert EMPTY.keys() <= ALTERING.keys()


def test_what_peft_writes_of_a_plain_adapter_passes():
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_fc"])
    told = json.loads(json.dumps(config.to_dict(), default=list))
    assert parse(AdapterConfig, told, "it") == AdapterConfig("LORA", 4, 8.0)
    assert altered(told, FREE | READ) is None


def test_fields_that_do_not_change_what_the_weights_mean_are_left_out():
    for value in (0.1, ["c_fc"], "all", {"a": 1}, None):
        found = parse(AdapterConfig, PLAIN | dict.fromkeys(FREE, value), "it")
        assert found == AdapterConfig("LORA", 4, 8.0)


@pytest.mark.parametrize(
    "change, scale",
    [
        (dict(), 2),
        (dict(use_rslora=True), 4),
        (dict(lora_alpha=1), 0.25),
        (dict(lora_alpha=0.5), 0.125),
        (dict(r=1), 8),
        (dict(init_lora_weights=False), 2),
        (dict(init_lora_weights="gaussian"), 2),
        (dict(rank_pattern={}, alpha_pattern={}, modules_to_save=[]), 2),
        (dict(bias=None, megatron_core=None, qalora_group_size=None), 2),
        (dict(of_a_later_version=None, another=False, a_third={}, a_fourth=[]), 2),
    ],
    ids=str,
)
def test_scale_is_alpha_over_r_or_its_root(change, scale):
    assert parse(AdapterConfig, PLAIN | change, "it").scale == scale


VALUES = dict(
    alora_invocation_tokens=[1, 2],
    bias="all",
    fan_in_fan_out=True,
    layer_replication=[[0, 4], [2, 5]],
    layers_to_transform=3,
    megatron_core="another.core",
    modules_to_save=["proj"],
    qalora_group_size=8,
    rank_pattern={"c_fc": 2},
    target_parameters=["mlp.experts.gate_up_proj"],
    trainable_token_indices=[0, 1],
)


@pytest.mark.parametrize("name", sorted(ALTERING))
def test_a_field_that_changes_what_the_factors_mean_is_refused_by_name(name):
    for value in (VALUES.get(name, {"a": 1}), True, "x" * 10**5, 7):
        with pytest.raises(ValueError) as caught:
            parse(AdapterConfig, PLAIN | {name: value}, "it")
        said = f"it: must be a plain LoRA adapter, but {name} is {value!r:.80}, and "
        assert str(caught.value) == f"{said}{ALTERING[name]}."


@pytest.mark.parametrize("value", [True, 1, "x", [0], {"a": None}], ids=repr)
def test_a_field_of_a_later_peft_is_refused_unless_it_is_empty(value):
    with pytest.raises(ValueError, match="but tensor_ring is .*is not known here"):
        parse(AdapterConfig, PLAIN | dict(tensor_ring=value), "it")
    with pytest.raises(ValueError) as caught:
        parse(AdapterConfig, PLAIN | {"\x1b" * 10**6: value}, "it")
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


NOT_PLAIN = [
    (dict(peft_type="IA3"), "but is 'IA3'"),
    (dict(peft_type="lora"), "but is 'lora'"),
    (dict(peft_type="x" * 10**6), "but is 'xxx"),
    *(
        (dict(init_lora_weights=name), f"init_lora_weights is '{name}'")
        for name in ("pissa", "olora", "eva", "corda", "loftq", "orthogonal", "")
    ),
    (dict(init_lora_weights=None), "init_lora_weights is None"),
    (dict(use_rslora="yes"), "use_rslora is 'yes'"),
    (dict(use_rslora=1), "use_rslora is 1"),
]


@pytest.mark.parametrize("change, said", NOT_PLAIN, ids=lambda given: str(given)[:40])
def test_anything_but_plain_lora_is_refused_naming_what_is_odd(change, said):
    with pytest.raises(ValueError, match=f"^it: .*{said}") as caught:
        parse(AdapterConfig, PLAIN | change, "it")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "r", [0, -4, 1.5, 4.0, None, "all", "4", True, [4], float("nan")], ids=repr
)
def test_a_rank_is_a_positive_whole_number(r):
    with pytest.raises(ValueError, match="^it: r is"):
        parse(AdapterConfig, PLAIN | dict(r=r), "it")


@pytest.mark.parametrize(
    "alpha",
    [0, -8, None, "x", "8", True, 1e7, 1e30, 10**400, float("nan"), float("inf"), -float("inf")],
    ids=lambda alpha: repr(alpha)[:20],
)
def test_alpha_is_a_positive_number_of_ordinary_size(alpha):
    with pytest.raises(ValueError, match="lora_alpha") as caught:
        parse(AdapterConfig, PLAIN | dict(lora_alpha=alpha), "it")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_factors_mean_must_be_said(name):
    with pytest.raises(ValueError, match=f"the field '{name}' is missing"):
        parse(AdapterConfig, {key: value for key, value in PLAIN.items() if key != name}, "it")


# ---- limits


def test_limits_are_whole_numbers_and_have_defaults():
    assert parse(Limits, {}, "it") == Limits() == Limits(256, 2**31, 100_000, 0)
    assert parse(Limits, dict(rank=8, private_samples=50), "it") == Limits(8, private_samples=50)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(rank=0), "rank is 0, but must be positive"),
        (dict(bytes=-1), "bytes is -1, but must be positive"),
        (dict(proxies=0), "proxies is 0, but must be positive"),
        (dict(private_samples=-1), "private_samples is -1, but must not be negative"),
        (dict(rank=8.0), "rank is 8.0"),
        (dict(rank=True), "rank is True"),
        (dict(bytes="2 GB"), "bytes is '2 GB'"),
        (dict(bytes=float("inf")), "bytes is inf"),
        (dict(ranks=8), "unknown field 'ranks'. Did you mean 'rank'?"),
        ([8], r"it is \[8\]"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        parse(Limits, change, "it")
