"""Layout-free checkpoints with Orbax: every array has its logical shape, and plain Orbax reads them.

A checkpoint of step `k` is the folder `k/` with two items: `state`, a dict of `params` and `opt_state`, each a dict of
dotted names to arrays, and `meta`, a JSON object (step, samples seen, random key, config). Nothing in it tells on how
many devices it was made.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp

from ntpjax.partition import path_name

PyTree = Any


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


@final
class Checkpoints:
    """The checkpoints in one folder. Writing is asynchronous: one save at a time, and the next one waits for it."""

    def __init__(self, directory: Path, *, keep_last: int, process: int = 0) -> None:
        # Orbax needs an absolute path, and the working directory may change later.
        self._directory = directory.absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            enable_async_checkpointing=True,
            create=False,  # Orbax makes no folder for one process of several
            # Each process reads and writes on its own: what is saved is logical arrays on the host of one of them.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
            ),
            # Made in the background, a folder that cannot be made is waited for, by threads that outlive the save.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        handlers: dict[str, Any] = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        self._saving: int | None = None

    def path(self, step: int) -> Path:
        return self._directory / str(step)

    def latest_step(self) -> int | None:
        """The newest step that is complete on disk, after a running save has ended."""
        self.wait()
        return max(filter(self.is_complete, self._manager.all_steps(read=True)), default=None)

    def is_complete(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there, whole."""
        return (self.path(step) / "state").is_dir() and (self.path(step) / "meta" / "metadata").is_file()

    def save(self, step: int, state: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Hands the state after `step` steps to the writer.

        Args:
          state: trees of host arrays with logical shapes; they must not change until the save is complete.

        An incomplete checkpoint of that step, left by others, is set aside.

        Raises:
          CheckpointError: if the previous save failed, or Orbax refuses this one, as for a step that is there.
        """
        self.wait()
        if self.path(step).exists() and not self.is_complete(step):
            self._set_aside(step)
        named = {name: named_leaves(tree) for name, tree in state.items()}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(named), meta=ocp.args.JsonSave(dict(meta)))
        try:
            # `force`: else Orbax skips a step that is not above the newest one without a word.
            accepted = self._manager.save(step, args=items, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"step {step} cannot be saved in {self._directory}: {error}") from error
        if not accepted:
            raise CheckpointError(f"Orbax refused to save step {step} in {self._directory}, without a reason.")
        self._saving = step

    def saved(self) -> int | None:
        """The step whose save has ended since the last call, if any; does not wait.

        Raises:
          CheckpointError: if that save failed.
        """
        return None if self._manager.is_saving_in_progress() else self.wait()

    def wait(self) -> int | None:
        """Waits for the running save; returns its step, unless it was returned before.

        Raises:
          CheckpointError: if it failed.
        """
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._directory} was not written: {error}"
            ) from error
        return step

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`.

        Raises:
          CheckpointError: if there is no complete checkpoint of that step.
        """
        self._require_complete(step)
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, shapes: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of `step` as host arrays.

        Args:
          shapes: trees like the state, whose leaves have the logical `shape` and `dtype` to expect.

        Raises:
          CheckpointError: if there is no complete checkpoint of that step, or naming every array that is missing or
            has another shape or type.
        """
        self._require_complete(step)
        wanted = {name: named_leaves(tree) for name, tree in shapes.items()}
        self._require_same(step, wanted)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        arguments = ocp.args.PyTreeRestore(wanted, restore_args=as_numpy)
        found = self._manager.restore(step, args=ocp.args.Composite(state=arguments))["state"]
        return {
            name: jax.tree.unflatten(jax.tree.structure(tree), [found[name][key] for key in wanted[name]])
            for name, tree in shapes.items()
        }

    def close(self) -> None:
        """Waits for the running save and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _require_complete(self, step: int) -> None:
        if not self.is_complete(step):
            raise CheckpointError(f"there is no complete checkpoint {self.path(step)}.")

    def _set_aside(self, step: int) -> None:
        """Moves a folder that is in the way, instead of deleting what may be of use to somebody."""
        folder = self._directory / "set-aside"
        folder.mkdir(exist_ok=True)
        self.path(step).rename(folder / f"{step}-{time.time_ns()}")
        self._manager.reload()

    def _require_same(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        metadata = self._manager.item_metadata(step)["state"]
        if metadata is None:
            raise CheckpointError(f"{self.path(step)} has no readable state.")
        problems = []
        for name in sorted(wanted.keys() | metadata.tree.keys()):
            leaves, saved = wanted.get(name, {}), metadata.tree.get(name, {})
            for key in sorted(leaves.keys() | saved.keys()):
                here = (tuple(leaves[key].shape), np.dtype(leaves[key].dtype).name) if key in leaves else "nothing"
                there = (tuple(saved[key].shape), np.dtype(saved[key].dtype).name) if key in saved else "nothing"
                if here != there:
                    problems.append(f"{name} '{key}': the checkpoint has {there}, this run has {here}")
        if problems:
            raise CheckpointError("\n  ".join([f"{self.path(step)} does not fit this run:", *problems]))


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by dotted path, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}
