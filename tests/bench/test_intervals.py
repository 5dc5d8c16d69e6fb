"From one accuracy for each random state to means, intervals and differences."

from functools import reduce
from operator import add

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from harmomoe.bench.intervals import (
    difference,
    half_width,
    interval_table,
    over_samples,
    percentages,
    with_intervals,
)
from harmomoe.models.evaluate import BITS, Measured, details, read_measured
from harmomoe.models.seed import Accuracy, BitsPerByte


def result(*correct, joint={}, public=()):
    own = {name: Accuracy(c, 20) for name, c in zip("xy", correct)}
    return Measured(own, joint, public).counts | dict(bytes=0)


RESULTS = dict(second=[result(10, 20), result(12, 16), result(11, 18)], first=[result(8, 8)] * 3)


@pytest.mark.parametrize("values", [[1.0, 2.0], [50.0, 50.0, 50.0], [61.2, 64.9, 60.1, 63.0]])
def test_half_width_is_students(values):
    low = high = 0
    if np.ptp(values):
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert half_width(np.array(values)) == pytest.approx((high - low) / 2)


def test_a_single_value_has_no_half_width():
    assert np.isnan(half_width([3.0]))


def test_percentages_have_a_line_for_each_method_and_random_state():
    table = percentages(RESULTS)
    lines = [(label, state) for label in ("second", "first") for state in range(3)]
    assert table.index.tolist() == lines
    assert table.index.names == ["method", "random_state"]
    assert table.columns.tolist() == ["x", "y", "average"]
    assert table.loc[("second", 1)].tolist() == [60, 80, 70]
    assert (table.loc["first"] == 40).all(axis=None)


@pytest.mark.filterwarnings("error")
def test_intervals_are_means_and_half_widths_and_differences_are_taken_state_by_state():
    shown = with_intervals(percentages(RESULTS), "first", 2)
    assert shown.index.tolist() == ["second", "first"]
    assert shown.columns.tolist() == ["x", "y", "average", "against first"]
    t = 4.302653  # Student's t, two degrees of freedom, 97.5 %
    assert shown.loc["second", "x"] == f"55.00 ± {t * 5 / 3**0.5:.2f}"
    assert shown.loc["first", "y"] == "40.00 ± 0.00"
    averages = np.array([75, 70, 72.5])
    half = t * averages.std(ddof=1) / 3**0.5
    wanted = [f"{averages.mean():.2f} ± {half:.2f}", f"+32.50 ± {half:.2f}"]
    assert shown.loc["second"].tolist()[2:] == wanted
    assert shown.loc["first", "against first"] == ""


@pytest.mark.filterwarnings("error")
def test_public_and_joint_have_intervals_as_the_other_columns():
    joint = [{"x": Accuracy(c, 20), "y": Accuracy(10, 20)} for c in (2, 4)]
    public = [(Accuracy(1, 4),), (Accuracy(2, 4), Accuracy(1, 4))]
    found = [result(10, 20, joint=j, public=p) for j, p in zip(joint, public)]
    table = percentages({"one": found})
    assert table.columns.tolist() == ["x", "y", "average", "public", "joint"]
    assert table["joint"].tolist() == [30, 35] and table["public"].tolist() == [25, 37.5]
    half = stats.t.ppf(0.975, 1) * 2.5
    assert with_intervals(table).loc["one", "joint"] == f"32.5 ± {half:.1f}"


def test_bits_per_byte_have_digits_enough():
    rows = [result(1, 2, public=(BitsPerByte(nats, 10),)) for nats in (7.0, 7.01)]
    shown = with_intervals(percentages({"one": rows}))
    assert shown.columns.tolist() == ["x", "y", "average", BITS]
    assert shown.loc["one", BITS] == f"{7.005 / np.log(2) / 10:.3f} ± 0.009"


@pytest.mark.filterwarnings("error")
def test_one_random_state_has_means_alone():
    single = with_intervals(percentages({"one": [result(1, 2)]}))
    assert isinstance(single, pd.DataFrame)
    assert single.loc["one"].tolist() == ["5.0", "10.0", "7.5"]


def test_of_two_that_vary_alike_the_difference_is_known_better_than_either():
    rows = dict(low=[result(8, 8), result(16, 16)], high=[result(9, 9), result(17, 17)])
    shown = with_intervals(percentages(rows), "low")
    assert shown.loc["high", "against low"] == "+5.0 ± 0.0"
    assert float(shown.loc["high", "average"].split("± ")[1]) > 100


