"""The text of a scheduled HLO module, parsed: computations, their instructions, and what an instruction says of itself.

Layer 0. A module is a list of computations, one of which is the entry; a computation is a list of instructions in the
order in which they run, each on a line `%name = type opcode(%operand, ...), attributes`. `ntpjax.hlo` reads it.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation|called_computations)"
    r"=(%[\w.\-]+|\{[^}]*\})"
)
# What JAX itself puts into an operation's name, around and between the scopes of the user.
_NOT_SCOPES = re.compile(
    r"|jvp|transpose|vmap|shard_map|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint|remat\w*"
    r"|custom_[jv][jv]p_call\w*"
)


@dataclass(frozen=True)
class Array:
    """The type of an array: "f32" and (2, 3)."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_bytes(self) -> int:
        """Its size; elements of less than a byte are packed.

        >>> Array("bf16", (2, 3)).num_bytes, Array("pred", (5,)).num_bytes, Array("f8e4m3fn", ()).num_bytes
        (12, 5, 1)
        """
        num_bits = 8 if self.dtype == "pred" else int("0" + "".join(re.findall(r"\d+", self.dtype)[:1]))
        return -(-num_bits * math.prod(self.shape) // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `type` and `attributes` are text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def operation(self) -> str:
        """The opcode; of an asynchronous start, that of what it starts."""
        return self.opcode.removesuffix("-start")

    @property
    def is_start(self) -> bool:
        return self.opcode.endswith("-start")

    @property
    def continues(self) -> bool:
        """Whether it goes on with, or ends, what another instruction started."""
        return self.opcode.endswith(("-update", "-done"))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, in order."""
        return tuple(Array(dtype, ints(dims)) for dtype, dims in _ARRAY.findall(self.type))

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs; for a loop the body alone, for a conditional its branches."""
        return tuple(name for names in _CALLED.findall(self.attributes) for name in _NAME.findall(names))

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs its body; None if that is not known."""
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(count[1]) if count else None

    @property
    def op_name(self) -> str:
        """The path of scopes and transformations under which JAX traced it; may be empty."""
        found = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


Computation = Mapping[str, Instruction]
"""Instructions by name, in the order in which they run."""


@dataclass(frozen=True)
class Program:
    """A module; `entry` is the name of the computation that a run of the program is."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Program:
    """Returns the module of a text.

    Raises:
      ValueError: if the text is not that of a scheduled module.
    """
    first_line = text.partition("\n")[0]
    if "is_scheduled=true" not in first_line:
        raise ValueError(f"the text (={first_line[:40]!r}...) must be a scheduled HLO module; take compiled.as_text().")
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = {}, ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header["name"], {})
            entry = header["name"] if header["entry"] else entry
        elif instruction := _LINE.match(line):
            name, type_, opcode, rest = instruction.groups()
            operands, _, attributes = rest.partition(")")
            current[name] = Instruction(name, type_, opcode, tuple(_NAME.findall(operands)), attributes)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first_line)
    return Program(computations, entry, num_devices=math.prod(map(int, counts)))


def ints(text: str) -> tuple[int, ...]:
    """Returns the numbers of "1,2"; none of ""."""
    return tuple(map(int, re.findall(r"\d+", text)))


def scope_of(op_name: str) -> str:
    """Returns the named scopes in an operation's name: without the operation, and without what JAX puts in itself.

    A scope that is called like one of those, "body" say, is not found. If several operations were combined, their names
    are joined by ":", and these are the scopes of the first.

    >>> scope_of("jit(step)/shard_map/transpose(jvp(layers))/while/body/closed_call/pre_sync/psum")
    'layers/pre_sync'
    >>> scope_of("jit(step)/while/body/(pre_sync/psum:post_sync/psum)")
    'pre_sync'
    """
    path = re.sub(r"\bp?jit\([^()]*\)", "", op_name.partition(":")[0]).rpartition("/")[0]
    return "/".join(part for part in re.split(r"[/()]+", path) if not _NOT_SCOPES.fullmatch(part))


def groups_of(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices of a collective with these attributes.

    They are written out, or as devices in an array that is transposed and cut into rows, or as axes of a mesh; if none
    is named, it is all devices.

    >>> groups_of(", replica_groups={{0,2},{1}}", 3)
    ((0, 2), (1,))
    >>> groups_of(", replica_groups=[2,4]<=[8]", 8)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> groups_of(", replica_groups=[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> groups_of(", replica_groups=mesh['a'=2,'b'=3] {'a'}", 6)
    ((0, 3), (1, 4), (2, 5))
    >>> groups_of(", replica_groups={}", 3)
    ((0, 1, 2),)

    Raises:
      ValueError: if they are written in another way.
    """
    if listed := re.search(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return tuple(map(ints, re.findall(r"\{([\d,]+)\}", listed[1]))) or (tuple(range(num_devices)),)
    if rows := re.search(r"\breplica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = ints(rows[2])
        return _rows(dims, ints(rows[3] or "") or tuple(range(len(dims))), int(rows[1]))
    if mesh := re.search(r"\breplica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',?)+)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes, summed = list(sizes), re.findall(r"'(\w+)'", mesh[2])
        order = [axes.index(axis) for axis in (*(axis for axis in axes if axis not in summed), *summed)]
        return _rows(tuple(sizes.values()), order, math.prod(sizes[axis] for axis in summed))
    raise ValueError(f"the groups of devices in {attributes[:200]!r} are written in a way that is not known here.")


def _rows(dims: Sequence[int], order: Sequence[int], row_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the devices 0, 1, 2, ... in an array [*dims], its dimensions put in `order`, cut into rows."""
    strides = [math.prod(dims[dim + 1 :]) for dim in order]
    indices = itertools.product(*(range(dims[dim]) for dim in order))
    devices = [sum(map(int.__mul__, index, strides)) for index in indices]
    return tuple(tuple(devices[start : start + row_size]) for start in range(0, len(devices), row_size))
