"""`python -m ntpjax aot` on a small training program: what it prints for each degree, and what it refuses."""

import json
from pathlib import Path

import pytest

from ntpjax.cli import main

PROGRAM = '''
"""A training program whose step has three matmuls a layer, one sum over all devices, and at TP 8 one sync more."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NUM_LAYERS, SIZE = 4, 1024


@dataclass(frozen=True)
class Training:
    devices: tuple

    def on(self, topology, own_devices):
        assert len(self.devices) == sum(topology.degrees) and topology.nominal_tp == 8
        (own_degree,) = {topology.degrees[topology.owners[topology.devices.index(n)]] for n in own_devices}
        return Generation(self, topology, own_degree)


@dataclass(frozen=True)
class Generation:
    training: Training
    topology: object
    own_degree: int

    def traced(self, row, num_rows):
        degree, devices = self.own_degree, self.training.devices
        across = [list(range(len(devices)))]
        mesh, spec = Mesh(np.array(devices), ("devices",)), PartitionSpec("devices")

        def layer(carry, w):
            x, gradient, total = carry
            with jax.named_scope("sum_over_replicas"):
                done = lax.psum(gradient, "devices", axis_index_groups=across)
            if degree == 8:
                with jax.named_scope("pre_sync"):
                    done = lax.pmax(done, "devices")
            y = jnp.tanh(x @ w)
            return (jnp.tanh(y @ w.T), y.T @ x, jnp.tanh(total) + done), None

        def step(w, x):
            (x, _, total), _ = lax.scan(layer, (x[0], jnp.zeros_like(w[0, 0]), jnp.zeros_like(w[0, 0])), w[0])
            return x[None], total[None]

        def array(*dims):
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct((len(devices), *dims), row["tokens"].dtype, sharding=sharding)

        rows = num_rows[self.topology.degrees.index(degree)] * row["tokens"].shape[0]
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        return SimpleNamespace(grad_step=step.trace(array(NUM_LAYERS, SIZE, SIZE), array(rows, SIZE)))


def blueprint(path, overrides):
    return SimpleNamespace(
        degrees=(8, 8),
        training_on=lambda devices: Training(tuple(devices)),
        row={"tokens": jax.ShapeDtypeStruct((128,), jnp.bfloat16)},
        num_rows=lambda degrees: tuple(2 * degree for degree in degrees),
    )
'''
BF16 = 2
WEIGHTS = 4 * 1024 * 1024 * BF16


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return ["aot", "--target", "h200", "--program", str(program), "--config", "unused.yaml"]


def test_json_has_a_program_for_each_distinct_degree(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--degrees", "8,7,8", "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["target"], report["degrees"]) == ("h200", [8, 7, 8])
    assert [program["degree"] for program in report["programs"]] == [8, 7]
    for program, scopes in zip(
        report["programs"], ({"sum_over_replicas", "pre_sync"}, {"sum_over_replicas"}), strict=True
    ):
        syncs = [one for one in program["collectives"] if one["in_loop"]]
        assert {one["scope"] for one in syncs} == scopes
        assert {(one["shape"], one["executions"]) for one in syncs} == {("bf16[1024,1024]", 4)}
        assert program["num_syncs_in_loop"] == len(scopes)
        assert program["exposed_in_loop"] == sum(not one["matmuls"] for one in syncs)
        assert program["least_matmuls_hidden_under"] == min(len(one["matmuls"]) for one in syncs)
        memory, rows = program["memory"], 2 * program["degree"] * 128
        assert memory["arguments"] == WEIGHTS + rows * 1024 * BF16
        assert memory["aliases"] == 0
        assert memory["total"] == memory["arguments"] + memory["outputs"] + memory["temporaries"]
    assert report["programs"][1]["exposed_in_loop"] == 0
    assert "compiling the step of a TP-8 replica for h200" in shown.err
    assert "compiling the step of a TP-7 replica for h200" in shown.err


def test_the_table_shows_each_collective_and_the_summary(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--degrees", "7,7"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "sum_over_replicas" in line)
    assert [cell.strip() for cell in row.split("│")][1:8] == [
        *("sum_over_replicas", "all-reduce", "bf16[1024,1024]", "2.1 MB", "4", "yes", "yes")
    ]
    assert "TP 7: syncs_in_loop 1 exposed_in_loop 0 least_matmuls_hidden_under" in shown
    assert "memory a device: arguments" in shown


def test_a_program_that_says_nothing_of_its_step_is_refused(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "old.py"
    program.write_text(PROGRAM.replace("training_on=lambda devices: Training(tuple(devices))", "training_on=None"))
    assert main([*command, "--program", str(program), "--degrees", "8,7"]) == 2
    assert "must have `training_on`, `row` and `num_rows`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--degrees", "8,x"], "--degrees (='8,x') must be whole numbers"),
        (["--degrees", ""], "--degrees (='') must be whole numbers"),
        (["--degrees", "8,0"], "--degrees (='8,0') must each be at least 1"),
        (["--degrees", "8,9"], "--degrees (=8,9) must each be at most the nominal TP of the configuration (=8)"),
        (["--degrees", "8,7", "--target", "b300"], "`target` (='b300') must be one of 'h100', 'h200'"),
        (["--degrees", "8,7", "--program", "nowhere.py"], "--program nowhere.py is not a file"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_and_a_short_text(
    arguments: list[str], text: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *arguments]) == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert len(shown.splitlines()) == 1
