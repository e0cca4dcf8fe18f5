"""The native module `gear`: what it has besides the ops, which ops/csrc/bindings/op_table.h lists.

A mutex lies in shared memory and is named by its address. It is robust (it survives a holder that
dies), shared by processes, and needs 128 bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

def mutex_init(address: int, /) -> None:
    """Make a free mutex at an address that no process uses."""

def mutex_lock(address: int, timeout_s: float, /) -> int:
    """Lock within a time; releases the GIL while it waits.

    Returns:
        0 locked; 1 locked, and its last holder died inside: repair what it guards, then call
        `mutex_consistent`; 2 timed out; 3 broken: a holder died and no process called
        `mutex_consistent`.
    """

def mutex_consistent(address: int, /) -> None:
    """Declare what the mutex guards repaired, after a lock that returned 1."""

def mutex_unlock(address: int, /) -> None:
    """Unlock; only by its holder."""

def mutex_owner(address: int, /) -> int:
    """Return the holder's process id, 0 if it is free; for messages only: it may change at once."""

class RowForm:
    """What the rows of a column look like: kind ("f", "i", "u" or "b"), bytes of an item, check,
    shape.
    """

    def __init__(self, kind: str, item_bytes: int, check: int, shape: Sequence[int]) -> None: ...

class Store:
    """Lists and writers of a store (store/row_allocator.py), over addresses that the caller keeps
    mapped.

    A refusal is negative.
    """

    def __init__(self, *, words: Mapping[str, int]) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

    def set_columns(self, columns: Sequence[tuple[int, int, RowForm]], /) -> None:
        """Set the columns: address, code of `rows`, form."""

    def set_row_arrays(self, arrays: Sequence[tuple[int, int]], /) -> None:
        """Set all that is stored by row: address of each array, bytes of its row."""

    def set_eviction(self, policy: int, column: int, dtype: int, /) -> None:
        """Set the EvictionCode, and for LOWEST_VALUE the index of a column and the code of its
        dtype.
        """

    def set_rate(self, unit: int, min_size: int, samples_per_insert: float, most: float, /) -> None:
        """Set the rate limiter; its unit is a RateUnitCode."""

    def add_stream(self, words: Mapping[str, int], /) -> None:
        """Add what writers read of a batch stream: addresses and sizes of its regions, by name."""

    def set_ends(self, terminated: int, truncated: int, /) -> None:
        """Set the addresses of the columns of these roles, of one byte a row; 0: there is none."""

    def set_moments(
        self,
        head: int,
        words: int,
        num_elements: int,
        columns: Sequence[tuple[int, int, int, int]],
        /,
    ) -> None:
        """Set addresses of the running moments; columns: index, code of the dtype, elements, first
        of all.
        """

    def stage_moments(self, slot: int, known: int, num_steps: int, /) -> None:
        """Count the steps [known, num_steps) of a slot, before they are committed.
        Wants the lock.
        """

    def reserve(self, num_rows: int, num_steps: int, /) -> int:
        """Take a slot and a run of rows. Wants the lock."""

    def reserve_with_removal(
        self,
        num_rows: int,
        num_steps: int,
        inserts: int,
        latest: tuple[int, int],
        samples: bool,
        selects: bool,
        has_victim: bool,
        has_released: bool,
        /,
    ) -> int:
        """Take a slot and a run of rows: free, move and evict for them as the retention defines.

        Args:
            num_rows: Rows.
            num_steps: Steps of the rows.
            inserts: Those that are inserted now.
            latest: Slot and generation of what the same writer has published last; slot -1:
                nothing. samples: Whether this process samples too, and must not wait for itself.
                selects: Whether selections over several nodes that are under way belong to living
                ranks. has_victim: Whether the caller can evict a trajectory. has_released: Whether
                the caller has just released what dead processes hold.
        Returns:
            The slot, or a refusal; after NEEDS_VICTIM and NEEDS_RELEASE the caller does so, and
            calls again. Wants the lock.
        """

    def may_insert(self, num_steps: int, /) -> bool:
        """Return whether the rate limiter admits so many steps of a trajectory. Wants the lock."""

    def free_retired(self) -> int:
        """Free the retired slots that are not pinned; return their number. Wants the lock."""

    def victim(self) -> int:
        """Return the slot that the policy evicts next; -1: there is none. Wants the lock."""

    def first_complete(self, link: int, /) -> int:
        """Return the first slot along a SlotLink whose trajectory does not grow; -1: none. Wants
        the lock.
        """

    def find_held(self, slots: int, count: int, found: int, /) -> None:
        """Find which slots are read, or stay until a pass ends: int64 and bool, by address. Wants
        the lock.
        """

    def find_priorities(self, slots: int, count: int, found: int, /) -> None:
        """Find the priorities of slots, or the highest of their steps, infinite for those newer
        than the latest selection: int64 and float32, by address. Wants the lock.
        """

    def are_frozen(self) -> bool:
        """Return whether a pass is under way in a stream, whose items stay. Wants the lock."""

    def make_run(self, num_rows: int, /) -> bool:
        """Move extents until a run of rows is free; return whether one is. Wants the lock."""

    def slide(self, slot: int, to: int, /) -> None:
        """Move an extent to free rows before it. Wants the lock."""

    def finish_move(self) -> None:
        """Finish the move that a dead process has left, if there is one. Wants the lock."""

    def grow(self, slot: int, num_steps: int, /) -> None:
        """Publish the first steps of an open trajectory, whose rows are written. Wants the lock."""

    def end(self, slot: int, truncated: bool, returns: bool, /) -> None:
        """End a trajectory; `returns`: its writer comes back for its rows. Wants the lock."""

    def note(self, slot: int, /) -> None:
        """Log a changed slot, and wake a sampler that waits. Wants the lock."""

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int, present: int, /) -> int:
        """Publish a reserved slot, with bits of its late columns; return its id. Wants the lock."""

    def retire(self, slot: int, /) -> None:
        """Evict a committed trajectory. Wants the lock."""

    def free(self, slot: int, /) -> None:
        """Give a slot and its rows back. Wants the lock."""

    def are_finite(self, columns: Sequence[Any], /) -> bool:
        """Return whether buffers, one per column, are of the stored form and finite where they must
        be.
        """

