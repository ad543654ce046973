"""What a compiled program does, read from its text: its collectives, in the order they run, and its matmuls' FLOPs.

Layer 0. The text is `compiled.as_text()` of JAX, for a CPU or for CUDA. On CUDA a collective is a pair of instructions,
a start and a done, and what is scheduled between the two runs at the same time. A collective with no matmul in between
is *exposed*: the device waits for it. For example

    %sum = f32[1024] all-reduce-start(%gradient), replica_groups={{0,2},{1}}, ...
    %product = f32[64,64] custom-call(%a, %b), custom_call_target="__cublas$gemm", ...
    %summed = f32[1024] all-reduce-done(%sum)

is one all-reduce of 4096 bytes, between devices 0 and 2, that is hidden under one matmul. This is the compiler's
schedule, not a measurement: how long each of them takes is not in the text.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ntpjax.hlo_text import Computation, Instruction, Program, groups_of, ints, parse, scope_of

SYNC_SCOPES = ("pre_sync", "sum_over_replicas", "post_sync")
"""The named scopes of the three collectives that bring the gradients of a block together."""

_KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_MATMULS = ("dot", "ragged-dot", "convolution")
_MATMUL_LIBRARY = re.compile(r'custom_call_target="[^"]*(gemm|[mM]atmul|\$fmha)')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')


@dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
      name: of its instruction.
      kind: "all-reduce", "all-gather", ...
      scope: its `jax.named_scope`s, joined by "/". If the compiler combined several, the scope of one of them.
      shape: of what a device puts in, "f32[1024]"; joined by ", " if it is several arrays.
      num_bytes: size of that.
      groups: the devices that take part with each other, numbered in the order of the program's mesh; for a
        collective-permute the pairs (source, target).
      executions: how often a run of the program runs it; None if the trip count of a loop around it is not known. One
        in a branch of a conditional counts as if that branch were always taken.
      in_loop: whether it is in a loop.
      asynchronous: whether other work may run at the same time.
      matmuls: the instructions between its start and its end that run a matmul.
    """

    name: str
    kind: str
    scope: str
    shape: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...]
    executions: int | None
    in_loop: bool
    asynchronous: bool
    matmuls: tuple[str, ...]


def collectives(text: str) -> tuple[Collective, ...]:
    """Returns the collectives of a program in the order in which it runs them; those of a loop once, where it is.

    Raises:
      ValueError: if the text is not a scheduled HLO module, or writes groups of devices in an unknown way.
    """
    program = parse(text)
    return tuple(_collectives(program, program.entry, executions=1, in_loop=False))


def syncs_in_loop(found: Sequence[Collective], scopes: Sequence[str] = SYNC_SCOPES) -> tuple[Collective, ...]:
    """Returns the collectives that are in a loop and in one of these scopes."""
    return tuple(one for one in found if one.in_loop and not set(scopes).isdisjoint(one.scope.split("/")))


def exposed(found: Sequence[Collective], scopes: Sequence[str] = SYNC_SCOPES) -> tuple[Collective, ...]:
    """Returns those of `syncs_in_loop` that are hidden under no matmul."""
    return tuple(one for one in syncs_in_loop(found, scopes) if not one.matmuls)


def least_hidden(found: Sequence[Collective], scopes: Sequence[str] = SYNC_SCOPES) -> int | None:
    """Returns the fewest matmuls that one of `syncs_in_loop` is hidden under; None if there is no such collective."""
    return min((len(one.matmuls) for one in syncs_in_loop(found, scopes)), default=None)


def matmul_flops(text: str) -> int:
    """Returns the FLOPs of all matmuls of one run of a program on one device.

    A matmul costs two for each element of its result and each index that it sums over. A conditional costs what its
    most expensive branch does.

    Raises:
      ValueError: if the text is not a scheduled HLO module, or does not tell the cost of a matmul: one in a loop whose
        trip count is not known, or one of an operation or library that does not say what it contracts.
    """
    program = parse(text)
    return _computation_flops(program, program.entry)


