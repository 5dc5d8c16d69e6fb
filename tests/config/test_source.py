"Seed and data by name: opened once, limited, and read as asked."

import pickle
from dataclasses import replace

import pytest
import torch
from odd_values import MEANT, annotations, is_numeric, odd_values

from harmomoe.base.schema import parse
from harmomoe.config.source import Reading, Source

SPLITS = "train", "validation", "test"


@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return Source(str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool")


@pytest.fixture(scope="module")
def texts(tiny_decoder, tiny_texts):
    return Source(str(tiny_decoder), data=str(tiny_texts), pool="sayings")


def sizes(benchmark):
    "Samples of each split, the pool's first."
    domains = benchmark.pool, *benchmark.clients
    return [tuple(len(getattr(domain, split)) for split in SPLITS) for domain in domains]


def test_seed_and_data_are_opened_once_in_a_process(source):
    assert source.seed() is source.seed() is replace(source, clients="a").seed()
    assert source.benchmark(0) is source.benchmark(0)
    assert source.benchmark(0) is replace(source, reading=Reading(prompt="a {}")).benchmark(0)
    assert replace(source, clients="b,a").benchmark(0).clients[0].name == "b"


def test_a_source_can_be_sent_to_another_process(source):
    limited = replace(source, limit=(5, None, 3), reading=Reading(train=5))
    assert pickle.loads(pickle.dumps(limited)) == limited
    assert hash(pickle.loads(pickle.dumps(limited))) == hash(limited)


def test_a_limit_leaves_so_many_images_of_each_split(source):
    few = replace(source, limit=5).benchmark(0)
    assert sizes(few) == [(5, 5, 5), (5, 5, 5), (5, 4, 5), (5, 5, 5)]
    whole = source.benchmark(0)
    assert sizes(whole) == [(90, 12, 12), (30, 6, 12), (24, 4, 8), (32, 8, 12)]


def test_a_limit_by_split_leaves_the_pool_whole(source):
    few = replace(source, limit=(10, None, 3)).benchmark(0)
    assert sizes(few) == [(90, 12, 12), (10, 6, 3), (10, 4, 3), (10, 8, 3)]
    assert Reading(train=10, test=3).limit == (10, None, 3)
    assert Reading(validation=5).limit == (None, 5, None)
    assert Reading(pool=5).limit is None


def test_what_a_limit_leaves_is_drawn_by_the_random_state(source):
    few = replace(source, limit=5)
    one, same, other = (few.benchmark(state).pool.train["label"] for state in (0, 0, 1))
    assert one == same != other


def test_a_reading_changes_the_seed_that_is_opened(source):
    seed = replace(source, reading=Reading(prompt="one {} here", workers=2)).seed()
    assert (seed.prompt, seed.workers) == ("one {} here", 2)
    assert source.seed().prompt == "a picture of a {}"
    assert source.seed().identity != seed.identity
    half = replace(source, reading=Reading(embeds_in="bfloat16")).seed()
    assert half.embeds_in == torch.bfloat16
    assert source.seed().embeds_in is None


def test_a_reading_changes_how_a_language_model_is_asked(texts):
    reading = Reading(dtype="bfloat16", scoring="text", loss_on="all", max_length=64)
    seed, plain = replace(texts, reading=reading).seed(), texts.seed()
    assert (seed.scoring, seed.loss_on, seed.max_length) == ("text", "all", 64)
    assert {p.dtype for p in seed.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in plain.backbone.parameters()} == {torch.float32}


def test_samples_are_limited_by_what_a_reading_says():
    assert Reading().limit is None
    assert Reading(train=20).limit == (20, None, None)
    assert Reading(train=20, test=10).limit == (20, None, 10)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(dtype="float8"), "dtype is 'float8'.*'float32', 'bfloat16' or None"),
        (dict(dtype="float16"), "dtype is 'float16'.*'float32', 'bfloat16' or None"),
        (dict(embeds_in="half"), "embeds_in is 'half'.*'float32', 'bfloat16' or None"),
        (dict(train=0), "train is 0, but must be a whole number from 1 to 1,000,000,000 or None"),
        (dict(test=-1), "test is -1, but must be a whole number from 1"),
        (dict(train="many"), "train is 'many', but must be a whole number from 1"),
        (dict(max_length=1), "max_length is 1, but must be a whole number from 2"),
        (dict(workers=-1), "workers is -1, but must be a whole number from 0 to 1,024 or None"),
        (dict(scoring="guess"), "scoring is 'guess'.*'letter', 'text', 'cloze' or None"),
        (dict(loss_on="prompt"), "loss_on is 'prompt'.*'answer', 'all' or None"),
        (dict(prompt="a flower"), "prompt is 'a flower', but must hold {} once, for the class"),
        (dict(trains=3), "unknown field 'trains'. Did you mean 'train'"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        parse(Reading, wrong, "reading")


FIELDS = annotations(Source) | annotations(Reading)


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_is_one_error_with_the_fields_name(field):
    owner, name, hint = FIELDS[field]
    values = odd_values(hint) | (MEANT if is_numeric(hint) else {})
    assert len(values) >= 12
    for what, value in values.items():
        with pytest.raises(ValueError, match=f"^{name} is .*, but must be ") as caught:
            owner(**{name: value})
        assert type(caught.value) is ValueError and "\n" not in str(caught.value), what


@pytest.mark.parametrize(
    "limit",
    [(1,), (1, 2, 3, 4), (0, None, 1), (1, 2, "3"), (True, 1, 1), (1, 2.0, 3), (10**10, 1, 1)],
)
def test_a_limit_by_split_is_three_whole_numbers(limit):
    with pytest.raises(ValueError, match="^limit is .*, but must be three whole numbers from 1"):
        Source(limit=limit)


def test_a_prompt_is_refused_for_texts(texts):
    with pytest.raises(ValueError, match="prompt"):
        replace(texts, reading=Reading(prompt="a {}")).seed()


def test_a_language_models_reading_is_refused_for_images(source):
    with pytest.raises(ValueError, match="only for language models"):
        replace(source, reading=Reading(scoring="letter")).seed()
