"""Runs per hour for several runs at once."""

from benchmarks.at_once import in_words, measured, written

FEW = ["method=fedavg", "method.epochs=1", "net=lenet", "device=cpu", "threads=1", "rounds=1000"]


def test_rounds_of_a_process_are_counted_after_its_warmup(tmp_path):
    data = written(tmp_path, 400)
    found = measured(1, 1, [*FEW, f"data={data}"], tmp_path, 0.5, 300)
    assert found["rounds_per_second"] > 0 and found["runs_per_hour"] == 18 * found["rounds_per_second"]


def test_a_process_that_ends_is_an_error(tmp_path):
    assert measured(1, 1, ["data=nowhere"], tmp_path, 0.5, 300) == {"error": "process 0 ended"}


def test_the_first_measurement_is_the_one_to_compare_with():
    one = {"processes": 1, "threads": 1, "warmup": 3.0, "runs_per_hour": 20.0}
    many = one | {"processes": 8, "runs_per_hour": 50.0}
    assert in_words(many, one) == "8 processes: 50.0 runs per hour, 2.50 times one (ready after 3 s)"
    assert in_words(one | {"error": "no"}, one) == "1 process, 1 at once: no"
