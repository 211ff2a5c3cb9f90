"""Spaces of configs: legal ones without running every rule on every combination, and made only when they are asked for."""

from __future__ import annotations

import itertools
import random

import pytest
from tuner_fakes import FAKE

from autotune.core.config import Config
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.kernels import KERNELS
from autotune.kernels.reads import Remembered
from autotune.kernels.space import Space, legal_configs

H200, L4, T4 = by_name("nvidia-h200"), by_name("nvidia-l4"), by_name("tesla-t4")
HEADS = Problem.parse("forward-fp16-b1-h8x2-q100-k100-d128")


def one_by_one(kernel, static, gpu):
    """What `legal_configs` gives, from the definition: every combination is asked for."""
    searched = [p for p in kernel.parameters if p.kind == "compile" and not p.derived]
    for combination in itertools.product(*(p.values for p in searched)):
        values = dict(zip((p.name for p in searched), combination))
        configs = [kernel.config(static, {**values, **launch}) for launch in kernel.launch_combinations(values)]
        if kernel.searched(static, values, gpu) and kernel.illegal(static, configs[0], gpu) is None:
            yield from configs


@pytest.mark.parametrize("kernel, text, gpu", [
    ("forward_simt", "forward-fp32-b1-h8x2-q100-k100-d128", T4), ("backward_mma", "backward-bf16-b1-h8x2-q100-k100-d256", H200),
    ("backward_fused", "backward-bf16-b1-h8x2-q100-k100-d80", H200)])
def test_legal_configs_are_those_that_no_rule_refuses_in_canonical_order(kernel, text, gpu):
    kernel, static = KERNELS[kernel], Problem.parse(text).static
    space = legal_configs(kernel, static, gpu)
    assert len(space) > 20 and list(space) == list(one_by_one(kernel, static, gpu))


@pytest.mark.parametrize("kernel, text, gpu", [
    ("forward_wgmma", "forward-bf16-b1-h8x2-q100-k100-d128", H200),
    ("forward_mma", "forward-fp16-b1-h8x2-q100-k100-d96-causal", T4),
    ("decode_mma", "decode-bf16-b1-h8x2-q1-k100-d64", H200), ("decode_mma", "decode-fp16-b1-h8x2-q1-k100-d128-page16", L4),
    ("backward_wgmma", "backward-bf16-b1-h8x2-q100-k100-d64", H200)])
def test_a_config_drawn_at_random_is_in_the_space_if_it_is_searched_and_no_rule_refuses_it(kernel, text, gpu):
    kernel, static, choose = KERNELS[kernel], Problem.parse(text).static, random.Random(0)
    space, seen = legal_configs(kernel, static, gpu), []
    assert all(kernel.illegal(static, config, gpu) is None for config in choose.sample(space, 100))
    for _ in range(1500):
        values = kernel.draw(choose.choice)
        config = kernel.config(static, values)
        seen.append(kernel.searched(static, values, gpu) and kernel.illegal(static, config, gpu) is None)
        assert (config in space) == seen[-1], config
    assert {True, False} == set(seen)


def test_a_rule_may_read_a_derived_value_and_runs_for_few_combinations(monkeypatch):
    runs = []

    def small(static, values, gpu):
        runs.append(values)
        return "too large" if values["smem_bytes"] > 60000 else None

    static = HEADS.static
    expected = [config for config in legal_configs(FAKE, static, H200) if config["smem_bytes"] <= 60000]
    monkeypatch.setattr(type(FAKE), "rules", (*FAKE.rules, small))
    assert list(legal_configs.__wrapped__(FAKE, static, H200)) == expected
    assert len(expected) > 1000 > len(runs)


def test_a_function_runs_again_only_where_it_read_something_else():
    runs = []

    def rule(values):
        runs.append(values)
        return values["b"] if values["a"] else values.get("undeclared", -1)

    remembered = Remembered(rule)
    some = [dict(a=a, b=b, c=c) for a, b, c in itertools.product((0, 1), range(3), range(10))]
    random.Random(0).shuffle(some)
    assert all(remembered(values) == (values["b"] if values["a"] else -1) for values in some)
    assert len(runs) <= 7 and set(remembered.names) == {"a", "b"}  # 2 x 3, and one before it was known that b is read


def test_a_function_that_asks_for_more_than_values_fails_rather_than_being_remembered_wrongly():
    with pytest.raises(AttributeError):
        Remembered(lambda config: config.text)({"a": 1})


def test_a_space_is_a_sequence_of_configs():
    space = FAKE.space(HEADS, H200)
    configs = list(space)
    assert len(configs) == len(space) == len(set(configs)) and all(type(config) is Config for config in configs[::97])
    assert [space[i] for i in range(0, len(space), 97)] == configs[::97] and space[-1] == configs[-1]
    assert list(space[10:500:7]) == configs[10:500:7] and list(space[-3:]) == configs[-3:]
    assert [space.place(config) for config in configs[::53]] == list(range(0, len(space), 53))
    with pytest.raises(IndexError):
        space[len(space)]
    assert not Space(FAKE, ()) and list(Space(FAKE, ())) == []


def test_a_space_knows_what_it_holds():
    space = FAKE.space(HEADS, H200)
    missing = Space.of(FAKE, space[::2])
    assert space[0] in missing and space[1] not in missing and missing.place(space[1]) is None
    assert FAKE.config(HEADS.static, {**space[0].values, "carveout": 100}) in space
    assert Config(FAKE.name, (*space[0].items[:-1], ("carveout", 7))) not in space
    assert Config("other", space[0].items) not in space


def test_a_space_of_given_configs_keeps_their_order():
    configs = list(FAKE.space(HEADS, H200)[::11])
    random.Random(0).shuffle(configs)
    space = Space.of(FAKE, configs)
    assert list(space) == configs and [space.place(config) for config in configs] == list(range(len(configs)))


def test_parts_of_a_space():
    space = FAKE.space(HEADS, H200)
    assert list(space.compiling(lambda config: config["warps"] == 4)) == [config for config in space if config["warps"] == 4]
    assert list(space.launching({"carveout": 50})) == [config for config in space if config["carveout"] == 50]
    assert not space.launching({"carveout": 7}) and list(space[:3]) + list(space) == list(Space.of(FAKE, space[:3]) + space)
