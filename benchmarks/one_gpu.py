"""What nonuniform training costs on one GPU, where it has nothing to do: `python benchmarks/one_gpu.py`.

A model of 1.06 billion parameters, sequences of 2,048 tokens, bfloat16 computation, parameters, gradients and AdamW
moments in float32, the same clipping. Three contenders, each in a process of its own, one after the other:

    ntpjax   one replica of TP 1, through `Training`
    plain    the same model as one `jax.jit` of a scan over layers, with the same rematerialisation
    torch    the same sizes in PyTorch: `torch.compile`, `scaled_dot_product_attention`, autocast, fused AdamW

For each: tokens a second, model FLOP utilisation (MFU) and peak memory. The FLOPs of a token are 6 N + 6 L S A: N
parameters without the input embedding, which is looked up; L layers, S positions, A = heads x head_dim. The second term
is attention (often given as 12 L S A, which counts the scores that the causal mask throws away). The peak of an H100 or
H200 is 989e12 dense bfloat16 FLOPs a second; of other devices no MFU is given.

    --tiny      a tiny model on the CPU: the same code, figures without meaning
    --remat     what a layer keeps for its backward pass: none (keeps all), dots, full (keeps its input only)
    --rows      sequences a step
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.tensor_parallel import OneDevice
from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax.backward import StepOptions
from ntpjax.optimizer import adamw
from ntpjax.partition import partition_tree
from ntpjax.topology import Topology
from ntpjax.training import Training, deal_rows

PyTree = Any
Rows = dict[str, np.ndarray]
Step = Callable[[], Any]
"""Starts a training step and returns its mean loss, which `float` waits for."""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
MOST_SECONDS_A_CONTENDER = 150
COMPUTE_DTYPE = "bfloat16"
CLIP_NORM = 1.0
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE = 3e-4

ONE_BILLION = TransformerConfig(
    vocab_size=32_768,
    d_model=2048,
    num_layers=18,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_dim=5632,
    ffn_unit=128,
    tie_embeddings=False,
)
TINY = TransformerConfig(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=32,
    ffn_unit=8,
    tie_embeddings=False,
)


@dataclass(frozen=True)
class Work:
    """What every contender does."""

    config: TransformerConfig
    seq_len: int
    rows: int
    remat: Any
    num_rounds: int
    steps_a_round: int

    @property
    def num_params(self) -> int:
        shapes = jax.eval_shape(TransformerFunctions(self.config).init, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    @property
    def tokens_a_step(self) -> int:
        return self.rows * self.seq_len

    @property
    def flops_a_token(self) -> float:
        config = self.config
        num_multiplied = self.num_params - config.vocab_size * config.d_model
        return 6.0 * (num_multiplied + config.num_layers * self.seq_len * config.num_heads * config.head_dim)

    def batch(self) -> Rows:
        shape = (self.rows, self.seq_len + 1)
        tokens = np.random.default_rng(0).integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return {"tokens": tokens, "weights": np.ones((self.rows, self.seq_len), np.float32)}


@dataclass(frozen=True)
class Figures:
    """What was measured. Memory is None where the device does not count it."""

    device: str
    step_times_s: list[float]
    peak_bytes: int | None
    first_loss: float
    last_loss: float

    @property
    def step_time_s(self) -> float:
        return float(np.median(self.step_times_s))

    def line(self, work: Work) -> str:
        tokens_per_s = work.tokens_a_step / self.step_time_s
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in self.device), None)
        mfu = f"MFU {tokens_per_s * work.flops_a_token / peak:.1%}" if peak else f"no MFU (no peak for {self.device!r})"
        memory = "not counted" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.1f} GiB"
        return (
            f"{tokens_per_s:,.0f} tokens/s, {mfu}, peak memory {memory}; step {self.step_time_s * 1e3:.1f} ms "
            f"(rounds {min(self.step_times_s) * 1e3:.1f} to {max(self.step_times_s) * 1e3:.1f}), "
            f"loss {self.first_loss:.3f} to {self.last_loss:.3f}"
        )


# -- contenders -----------------------------------------------------------------------------------------------------


def jax_optimizer(model: TransformerFunctions, params: PyTree) -> tuple[optax.GradientTransformation, PyTree]:
    """AdamW that decays matrices only, and how `params` (arrays or shapes) are cut for TP 1."""
    partitions = partition_tree(params, model.rules, nominal_tp=1)
    return adamw(optax.constant_schedule(LEARNING_RATE), partitions, **ADAMW), partitions


def ntpjax_step(work: Work) -> tuple[Step, Callable[[], Any]]:
    model = TransformerFunctions(work.config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    optimizer, partitions = jax_optimizer(model, shapes)
    options = StepOptions(compute_dtype=COMPUTE_DTYPE, remat=work.remat)
    training = Training.of(model, shapes, partitions, optimizer, options=options, clip_norm=CLIP_NORM)
    here = training.on(Topology.of_degrees((1,)))
    state, rows = here.draw(model.init, jax.random.key(0)), deal_rows(work.batch(), (work.rows,))

    def step() -> Any:
        nonlocal state
        state, sums = here.step(state, rows)
        return sums.loss / sums.weight

    return step, lambda: jax.block_until_ready(state)


def plain_step(work: Work) -> tuple[Step, Callable[[], Any]]:
    model = TransformerFunctions(work.config)
    params = jax.jit(model.init)(jax.random.key(0))
    optimizer, _ = jax_optimizer(model, params)
    opt_state, batch, tp = jax.jit(optimizer.init)(params), work.batch(), OneDevice(work.config.num_units)

    def narrow(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(COMPUTE_DTYPE), tree)

    def layer(x: jax.Array, layer: PyTree) -> tuple[jax.Array, None]:
        return model.layer(narrow(layer), x, tp), None

    policies = {"dots": jax.checkpoint_policies.dots_saveable, "full": jax.checkpoint_policies.nothing_saveable}
    if work.remat != "none":
        layer = jax.checkpoint(layer, policy=policies[work.remat], prevent_cse=False)

    def loss_sum(params: PyTree, batch: Any) -> tuple[jax.Array, jax.Array]:
        ends = narrow(params["ends"])
        x, _ = jax.lax.scan(layer, model.embed(ends, batch, tp), params["layers"])
        return model.loss(ends, x, batch, tp)

    def train_step(params: PyTree, opt_state: PyTree, batch: Any) -> tuple[PyTree, PyTree, jax.Array]:
        (loss, weight), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, batch)
        scale = jnp.minimum(1, CLIP_NORM / (optax.tree.norm(grads) / weight)) / weight
        updates, opt_state = optimizer.update(jax.tree.map(lambda grad: grad * scale, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / weight

    compiled, state = jax.jit(train_step, donate_argnums=(0, 1)), (params, opt_state)
    del params, opt_state

    def step() -> jax.Array:
        nonlocal state
        *state, loss = compiled(*state, batch)
        return loss

    return step, lambda: jax.block_until_ready(state)


def torch_step(work: Work) -> tuple[Step, Callable[[], Any]]:
    torch = importlib.import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    config, device = work.config, "cuda" if torch.cuda.is_available() else "cpu"
    heads, head_dim, d_model, half = config.num_heads, config.head_dim, config.d_model, config.head_dim // 2
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    angle = torch.arange(work.seq_len)[:, None] * config.rope_theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(device), angle.sin().to(device)

    def rotate(x: Any) -> Any:
        """RoPE of [B, heads, S, head_dim] in float32."""
        left, right = x.float().split(half, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.RMSNorm(d_model, eps=config.norm_eps)
            self.ffn_norm = nn.RMSNorm(d_model, eps=config.norm_eps)
            self.qkv = nn.Linear(d_model, 3 * heads * head_dim, bias=False)
            self.out = nn.Linear(heads * head_dim, d_model, bias=False)
            self.gate_up = nn.Linear(d_model, 2 * config.ffn_dim, bias=False)
            self.down = nn.Linear(config.ffn_dim, d_model, bias=False)

        def forward(self, x: Any) -> Any:
            qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, heads, head_dim)).transpose(1, 3)
            q, k, v = qkv.unbind(2)
            mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(config.vocab_size, d_model)
            self.layers = nn.ModuleList([Layer() for _ in range(config.num_layers)])
            self.norm = nn.RMSNorm(d_model, eps=config.norm_eps)
            self.head = nn.Linear(d_model, config.vocab_size, bias=False)

        def forward(self, tokens: Any) -> Any:
            # The residual stream is bfloat16, as in JAX; autocast alone would leave it float32.
            x = self.embedding(tokens[:, :-1]).to(getattr(torch, COMPUTE_DTYPE))
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x)).flatten(0, 1).float()
            return functional.cross_entropy(logits, tokens[:, 1:].flatten())

    with torch.device(device):
        model = Model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=config.init_std)
    matrices, scales = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": ADAMW["weight_decay"]}, {"params": scales, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        fused=device == "cuda",
    )
    compiled, tokens = torch.compile(model), torch.from_numpy(work.batch()["tokens"]).long()

    def step() -> Any:
        with torch.autocast(device, dtype=getattr(torch, COMPUTE_DTYPE)):
            loss = compiled(tokens.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, torch.cuda.synchronize if device == "cuda" else lambda: None


CONTENDERS = {"ntpjax": ntpjax_step, "plain": plain_step, "torch": torch_step}


def device_and_peak_bytes(contender: str) -> tuple[str, int | None]:
    if contender == "torch":
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return "cpu", None
        return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    device = jax.devices()[0]
    return device.device_kind, (device.memory_stats() or {}).get("peak_bytes_in_use")


def measure(contender: str, work: Work) -> Figures:
    """Times rounds of steps, after a first step, which compiles, and a round to warm up."""

    def say(text: str) -> None:
        print(f"{contender:7} {text}", flush=True)

    start = time.perf_counter()
    step, wait = CONTENDERS[contender](work)
    wait()
    say(f"parameters and moments made in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    first_loss, times, last_loss = float(step()), [], None
    wait()
    say(f"first step, with compilation, {time.perf_counter() - start:.1f} s")
    for index in range(1 + work.num_rounds):
        start = time.perf_counter()
        for _ in range(work.steps_a_round):
            last_loss = step()
        wait()
        if index:
            times.append((time.perf_counter() - start) / work.steps_a_round)
    device, peak_bytes = device_and_peak_bytes(contender)
    figures = Figures(device, times, peak_bytes, first_loss, float(last_loss or 0))
    say(figures.line(work))
    return figures


# -- the processes --------------------------------------------------------------------------------------------------


def why_not(contender: str, is_tiny: bool) -> str | None:
    """Why a contender does not run here, if it does not."""
    if contender != "torch":
        return None
    if importlib.util.find_spec("torch") is None:
        return "not installed, skipped"
    code = "import torch; print(torch.cuda.is_available())"
    has_cuda = "True" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    return None if has_cuda or is_tiny else "no CUDA, skipped"


def in_own_process(contender: str, arguments: list[str], limit_s: float | None) -> Figures | None:
    """Runs a contender, whose lines go to this process's output; None if it failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        command = [sys.executable, __file__, *arguments, "--contender", contender, "--result", str(result)]
        try:
            subprocess.run(command, timeout=limit_s, check=True)
        except subprocess.TimeoutExpired:
            print(f"{contender}: stopped after {limit_s} s", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{contender}: failed with exit code {error.returncode}", flush=True)
        else:
            return Figures(**json.loads(result.read_text()))
    return None


def has_gpu() -> bool:
    # Not in this process: it would hold memory of the GPU while the contenders run.
    code = "import jax; print(jax.default_backend())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.split()[-1] == "gpu"


def compare(work: Work, arguments: list[str], is_tiny: bool) -> int:
    print(
        f"{work.num_params:,} parameters, {work.rows} sequences of {work.seq_len} tokens a step, {COMPUTE_DTYPE}, "
        f"remat {work.remat}; {work.flops_a_token / 1e9:.2f} GFLOPs a token (6 N + 6 L S A)",
        flush=True,
    )
    found: dict[str, Figures] = {}
    failed = False
    for contender in CONTENDERS:
        reason = why_not(contender, is_tiny)
        if reason:
            print(f"{contender}: {reason}", flush=True)
            continue
        figures = in_own_process(contender, arguments, None if is_tiny else MOST_SECONDS_A_CONTENDER)
        if figures is None:
            failed = True
        else:
            found[contender] = figures
    for other in ("plain", "torch"):
        if "ntpjax" in found and other in found:
            ratio = found[other].step_time_s / found["ntpjax"].step_time_s
            print(f"ntpjax_over_{other} {ratio:.3f} (tokens a second; above 1: ntpjax is faster)", flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--contender", choices=tuple(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        work = Work(TINY, 32, options.rows or 2, options.remat, num_rounds=2, steps_a_round=2)
    else:
        work = Work(ONE_BILLION, 2048, options.rows or 8, options.remat, num_rounds=5, steps_a_round=10)
    if options.contender:
        options.result.write_text(json.dumps(asdict(measure(options.contender, work))))
        return 0
    if not options.tiny and not has_gpu():
        print("no GPU found by JAX; run with --tiny to try the code on the CPU.", file=sys.stderr)
        return 2
    return compare(work, sys.argv[1:], options.tiny)


if __name__ == "__main__":
    sys.exit(main())