def _collectives(program: Program, name: str, *, executions: int | None, in_loop: bool) -> Iterator[Collective]:
    computation = program.computations[name]
    for instruction in computation.values():
        if instruction.operation in _KINDS and not instruction.continues:
            found = _collective(program, computation, instruction)
            yield replace(found, executions=executions, in_loop=in_loop)
        elif not instruction.continues:
            is_loop = instruction.operation == "while"
            trips = instruction.trip_count if is_loop else 1
            inner = None if executions is None or trips is None else executions * trips
            for called in instruction.called:
                for found in _collectives(program, called, executions=inner, in_loop=in_loop or is_loop):
                    yield _started(program, computation, instruction, found)


def _collective(program: Program, computation: Computation, instruction: Instruction) -> Collective:
    arrays = [array for operand in instruction.operands for array in computation[operand].arrays]
    op_name = instruction.op_name
    if not op_name:
        # What the compiler combined has no name, but its reducer is that of one of the parts, and named after it.
        reducers = [each for called in instruction.called for each in program.computations[called].values()]
        op_name = next((each.op_name for each in reducers if each.opcode == "parameter"), "")
    found = Collective(
        name=instruction.name,
        kind=instruction.operation,
        scope=scope_of(op_name),
        shape=", ".join(map(str, arrays)),
        num_bytes=sum(array.num_bytes for array in arrays),
        groups=groups_of(instruction.attributes, program.num_devices),
        executions=1,
        in_loop=False,
        asynchronous=False,
        matmuls=(),
    )
    return _started(program, computation, instruction, found)


def _started(program: Program, computation: Computation, instruction: Instruction, found: Collective) -> Collective:
    """Returns a collective as it is if `instruction` runs it: asynchronous if that is a start."""
    if not instruction.is_start or '"is_sync":true' in instruction.attributes:
        return found
    matmuls = _matmuls_until_done(program, computation, instruction)
    scope = found.scope or scope_of(instruction.op_name)
    return replace(found, name=instruction.name, scope=scope, asynchronous=True, matmuls=matmuls)


def _matmuls_until_done(program: Program, computation: Computation, start: Instruction) -> tuple[str, ...]:
    """Returns the instructions with a matmul from a start to its end; none if it does not end in this computation."""
    instructions = tuple(computation.values())
    pending, matmuls = {start.name}, []
    for instruction in instructions[instructions.index(start) + 1 :]:
        if instruction.continues and not pending.isdisjoint(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return tuple(matmuls)
            pending.add(instruction.name)
        elif _runs_matmul(program, instruction):
            matmuls.append(instruction.name)
    return ()


def _runs_matmul(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction always runs a matmul; a conditional does if all its branches do."""
    if instruction.continues:
        return False
    if _is_matmul(instruction):
        return True
    called = [
        any(_runs_matmul(program, inner) for inner in program.computations[name].values())
        for name in instruction.called
    ]
    return all(called) and bool(called) if instruction.operation == "conditional" else any(called)


def _is_matmul(instruction: Instruction) -> bool:
    if instruction.operation == "custom-call":
        return bool(_MATMUL_LIBRARY.search(instruction.attributes))
    return instruction.operation in _MATMULS


def _computation_flops(program: Program, name: str) -> int:
    computation = program.computations[name]
    return sum(_flops(program, computation, instruction) for instruction in computation.values())


def _flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    if instruction.continues:
        return 0
    if _is_matmul(instruction):
        return _one_matmul_flops(computation, instruction)
    called = [_computation_flops(program, name) for name in instruction.called]
    if instruction.operation == "conditional":
        return max(called)
    if instruction.operation != "while" or not any(called):
        return sum(called)
    if instruction.trip_count is None:
        raise ValueError(f"`{instruction.name}` is a loop with matmuls and no known trip count; use `lax.scan`.")
    return instruction.trip_count * sum(called)


def _one_matmul_flops(computation: Computation, instruction: Instruction) -> int:
    contracted = _CONTRACTED.search(instruction.attributes)
    if contracted is None or instruction.operation == "ragged-dot":
        what = f"`{instruction.name}` ({instruction.opcode} {instruction.attributes[:80]})"
        raise ValueError(f"{what} does not say what it contracts; count the FLOPs of this program in another way.")
    lhs = computation[instruction.operands[0]].arrays[0]
    # A library's result may be a tuple of the product and its workspace.
    result = instruction.arrays[0]
    return 2 * math.prod(result.shape) * math.prod(lhs.shape[dim] for dim in ints(contracted[1]))