class RowTargets:
    """Places of rows: address and form of each column."""

    def __init__(self, columns: Sequence[tuple[int, RowForm]], /) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

class VectorSteps:
    """Takes plain steps of many environments into a writer's staging, and publishes them.

    Memory that it is given by address must be kept by its user.
    """

    def __init__(
        self,
        *,
        columns: Sequence[tuple[str, int, RowForm, bool]],
        ends: tuple[str, str],
        num_envs: int,
        length: int,
        words: Sequence[int],
        autoreset: str,
        truncated_column: int,
    ) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

    def set_store(
        self,
        *,
        of_store: int,
        of_columns: Sequence[int],
        most: int,
        whole: bool,
        begins: bool,
        cuts: bool,
        timeout: float,
    ) -> None:
        """Set the store of the steps, the rows of each column (0: late), and what the
        call may do.
        """

class GatherCall:
    """The arguments of `gather_` that stay the same, and the tensors whose versions it
    increments.
    """

    def __init__(
        self,
        *,
        outs: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor],
        counters: torch.Tensor,
        columns: Sequence[torch.Tensor],
        shifts: Sequence[torch.Tensor],
        gains: Sequence[torch.Tensor],
        spec: Sequence[int],
        pad_values: Sequence[float],
        threads: int,
        overwritten: Sequence[torch.Tensor],
    ) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

class TrajectoryReader:
    """Reads whole trajectories as programs give them, in the stored form of a store's columns.

    Args:
        store: Address of the `Store`, which its user keeps.
        columns: Name, bit if it is late, whether it is an end flag, and `PromptPart`, of each
            column.
        most: Steps of the longest trajectory; 0: any number.
        group: Index of the column of the groups' numbers; -1: there is none.
        mask: Index of the loss mask; -1: there is none.
        shares_prompts: Whether the prompt of a lease's group is stored once.
    """

    def __init__(
        self,
        *,
        store: int,
        columns: Sequence[tuple[str, int, bool, int]],
        most: int,
        group: int,
        mask: int,
        shares_prompts: bool,
    ) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

class Stream:
    """Makes the plain selections of a batch stream (sampling/batch_stream.py).

    Memory that it is given by address must be kept by its user.
    """

    def __init__(
        self, *, words: Mapping[str, int], rule: Sequence[int], timeout_s: float
    ) -> None: ...
    @property
    def address(self) -> int:
        """Where it lies, for direct calls; it must live as long as they use it."""

