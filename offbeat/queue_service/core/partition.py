"""A partition: its groups by name, its schema as bits, its tasks."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.group import GroupTombstone, StoredGroup
from offbeat.queue_service.core.records import ColumnSpec, LostGroup, Part, PutReceipt, Schema
from offbeat.queue_service.core.tasks import Task
from offbeat.queue_service.errors import QueuePayloadLost, Redeclared
from offbeat.transfer_queue.errors import StaleHandle

_LISTS_KNOWN: Final = 1024  # distinct lists of columns whose mask is cached


class Partition:
    """Groups by name, in the order of their puts, and the tasks that read them."""

    def __init__(self, name: str, schema: Schema, remembered: int) -> None:
        self.name, self.schema, self.remembered = name, schema, remembered
        self.groups: dict[str, StoredGroup] = {}
        self.tasks: dict[str, Task] = {}
        self.gone: OrderedDict[str, GroupTombstone] = OrderedDict()
        self.rows = self.nbytes = self.lost = 0
        self.unreported: list[LostGroup] = []
        self._bit = {column.name: 1 << i for i, column in enumerate(schema.columns)}
        self._spec = {column.name: column for column in schema.columns}
        self._masks: dict[tuple[ColumnSpec, ...], int] = {}
        self._task_bits = {name: 1 << i for i, name in enumerate(schema.consumers)}
        # Tasks whose acks clear a group; 0 if acks never do
        self.consumers = (1 << len(schema.consumers)) - 1

    # --- columns -----------------------------------------------------------------------------

    def mask_of(self, columns: tuple[ColumnSpec, ...]) -> int:
        """Return the columns as bits.

        Raises:
            SchemaError: A column is not as the schema declares it; names the first.
        """
        mask = self._masks.get(columns)
        if mask is None:
            mask = 0
            for column in columns:
                want = self._spec.get(column.name)
                if want is None:
                    raise self._undeclared(column.name)
                if column != want:
                    raise SchemaError(column.name, _typed(column), _typed(want))
                if mask & self._bit[column.name]:
                    raise SchemaError(column.name, "given twice", "one payload a column")
                mask |= self._bit[column.name]
            if not mask:
                raise SchemaError("*", "no columns at all", "at least one column in a put")
            if len(self._masks) >= _LISTS_KNOWN:
                self._masks.clear()
            self._masks[columns] = mask
        return mask

    def mask_of_names(self, names: Iterable[str]) -> int:
        """Return the named columns as bits.

        Raises:
            SchemaError: A name is not declared; names the first.
        """
        mask = 0
        for name in names:
            if name not in self._bit:
                raise self._undeclared(name)
            mask |= self._bit[name]
        return mask

    def names_of(self, mask: int) -> tuple[str, ...]:
        """Return the names of these columns, in the order of the schema."""
        return tuple(name for name, bit in self._bit.items() if mask & bit)

    def _undeclared(self, name: str) -> SchemaError:
        return SchemaError(name, "not declared", f"one of {', '.join(self._bit)}")

    # --- groups ------------------------------------------------------------------------------

    def at(self, receipt: PutReceipt) -> StoredGroup:
        """Return the group of this receipt.

        Raises:
            QueuePayloadLost: It was reported lost.
            StaleHandle: It was cleared or replaced.
        """
        group = self.groups.get(receipt.group)
        if group is not None and group.generation == receipt.generation:
            return group
        gone = self.gone.get(receipt.group)
        if gone is not None and gone.lost and gone.generation == receipt.generation:
            raise QueuePayloadLost(receipt.group, receipt.attempt, gone.lost)
        attempt = None if group is None else group.receipt.attempt
        raise StaleHandle(receipt.group, receipt.attempt, attempt)

    def parts(self, group: StoredGroup, wanted: int) -> tuple[Part, ...]:
        """Return the payloads that hold any of the wanted columns, oldest first."""
        rows = group.receipt.rows
        every = ((group.first, 0, rows, group.payload), *group.more)
        return tuple(
            Part(self.names_of(columns), start, stop, payload)
            for columns, start, stop, payload in every
            if columns & wanted
        )

    def remember(self, group: StoredGroup, lost: str) -> None:
        """Keep a tombstone of a group for a while, to recognise a late put of it."""
        receipt, gone = group.receipt, self.gone
        gone[receipt.group] = GroupTombstone(receipt.attempt, group.generation, group.first, lost)
        gone.move_to_end(receipt.group)
        if len(gone) > self.remembered:
            gone.popitem(last=False)

    # --- tasks -------------------------------------------------------------------------------

    def task(self, name: str, columns: tuple[str, ...]) -> Task:
        """Return the task; a new one is offered every stored group.

        Raises:
            Redeclared: It claimed with another set of columns before.
            SchemaError: A column is not declared.
        """
        task = self.tasks.get(name)
        if task is None:
            need = self.mask_of_names(columns)
            bit = self._task_bits.setdefault(name, 1 << len(self._task_bits))
            task = Task(name, columns, need, bit)
            self.tasks[name] = task
            for group in self.groups.values():
                task.offer(group)
        elif task.columns != columns and task.need != self.mask_of_names(columns):
            raise Redeclared(
                f"task {name!r} of partition {self.name!r}",
                f"columns {', '.join(columns) or '(none)'}",
                f"columns {', '.join(task.columns) or '(none)'}",
            )
        return task


def _typed(column: ColumnSpec) -> str:
    return f"{'ragged' if column.ragged else 'dense'} {column.dtype}"
