import numpy as np

from anysize.planning.matching import anneal, falling


def random_costs(n, seed):
    cost = np.random.default_rng(seed).uniform(1, 2, (n, n)).astype(np.float32)
    return cost + cost.T


def least_cost(cost, free):
    if not free:
        return 0.0
    a, *rest = free
    return min(cost[a, b] + least_cost(cost, [c for c in rest if c != b]) for b in rest)


def test_finds_the_cheapest_matching():
    for seed in range(5):
        cost = random_costs(10, seed)
        first, second = anneal(
            cost, np.arange(5), np.arange(5, 10), falling(0.5, 600), np.random.default_rng(seed)
        )
        assert sorted([*first, *second]) == list(range(10))
        assert np.isclose(cost[first, second].sum(), least_cost(cost, list(range(10))), rtol=1e-5)


def test_at_zero_temperature_no_change_costs_more():
    cost = random_costs(40, 0)
    first, second = np.arange(20), np.arange(20, 40)
    before = cost[first, second].sum()
    rng = np.random.default_rng(1)
    for _ in range(60):
        first, second = anneal(cost, first, second, [0.0], rng)
        after = cost[first, second].sum()
        assert after <= before
        before = after
    assert before < 0.9 * cost[np.arange(20), np.arange(20, 40)].sum()


def test_a_single_two_and_an_odd_number_of_twos_keep_their_blocks():
    for num in (1, 3):
        cost = random_costs(2 * num, 0)
        first, second = anneal(
            cost, np.arange(num), np.arange(num, 2 * num), [1.0] * 9, np.random.default_rng(0)
        )
        assert sorted([*first, *second]) == list(range(2 * num))


def test_the_given_arrays_are_not_changed():
    first, second = np.arange(10), np.arange(10, 20)
    anneal(random_costs(20, 0), first, second, [9.0] * 50, np.random.default_rng(0))
    assert first.tolist() == list(range(10))
    assert second.tolist() == list(range(10, 20))