# Direct calls of the classes above, by address: for each trajectory, step or row.

def all_finite(values: int, bytes: int, type: int, /) -> bool:
    """Return whether no floating value, by address, is NaN or infinite; type: as in RowForm."""

def row_moments_add(
    values: int,
    dtype: int,
    num_rows: int,
    num_elements: int,
    keep: int,
    block_rows: int,
    moments: int,
    /,
) -> None:
    """Add rows to moments, block by block (ops/csrc/statistics/statistics.h); all by address."""

def pixels_count(
    pixels: int,
    keep: int,
    num_rows: int,
    outer: int,
    inner: int,
    last: int,
    bins: int,
    /,
) -> None:
    """Count pixel values by channel; all by address."""

def quantile_bins_find(
    values: int,
    dtype: int,
    num_elements: int,
    first: int,
    count: int,
    runs: int,
    num_runs: int,
    levels: int,
    num_levels: int,
    found: int,
    /,
) -> None:
    """Find the finite values around quantiles of elements [first, first + count); by address."""

def quantile_digits_count(
    values: int,
    dtype: int,
    num_rows: int,
    num_elements: int,
    first: int,
    count: int,
    keep: int,
    passes: int,
    num_passes: int,
    counts: int,
    /,
) -> None:
    """Count digits of the keys of elements [first, first + count); by address."""

def quantile_brackets_count(
    values: int,
    dtype: int,
    num_rows: int,
    num_elements: int,
    keep: int,
    bounds: int,
    num_of: int,
    most: int,
    below: int,
    keys: int,
    capacity: int,
    num_keys: int,
    /,
) -> None:
    """Count keys below brackets and in them, and collect those in them; all by address."""

def quantile_keys_select(
    keys: int,
    are_long: bool,
    num_keys: int,
    bounds: int,
    num_brackets: int,
    ranks: int,
    num_ranks: int,
    found: int,
    /,
) -> None:
    """Find the keys of ranks among collected keys; all by address."""

def store_add(reader: int, trajectory: Any, timeout_s: float, /) -> tuple[int, int, int] | None:
    """Make room for a trajectory, copy and commit it; takes the lock.

    Returns:
        Its id, or a refusal; its slot, -1 if none was reserved; and the bits of the late columns
        that it has. None: it is no dict of columns of the stored form, or of numbers and lists that
        are converted; nothing has happened.
    """

def group_write(
    reader: int, trajectories: Any, number: int, slots: Any, apart: Any, timeout_s: float, /
) -> int | None:
    """Make room for the trajectories of a lease's group and copy them; takes the lock.

    Args:
        trajectories: A list of what `store_add` takes; the group's column may be left out.
        number: The group's number.
        slots: Takes their slots, and the bits of their late columns. [2, n], int64.
        apart: Takes the steps of equal prompts that are stored again, and how many trajectories
            differ there by column; these are added. [1 + columns], int64.
    Returns:
        0; a refusal, with nothing reserved; or None as `store_add`, also for values that are not
        finite and must be.
    """

def group_shared_steps(reader: int, trajectories: Sequence[Any], apart: Any, /) -> list[int]:
    """Return how many steps of its prompt each trajectory of a group shares with the first one.

    Args:
        trajectories: Columns in the stored form, by name.
        apart: As `group_write`.
    """

def group_commit(store: int, slots: Any, present: Any, version: int, born: int, /) -> list[int]:
    """Commit written slots of a group; return their ids. Wants the lock.

    Args:
        slots: The slots. [n], int64.
        present: Bits of the late columns of each. [n], int64.
        version: Policy version of the group.
        born: Global batch that is selected next.
    """

def row_fits(targets: int, target: int, row: Any, /) -> bool:
    """Return whether one row is a buffer of a target's form, and finite where it must be."""

def rows_put(targets: int, columns: Sequence[Any], rows: Any, /) -> int:
    """Copy row i of each buffer to row rows[i] of its target; a negative row is left out.

    Returns:
        -1, or the index of the first buffer that is not of the target's form, or of which a row
        that is not left out holds NaN or an infinity and must not; then nothing has happened.
    """

