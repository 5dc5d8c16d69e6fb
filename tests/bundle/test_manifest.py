"""What a bundle may say of itself: names that stay in their folder, numbers that can be, plain
adapters."""

import json
from dataclasses import asdict

import pytest

from harmomoe.base.schema import parse
from harmomoe.bundle.manifest import AdapterConfig, Facts, Manifest, check_name

# ---- names


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "7",
        "flags",
        "St. Mary+Co_3-b",
        "Žluťoučký kůň",
        "東京",
        "x" * 100,
        "seeds",
        "Seed",
        "a..",
    ],
)
def test_ordinary_names_pass(name):
    check_name(name)


WRONG = {
    "empty": "",
    "blank": " ",
    "the seed's": "seed",
    "parent": "..",
    "this folder": ".",
    "hidden": ".a",
    "a path": "a/b",
    "a path upwards": "../a",
    "an absolute path": "/etc/passwd",
    "a path of Windows": "a\\b",
    "a drive": "C:",
    "home": "~",
    "a variable": "$HOME",
    "a pattern": "*",
    "a line break": "a\nb",
    "a line break at the end": "a\n",
    "no character": "a\0b",
    "an escape sequence": "\x1b[31ma",
    "a mark that turns the text around": "a\u202eb",
    "half a character": "\ud800",
    "a tab": "a\tb",
    "quotes": "a'b",
    "begins with a dash": "-a",
    "101 letters": "x" * 101,
    "100 letters of four bytes": "\U0001d49c" * 100,
}


@pytest.mark.parametrize("what", WRONG)
def test_names_that_lead_elsewhere_or_cannot_be_shown_are_refused(what):
    with pytest.raises(ValueError, match="must be 1 to 100 letters, digits and"):
        check_name(WRONG[what])


def test_the_message_about_a_long_name_is_short():
    with pytest.raises(ValueError) as caught:
        check_name("x" * 10**6)
    assert len(str(caught.value)) < 500


# ---- facts


def test_numbers_may_be_zero():
    facts = dict(client="a", private_samples=0, proxies=0)
    assert asdict(parse(Facts, facts, "it")) == facts


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(client=None), "client is None"),
        (dict(client=7), "client is 7"),
        (dict(client=["a"]), r"client is \['a'\]"),
        (dict(client="../a"), "the client's name '../a'"),
        (dict(private_samples=-1), "private_samples is -1, but must not be negative"),
        (dict(proxies=-(10**30)), "proxies is -1000000.*, but must not be negative"),
        (dict(proxies=1.5), "proxies is 1.5"),
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
    with pytest.raises(ValueError, match=said):
        parse(Facts, facts, "it")


# ---- the whole


@pytest.fixture
def told(tiny_clients):
    "What the manifest of a good bundle says."
    return json.loads((tiny_clients / "a" / "bundle" / "manifest.json").read_text())


def test_manifest_of_a_bundle_passes_and_says_the_same_afterwards(told):
    assert json.loads(json.dumps(asdict(parse(Manifest, told, "it")))) == told


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


def test_fields_that_do_not_change_what_the_weights_mean_are_left_out():
    found = parse(AdapterConfig, PLAIN | dict(lora_dropout=0.1, target_modules=["c_fc"]), "it")
    assert found == AdapterConfig("LORA", 4, 8.0)


@pytest.mark.parametrize(
    "change, scale",
    [
        (dict(), 2),
        (dict(use_rslora=True), 4),
        (dict(lora_alpha=1), 0.25),
        (dict(r=1), 8),
        (dict(init_lora_weights=False), 2),
        (dict(init_lora_weights="gaussian"), 2),
        (dict(rank_pattern={}, alpha_pattern={}, modules_to_save=[]), 2),
    ],
    ids=str,
)
def test_scale_is_alpha_over_r_or_its_root(change, scale):
    assert parse(AdapterConfig, PLAIN | change, "it").scale == scale


NOT_PLAIN = [
    dict(peft_type="IA3"),
    dict(peft_type="x" * 10**6),
    dict(bias="all"),
    dict(bias="lora_only"),
    dict(use_dora=True),
    dict(lora_bias=True),
    dict(rank_pattern={"c_fc": 2}),
    dict(alpha_pattern={"c_fc": 2}),
    dict(modules_to_save=["proj"]),
    *(dict(init_lora_weights=name) for name in ("pissa", "olora", "eva", "corda", "loftq")),
]


@pytest.mark.parametrize("change", NOT_PLAIN, ids=lambda change: str(change)[:40])
def test_anything_but_plain_lora_is_refused_naming_what_is_odd(change):
    [(name, value)] = change.items()
    odd = {"peft_type": value, "bias": f"bias={value!r}"}.get(name, name)
    with pytest.raises(ValueError, match=f"must be a plain LoRA adapter.*{odd[:20]}") as caught:
        parse(AdapterConfig, PLAIN | change, "it")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("r", [0, -4, 1.5, None, "all", [4], float("nan")], ids=repr)
def test_a_rank_is_a_positive_whole_number(r):
    with pytest.raises(ValueError, match="^it: r is"):
        parse(AdapterConfig, PLAIN | dict(r=r), "it")


@pytest.mark.parametrize("alpha", [0, -8, None, "x", float("nan"), float("inf"), -float("inf")])
def test_alpha_is_a_positive_number(alpha):
    with pytest.raises(ValueError, match="lora_alpha"):
        parse(AdapterConfig, PLAIN | dict(lora_alpha=alpha), "it")


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_factors_mean_must_be_said(name):
    with pytest.raises(ValueError, match=f"the field '{name}' is missing"):
        parse(AdapterConfig, {key: value for key, value in PLAIN.items() if key != name}, "it")