def test_intervals_over_test_samples_are_those_of_each_state():
    shown = over_samples(RESULTS, "first", 2)
    assert shown.index.tolist() == ["second", "first"]
    assert shown.columns.tolist() == ["x", "y", "average", "against first"]
    # nothing was kept of a sample: the difference of means, without an interval
    assert shown.pop("against first").tolist() == ["+32.50", ""]
    for method, rows in RESULTS.items():
        each = [details(read_measured(row)) for row in rows]
        for column in shown:
            mean = np.mean([one[column]["percent"] for one in each])
            half = np.mean([np.ptp(one[column]["interval"]) / 2 for one in each])
            assert shown.loc[method, column] == f"{mean:.2f} ± {half:.2f}"


def test_bits_without_sums_over_texts_have_no_interval():
    known = BitsPerByte(693.1, 1000, 2, 240200.0, 346550.0, 500000.0)
    found = over_samples(
        {
            "known": [Measured(dict(x=known)).counts],
            "not": [Measured(dict(x=BitsPerByte(693.1, 1000))).counts],
        }
    )
    assert found.loc["not", "x"] == "1.000" and found.loc["known", "x"].startswith("1.000 ± 0.0")


def of_answers(**right):
    "A system by its right and wrong answers in each domain."
    domains = {name: Accuracy(sum(each), len(each)) for name, each in right.items()}
    return Measured(domains, each={name: list(each) for name, each in right.items()})


def of_texts(nats, sizes):
    "A system by the nats of each text."
    texts = [BitsPerByte(a, b).as_one for a, b in zip(nats, sizes)]
    return Measured(dict(x=reduce(add, texts)), each=dict(x=[one.kept for one in texts]))


def test_difference_of_answers_is_that_of_pairs():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 2, (2, 2, 300)).tolist()
    second[0] = first[0][:-9] + [0] * 9
    one, other = (of_answers(x=x, y=y) for x, y in (first, second))
    pairs = [np.array(x) - np.array(y) for x, y in zip(first, second)]
    mean, half = difference(one, other)
    assert mean == pytest.approx(100 * np.mean(pairs))
    assert half == pytest.approx(196 * np.hypot(*map(stats.sem, pairs)) / 2, rel=1e-4)
    assert difference(other, one) == pytest.approx((-mean, half))
    assert difference(one, one) == (0, 0)
    alike, _ = (Measured(dict(x=m.domains["x"]), each=m.each) for m in (one, other))
    assert difference(alike, other)[1] < details(alike)["x"]["interval"][1] / 20


def test_difference_to_a_system_that_knows_every_text_is_the_bits_with_their_interval():
    rng = np.random.default_rng(1)
    sizes = rng.integers(50, 900, 40).tolist()
    one = of_texts((rng.gamma(3, size=40) * sizes).tolist(), sizes)
    mean, half = difference(one, of_texts([0.0] * 40, sizes))
    assert mean == pytest.approx(one.domains["x"].bits, rel=1e-5)
    assert half == pytest.approx(np.ptp(one.domains["x"].interval) / 2, rel=1e-4)


def test_differences_over_test_samples_are_means_over_the_random_states():
    a, b, c = [1, 1, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 0, 1, 1]
    rows = dict(one=[of_answers(x=a), of_answers(x=c)], other=[of_answers(x=b)] * 2)
    shown = over_samples({name: [m.counts for m in of] for name, of in rows.items()}, "other")
    means, halves = zip(*map(difference, rows["one"], rows["other"]))
    assert means == (20, 0)
    assert shown["against other"].tolist() == [f"+10.0 ± {np.mean(halves):.1f}", ""]
    bits = {
        n: [of_texts(nats, [9, 8, 9]).counts]
        for n, nats in dict(p=[9, 7, 5.5], q=[8, 8, 5]).items()
    }
    assert over_samples(bits, "q").loc["p", "against q"].startswith("+0.028 ± 0.")


def test_tables_have_intervals_over_random_states_where_there_are_enough():
    states = dict(RESULTS, first=[result(8, 8), result(9, 8), result(7, 8)])
    over_states = with_intervals(percentages(states), "first")
    assert interval_table(states, "first").equals(over_states)
    few = {name: rows[:2] for name, rows in states.items()}
    shown = interval_table(few, "first")
    assert shown.equals(over_samples(few, "first"))
    # Student's of two random states would be ± 76 for `first`, and nothing was kept of a sample
    assert shown.loc["first", "average"] == over_samples(few).loc["first", "average"]
    assert shown["against first"].tolist() == ["+31.2", ""]
    assert list(shown) == list(over_states)


@pytest.mark.parametrize("own", [Accuracy(3, 4), BitsPerByte(9.0, 10, 1)], ids=["choices", "text"])
def test_the_public_column_has_one_name_whatever_the_interval_is_over(own):
    measured = Measured(dict(x=own), {}, (BitsPerByte(9.0, 10, 1),))
    results = {"p": [measured.counts] * 3}
    assert list(over_samples(results)) == list(with_intervals(percentages(results)))