def late_rows_write(
    store: int, column: int, bit: int, records: Any, values: Any, offset: int, slots: Any, /
) -> tuple[int, int, int]:
    """Write a late column of stored trajectories that lack its bit; list their slots. Wants the
    lock.

    Args:
        records: Resolutions, of which ids, slots and steps count. [n, 8], int64.
        values: Rows in the stored form, one trajectory after the other.
        offset: How many places before its row a value is; rows without one are zeros.
        slots: Takes the slots that were written. [n], int64.
    Returns:
        Slots written; trajectories that had the column; the first row of `values` that holds NaN or
        an infinity and must not, with nothing written, or -1.
    """

def late_rows_mark(store: int, bit: int, slots: Any, /) -> None:
    """Let rows that were written count as present, and log their slots. Wants the lock."""

def vector_step(steps: int, columns: Any, final: Any, observed: Any, publish: bool, /) -> int:
    """Take a step of all environments, store the trajectories that end, publish the others.

    Returns:
        0, or a sum: 1 where trajectories were completed, 2 where some that have ended are left to
        store, 4 where steps are left to publish; -1 if a column is not a buffer of the stored form,
        or the step is not plain otherwise: nothing has changed, unless trajectories of `most` steps
        were stored.
    """

def vector_publish(steps: int, /) -> bool:
    """Publish the steps of open trajectories; takes the lock. Returns whether none are left to
    Python.
    """

def gather_into(call: int, resolutions: torch.Tensor, n_steps: torch.Tensor | None, /) -> None:
    """Call `gather_` with the arguments of a GatherCall, by its address; releases the GIL."""

def stream_take(
    stream: int, number: int, alpha: int, beta: int, part: int, num_parts: int, call: int, /
) -> tuple[list[int], torch.Tensor, torch.Tensor | None] | None:
    """Make or find the selection of a global batch; take its samples part, part + num_parts, ...

    Takes the lock, and releases the GIL.

    Args:
        stream: Address of a Stream.
        number: Number of the global batch.
        alpha: Exponent of the priorities, Q62; 0 without priorities.
        beta: Exponent of the PER weights, Q62; 0 without priorities.
        part: Index of the first sample.
        num_parts: Divides the batch.
        call: Address of a GatherCall, which then gathers the samples, too; 0: none.
    Returns:
        The words of the selection, resolutions [n, 8] and, with priorities, PER weights [n], as new
        tensors. None: Python must make the selection; nothing has changed that it does not set
        again.
    """

def stream_report(
    stream: int, resolutions: torch.Tensor, priorities: torch.Tensor, batch: int, /
) -> bool:
    """Append new priorities of samples to this process's log, and publish them; takes the lock.

    Args:
        stream: Address of a Stream with priorities.
        resolutions: The samples. [n, 8], int64.
        priorities: Finite, at least 0; else RuntimeError, and nothing has changed. [n], float32.
        batch: The global batch that this process requested last.
    Returns:
        Whether it was done. False: nothing is published, since a tensor has another form or is
        not one in host memory, the log lacks room, or the lock was refused.
    """

def futex_notify(event: int, /) -> None:
    """Add one to a 32-bit word in shared memory, named by its address, and wake its waiters."""

def futex_wait(event: int, seen: int, timeout_s: float, /) -> int:
    """Return the word once it is not `seen`, or after the time or a signal; releases the GIL
    meanwhile.
    """

def fence() -> None:
    """Order this thread's accesses to memory before against those after."""

def map_guard_add(address: int, num_bytes: int, path: bytes, /) -> int:
    """Have a handler of SIGBUS write the path to standard error when an access to this memory
    raises it.

    The handler then hands the signal on to the one that was installed before.

    Returns:
        The entry for `map_guard_remove`; -1 where all 1,024 are taken, and nothing is written then.
    """

def map_guard_remove(entry: int, /) -> None:
    """Remove an entry, before its memory is unmapped."""

def read_ahead_add(address: int, num_bytes: int, most_bytes: int, /) -> int:
    """Mark the map of a file: gathers request its rows before they copy them.

    Args:
        address: First byte of the map.
        num_bytes: Its size.
        most_bytes: That a gather requests and has not copied yet.
    Returns:
        The entry for `read_ahead_remove`; -1 where all 256 are taken: its rows are read by page
        faults.
    """

def read_ahead_remove(entry: int, /) -> None:
    """Remove an entry, before its memory is unmapped."""
